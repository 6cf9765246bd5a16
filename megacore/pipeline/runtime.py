"""Executes a lowered schedule on one rank, over the stages that it holds. Every action has one method.

There is one runtime for every schedule and layout: gradient accumulation on one device is the one-stage
schedule.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacore.distributed.communicator import Group, Work
from megacore.distributed.events import Listener, Listeners
from megacore.engine.protocol import Engine
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.pipeline.schedule import IN_FLIGHT, Action, Op, Plan
from megacore.tensor_parallel.gradient import WeightGradPart

Key = tuple[int, int]  # microbatch, chunk
Flows = dict[str, Tensor]  # what crosses a cut, by name (`model.layers.crossing`), or its gradients
# messages by who takes them
TAKES = {Op.FORWARD: Op.RECV_ACTIVATION, Op.BACKWARD: Op.RECV_GRADIENT, Op.BACKWARD_INPUT: Op.RECV_GRADIENT}


class Runtime:
    """Runs plans on this rank's stages.

    Between a microbatch's forward and its backward the autograd graph stays in memory. The inputs (for their
    gradients) and the *edges* of outputs and losses (to start backward from) hold it; an output itself is
    freed once it is sent. If backward is split, its first half frees all but the tensors of each weight's
    part, and the second half frees these when they are added up.

    An input that later stages read too is an output as well: its gradient is what this stage's layers and the
    later ones give.
    """

    def __init__(
        self, stages: Sequence[Stage], engine: Engine | None, pp: Group, listeners: Listeners | None = None
    ) -> None:
        self.stages, self.engine, self.pp = stages, engine, pp
        self.listeners = Listeners() if listeners is None else listeners
        self.modules: Sequence[nn.Module] = stages if engine is None else engine.modules
        self.device = stages[0].device
        self.loss_dtype = torch.float64 if stages[0].config.train.precision == "fp64" else torch.float32
        self.peak_live = 0  # the most forwards whose activations, or a part of them, were held at once
        self.methods: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_ACTIVATION: lambda action: self._send(action, self.outputs),
            Op.RECV_ACTIVATION: lambda action: self._receive(action, self.inputs),
            Op.SEND_GRADIENT: lambda action: self._send(action, self.input_gradients),
            Op.RECV_GRADIENT: lambda action: self._receive(action, self.output_gradients),
            Op.REDUCE_GRADIENTS: lambda _: self._engine.reduce_gradients(),
            Op.REDUCE_TIED: lambda _: self._engine.reduce_tied(),
        }

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None, "a plan with backward needs an engine"
        return self.engine

    def run(
        self, plan: Plan, batch: Sequence[Microbatch], weights: Mapping[str, float | Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Executes this rank's part of `plan` over `batch`; collective over the pipeline.

        `weights`: of each loss's sum in what backward differentiates, such as 1 / targets of the global
        batch.
        Returns the sum of each loss over this rank's layers and microbatches, a scalar on the device; zero
        where it has none.
        """
        self.batch, weights = batch, weights or {}
        own = dict.fromkeys(name for stage in self.stages for name in stage.losses)
        self.losses = {
            name: torch.zeros((), device=self.device, dtype=self.loss_dtype)
            for name in dict.fromkeys([*weights, *own])
        }
        # What backward starts with is known before the first forward.
        starts = own if any(stage.training for stage in self.stages) else ()
        self.loss_gradients = {
            name: self._engine.loss_gradient(weights[name]).to(self.loss_dtype) for name in starts
        }
        self.inputs: dict[Key, Flows] = {}  # received or taken over, leaves of their microbatch's graph
        self.outputs: dict[Key, Flows] = {}  # to be sent
        self.roots: dict[Key, Any] = {}  # where the engine starts backward
        self.starts: dict[Key, tuple[list[str], list[str]]] = {}  # of which outputs and losses these are
        self.parts: dict[Key, list[WeightGradPart]] = {}  # of weights' gradients, which wait for their action
        self.output_gradients: dict[Key, Flows] = {}  # received or taken over
        self.input_gradients: dict[Key, Flows] = {}  # to be sent
        self.arriving: dict[tuple[Op, Key], list[Work]] = {}  # messages
        # by the rank that receives
        self.sending: dict[int, deque[list[tuple[Work, Tensor]]]] = defaultdict(deque)
        self.chunk_of = {stage: chunk for chunk, stage in enumerate(plan.placement[self.pp.rank])}
        self.stage_of = plan.placement[self.pp.rank]
        for action in plan.actions[self.pp.rank]:
            self._wait_for_message(action)
            self.listeners.notify(Listener.on_action_begin, action)
            self.methods[action.op](action)
            self.listeners.notify(Listener.on_action_end, action)
        for under_way in self.sending.values():
            while under_way:
                wait_all(under_way.popleft())
        return self.losses

    def _forward(self, action: Action) -> None:
        key, chunk = (action.microbatch, action.chunk), action.chunk
        stage, flow = self.stages[chunk], self.inputs.get((action.microbatch, action.chunk), {})
        for name, x in flow.items():
            x.requires_grad_(stage.training and stage.takes[name].gradient)
        with torch.set_grad_enabled(stage.training):
            outputs, losses = self.modules[chunk](
                dict(flow), self.batch[action.microbatch], gradients=self.loss_gradients
            )
        for name, loss in losses.items():
            self.losses[name] += loss.detach()
        if not stage.last:
            self._hand_over(
                self.inputs, self.outputs, key, 1, {name: x.detach() for name, x in outputs.items()}
            )
        if stage.training:
            starts = {
                name: x for name, x in outputs.items() if x.requires_grad and stage.gives[name].gradient
            }
            self.starts[key] = list(starts), list(losses)
            self.roots[key] = self._engine.root([*starts.values(), *losses.values()])
            self.peak_live = max(self.peak_live, len(self.roots) + len(self.parts))
        else:
            self.inputs.pop(key, None)

    def _backward(self, action: Action) -> None:
        key = action.microbatch, action.chunk
        self._engine.backward(action.chunk, self.roots.pop(key), self._start_gradients(key), last=action.last)
        self._pass_back(key)

    def _backward_input(self, action: Action) -> None:
        key = action.microbatch, action.chunk
        self.parts[key] = self._engine.backward_input(
            action.chunk, self.roots.pop(key), self._start_gradients(key)
        )
        self._pass_back(key)

    def _backward_weight(self, action: Action) -> None:
        self._engine.backward_weight(
            action.chunk, self.parts.pop((action.microbatch, action.chunk)), last=action.last
        )

    def _start_gradients(self, key: Key) -> list[Tensor]:
        """What backward starts with: the gradients of outputs, from the stage behind,
        and of the stage's own losses.
        """
        (outputs, losses), given = self.starts.pop(key), self.output_gradients.pop(key, {})
        return [*(given[name] for name in outputs), *(self.loss_gradients[name] for name in losses)]

    def _pass_back(self, key: Key) -> None:
        """Hands the gradients of a chunk's inputs to the stage before.

        One that nothing was computed from is zero.
        """
        if not self.stages[key[1]].first:
            flow = {name: x for name, x in self.inputs.pop(key).items() if x.requires_grad}
            grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in flow.items()}
            self._hand_over(self.output_gradients, self.input_gradients, key, -1, grads)

    def _hand_over(
        self, here: dict[Key, Flows], away: dict[Key, Flows], key: Key, step: int, x: Flows
    ) -> None:
        """Gives a chunk's results to the next stage (`step` 1) or the one before (-1): directly if this
        rank holds it, else to be sent.
        """
        m, chunk = key
        neighbour = self.chunk_of.get(self.stage_of[chunk] + step)
        if neighbour is None:
            away[key] = x
        else:
            here[m, neighbour] = x

    def _receive(self, action: Action, held: dict[Key, Flows]) -> None:
        """Posts the receives of a message's tensors. The action that takes the message waits for them."""
        assert self.pp.communicator is not None
        key, stage, source = (
            (action.microbatch, action.chunk),
            self.stages[action.chunk],
            self.pp.ranks[action.peer],
        )
        differentiated = {name: flow for name, flow in stage.gives.items() if flow.gradient}
        held[key] = stage.empty(stage.takes if action.op is Op.RECV_ACTIVATION else differentiated)
        self.arriving[action.op, key] = [self.pp.communicator.receive(x, source) for x in held[key].values()]

    def _wait_for_message(self, action: Action) -> None:
        """Waits for what an action takes from another rank."""
        if action.op in TAKES:
            for work in self.arriving.pop((TAKES[action.op], (action.microbatch, action.chunk)), ()):
                work.wait()

    def _send(self, action: Action, held: dict[Key, Flows]) -> None:
        """Posts the sends of a message's tensors, whose buffers stay until they are
        complete: see `schedule.IN_FLIGHT`.

        (Asking `is_completed` would not tell: gloo completes a send only when it is waited for.)
        """
        communicator, under_way = self.pp.communicator, self.sending[action.peer]
        assert communicator is not None
        while len(under_way) >= IN_FLIGHT:
            wait_all(under_way.popleft())
        tensors = [x.contiguous() for x in held.pop((action.microbatch, action.chunk)).values()]
        under_way.append([(communicator.send(x, self.pp.ranks[action.peer]), x) for x in tensors])


def wait_all(sent: list[tuple[Work, Tensor]]) -> None:
    """Waits for the sends of a message's tensors."""
    for work, _ in sent:
        work.wait()
