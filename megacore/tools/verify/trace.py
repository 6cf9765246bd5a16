"""Records what every module computes for every microbatch, forward and backward, in the
order of execution.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megacore.distributed.axes import AXES, EXPERT_AXES
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.cpu import is_widened
from megacore.distributed.events import Listener
from megacore.distributed.shard import shard_of
from megacore.expert_parallel.experts import Experts
from megacore.kernels.dispatch import Implementation
from megacore.kernels.linear_cross_entropy import adds_in_fp32
from megacore.model.flow import CROSS_ENTROPY, Loss
from megacore.model.stage import Stage
from megacore.pipeline.schedule import COMPUTE, Action, Op
from megacore.tensor_parallel.gradient import MainGradient, main_gradient_of

EXPERTS = {axis.name for axis in EXPERT_AXES} - {axis.name for axis in AXES}
WRAPPED = ("logits", "loss")  # the last layer's methods


class SeenGradient(MainGradient):
    """Stands before a main gradient, for layers to add to; notes what they add, each product computed
    once more: in fp64 if it is exact.
    """

    def __init__(self, main: MainGradient) -> None:
        super().__init__(main.total, main.deferral)
        self.main = main
        self.parts: list[Tensor] = []

    def add_rows(self, grad: Tensor, rows: Tensor, implementation: Implementation = "auto") -> None:
        part = torch.zeros(self.total.shape, dtype=torch.float64, device=grad.device)
        self.parts.append(part.index_put_((rows,), grad.double(), accumulate=True))
        self.main.add_rows(grad, rows, implementation)

    def add_product(self, grad: Tensor, x: Tensor) -> None:
        # not rounded to x's dtype
        exact = x.dtype == self.total.dtype or is_widened(x) or adds_in_fp32(x.device.type, x.dtype)
        a, b = (grad.double(), x.double()) if exact else (grad, x)
        self.parts.append((a.t() @ b).double())
        self.main.add_product(grad, x)

    def add(self, part: Tensor) -> None:
        self.parts.append(part.double())
        self.main.add(part)


class GradientWatch:
    """Shows `see` a parameter's gradient from each backward pass, fp64, until `remove()`: what
    autograd gives and what layers add.
    """

    def __init__(self, parameter: nn.Parameter, see: Callable[[Tensor], Any]) -> None:
        self.parameter, self.main = parameter, main_gradient_of(parameter)
        self.see, self.parts = see, list[Tensor]()
        if self.main is not None:
            seen = SeenGradient(self.main)
            self.parts, parameter.main_gradient = seen.parts, seen  # type: ignore[attr-defined]

        def complete(gradient: Tensor | None) -> None:
            """Autograd calls it once a backward pass, however often the parameter was used; with
            None if layers added everything.
            """
            if gradient is not None:
                self.parts.append(gradient.double())
            self._show()

        self.handle = parameter.register_hook(complete)

    def _show(self) -> None:
        shape = self.parameter.shape
        nothing = torch.zeros(shape, dtype=torch.float64, device=self.parameter.device)
        self.see(sum((part.view(shape) for part in self.parts), nothing))
        self.parts.clear()

    def look(self) -> None:
        """Shows what was added behind backward passes of inputs, if anything was."""
        if self.parts:
            self._show()

    def remove(self) -> None:
        """Shows no more."""
        self.handle.remove()
        if self.main is not None:
            self.parameter.main_gradient = self.main  # type: ignore[attr-defined]


class Trace(Listener):
    """A context that records the activations of a rank's stages and their gradients.

    Without a folder it does nothing.

    An event's key is ``order|microbatch|direction|module|what|visit``. The direction is forward, recompute (a
    forward pass within backward) or backward. `what` is an input, an output, or the name of a parameter, such
    as "weight" (then its gradient is recorded).
    """

    on_error = "raise"

    def __init__(
        self, stages: Sequence[Stage], folder: Path | None, rank: int = 0, samples: Group = SOLO
    ) -> None:
        """`samples`: the ranks that read different samples, as they are dealt to them by turns."""
        self.stages, self.folder, self.rank, self.samples = stages, folder, rank, samples
        self.events: dict[str, Tensor] = {}
        self.visits: Counter[tuple[Any, ...]] = Counter()
        self.handles: list[Any] = []
        self.microbatch, self.phase, self.chunk = 0, "forward", 0
        self.watches: list[GradientWatch] = []
        # parameters' gradients of split backwards: microbatch, chunk, place
        self.halves: dict[tuple[int, int, str, str], Tensor] = {}

    def enter(self, microbatch: int, phase: str, chunk: int = 0) -> None:
        """Notes that `phase` (an op's value) of the microbatch with this index in the global batch begins."""
        self.microbatch, self.phase, self.chunk = microbatch, phase, chunk

    def on_action_begin(self, action: Action) -> None:
        if action.op in COMPUTE:
            self.enter(
                action.microbatch * self.samples.size + self.samples.rank, action.op.value, action.chunk
            )

    def on_action_end(self, action: Action) -> None:
        if action.op in COMPUTE:
            self.leave()

    def leave(self) -> None:
        """Notes that the phase ends. A split backward has given its gradients when its second half ends."""
        if self.phase == Op.BACKWARD_WEIGHT.value:
            for watch in self.watches:
                watch.look()
            for part in [part for part in self.halves if part[:2] == (self.microbatch, self.chunk)]:
                self._add(self.microbatch, "backward", *part[2:], self.halves.pop(part))

    def note(
        self, module: str, what: str, value: Any, *, partial: bool = False, has_gradient: bool = True
    ) -> None:
        """Records a tensor, and its gradient when backward computes it.

        `partial`: the tensor is declared to be this rank's part of a sum, so one process has no such value to
        compare it with. The gradient of a part is the gradient of the sum. `has_gradient`: whether the
        gradient that backward computes has an equal on one process, and is no part of a sum.
        """
        if self.folder is None or not isinstance(value, Tensor):
            return
        microbatch = self.microbatch
        direction = "forward" if self.phase == "forward" else "recompute"
        self._add(microbatch, direction, module, f"part of {what}" if partial else what, value)

        def record_gradient(gradient: Tensor | None) -> None:
            if gradient is not None:  # autograd calls hooks with None where an operation gives no gradient
                self._add(microbatch, "backward", module, what, gradient)

        if value.requires_grad and has_gradient and self.phase == "forward":
            value.register_hook(record_gradient)

    def _add(self, microbatch: int, direction: str, module: str, what: str, value: Tensor) -> None:
        event = (microbatch, direction, module, what)
        key = "|".join(map(str, (len(self.events), *event, self.visits[event])))
        self.visits[event] += 1
        # As a dtype that numpy has, without rounding.
        self.events[key] = (
            value.detach()
            .to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)
            .contiguous()
        )

    def __enter__(self) -> "Trace":
        if self.folder is None:
            return self
        for stage in self.stages:
            for name, module in stage.named_modules():
                if module is not stage and not getattr(module, "bare", False):
                    self._watch(stage.logical_name(name), module, stage)
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad:
                    self._watch_gradient(name, parameter)
            for head in stage.behind:
                for name in wrapped_methods(head):
                    self._wrap(head, name, stage)
        return self

    def _watch_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Records a parameter's gradient, unless it is a part of a microbatch's
        gradient, which has no equal elsewhere.
        """
        if {along.axis for along in shard_of(parameter).along} & EXPERTS:  # of other ranks' tokens too
            return
        users = sum(parameter is own for stage in self.stages for own in stage.parameters())
        if set(shard_of(parameter).partial_over) - {axis.name for axis in AXES if axis.samples} or users > 1:
            return
        module, _, what = name.rpartition(".")

        def see(gradient: Tensor) -> None:
            if self.phase == Op.BACKWARD.value:
                self._add(self.microbatch, "backward", module, what, gradient)
            else:
                part = self.microbatch, self.chunk, module, what
                self.halves[part] = self.halves.get(part, 0.0) + gradient

        self.watches.append(GradientWatch(parameter, see))

    def _watch(self, name: str, module: nn.Module, stage: Stage) -> None:
        # Behind what a layer writes, it returns the sums of its losses.
        written, losses = (len(module.writes), module.losses) if module in stage.layers else (0, ())
        has_gradient = not getattr(module, "has_partial_gradient", False)

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            for i, value in enumerate(args):
                self.note(name, f"input {i}" if i else "input", value, has_gradient=has_gradient)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for i, value in enumerate(output if isinstance(output, tuple) else (output,)):
                if losses and i >= written:
                    loss = losses[i - written]
                    self.note(name, f"loss {loss.name}", value, partial=is_partial(loss, stage))
                else:
                    self.note(name, f"output {i}" if i else "output", value)

        # of the last, rows come from other ranks
        if not isinstance(module, nn.ModuleDict | nn.ModuleList | Experts):
            # A plain module's region is noted as the code around it sees it: before and after exchanges.
            self.handles += [
                module.register_forward_pre_hook(before, prepend=True),
                module.register_forward_hook(after),
            ]

    def _wrap(self, head: nn.Module, name: str, stage: Stage) -> None:
        method = getattr(head, name)
        losses: Sequence[Loss] = head.losses if name == "loss" else ()  # type: ignore[assignment]
        main = [loss for loss in losses if loss.name == CROSS_ENTROPY.name] or losses
        partial = any(is_partial(loss, stage) for loss in main)

        def traced(*args: Any, **options: Any) -> Tensor:
            value = method(*args, **options)
            self.note(name, "output", value, partial=partial)
            return value

        setattr(head, name, traced)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.folder is None:
            return
        for handle in (*self.handles, *self.watches):
            handle.remove()
        for stage in self.stages:
            for head in stage.behind:
                for name in wrapped_methods(head):
                    delattr(head, name)
        if error is None:
            save_file(
                {key: torch.atleast_1d(value) for key, value in self.events.items()},
                self.folder / f"trace_{self.rank}.safetensors",
            )


def wrapped_methods(head: nn.Module) -> list[str]:
    """The names of the last layer's methods that are traced; one of a user's own need not have all."""
    return [name for name in WRAPPED if hasattr(head, name)]


def is_partial(loss: Loss, stage: Stage) -> bool:
    """Whether a rank's sum of a loss is over its own tokens only: with context ranks always, and under
    `parallel.sequence` if the loss says so.
    """
    return stage.cp.size > 1 or (loss.sp and stage.sequence)
