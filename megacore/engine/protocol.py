"""The interface between the pipeline runtime, which computes gradients, and an
engine, which reduces them and steps.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from megacore.distributed.shard import TensorSlice
from megacore.tensor_parallel.gradient import WeightGradPart


@dataclass(frozen=True)
class StepStatistics:
    """Figures of a step, on the device. Reading one is the caller's choice, and the only synchronisation."""

    grad_norm: Tensor  # global, before clipping
    skipped: Tensor  # steps skipped so far: their loss or gradient was not finite, or a spike


class Engine(Protocol):
    """Holds optimizer state, reduces gradients and steps.

    A rank has one engine, for the parameters of all its stages.
    """

    # the modules that compute each chunk's forward: its stage, or the engine's wrapper of it
    modules: Sequence[nn.Module]

    def loss_gradient(self, scale: float | Tensor) -> Tensor:
        """The gradient with which the loss's backward starts: `scale`, times the loss scale under fp16."""

    def root(self, outputs: Sequence[Tensor]) -> Any:
        """The point where `backward` starts: a chunk's outputs and losses, which it
        does not keep in memory.
        """

    def backward(self, chunk: int, root: Any, gradients: Sequence[Tensor], *, last: bool) -> None:
        """Runs backward from a chunk's outputs and losses, given their gradients.

        After the `last`, the chunk's gradients are complete.
        """

    def backward_input(self, chunk: int, root: Any, gradients: Sequence[Tensor]) -> list[WeightGradPart]:
        """The first half of `backward`: the gradients of a chunk's input and small parameters.

        Returns what `backward_weight` needs.
        """
        raise AssertionError(f"{type(self).__name__} runs backward whole")

    def backward_weight(self, chunk: int, parts: list[WeightGradPart], *, last: bool) -> None:
        """The second half: the gradients of weights, from `parts`, which it empties.

        For `last` see `backward`.
        """
        raise AssertionError(f"{type(self).__name__} runs backward whole")

    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold the same parameters: data ranks,
        and tensor ranks where partial.
        """

    def reduce_tied(self) -> None:
        """Sums the gradients of each parameter that stages of several ranks share, in the order of
        `Topology.shared`, which all have.
        """

    def gradients(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        """This rank's pieces of the gradients by parameter name (see `shard.piece_key`), not copied.

        Between the reductions and `step` they are the global sums.

        It is for proofs and diagnosis. Under fp16 they contain the loss scale.
        """

    def step(self, lr: float, loss: Tensor | None = None) -> StepStatistics:
        """Clips by the global norm, updates the parameters, and clears the gradients.

        A bad step changes no parameter. `loss`, that of the global batch on every rank's device, helps to
        recognise one.
        """

    def settle(self) -> None:
        """Waits for what `step` left under way.

        Call it before anything but a stage reads parameters, and at the end.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Within it, parameters have the values that evaluate: averages of weights, where there are some.

        Collective.
        """
        return nullcontext()

    def tensors(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        """This rank's pieces of all tensors of a checkpoint, by logical name (see `shard.piece_key`).

        To restore, copy into them and pass them to `load_state`.
        """

    def state(self) -> dict[str, Any]:
        """The engine's other state, as JSON values."""

    def load_state(self, state: dict[str, Any], tensors: Mapping[str, tuple[Tensor, TensorSlice]]) -> None:
        """Restores `state()`, and the values that were copied into the result of `tensors()`."""

    def close(self) -> None:
        """Settles, and ends what the engine has begun, perhaps with the mesh's groups.

        It is the last call.
        """
