"""The seam between who computes gradients (the pipeline runtime) and who reduces them and steps (an engine)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from megacore.distributed.shard import Box


@dataclass(frozen=True)
class StepStatistics:
    """What a step did, on the device: reading it is the caller's choice, and the only synchronisation."""

    grad_norm: Tensor  # global, before clipping
    skipped: Tensor  # steps skipped so far: their loss or gradient was not finite, or a spike


class Engine(Protocol):
    """Holds optimizer state, reduces gradients and steps. One engine a rank, for the parameters of all of its stages."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """What computes the forward of each chunk: its stage, or what the engine wraps around it."""

    def loss_gradient(self, scale: float) -> Tensor:
        """The gradient that the loss's backward starts with: `scale`, times the loss scale under fp16."""

    def root(self, output: Tensor) -> Any:
        """What `backward` will start from, without keeping the output itself in memory."""

    def backward(self, chunk: int, root: Any, gradient: Tensor, *, last: bool) -> None:
        """Runs backward from a chunk's output, given its gradient; `last` says that the chunk's gradients are complete behind it."""

    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold the same parameters: data ranks, and tensor ranks where partial."""

    def reduce_tied(self) -> None:
        """Sums the gradients of the embeddings that the first and the last stage share."""

    def gradients(self) -> dict[str, tuple[Tensor, Box]]:
        """This rank's pieces of the gradients by parameter name (see `shard.piece_key`), live: between the reductions and
        `step`, of the global sums.

        For proofs and diagnosis; under fp16 they carry the loss scale.
        """

    def step(self, lr: float, loss: Tensor | None = None) -> StepStatistics:
        """Clips by the global norm, updates the parameters, and clears the gradients. A bad step changes no parameter: `loss`, the
        global batch's on every rank's device, helps to tell one."""

    def settle(self) -> None:
        """Waits for what `step` left under way; before parameters are read by other than the stages, and before the end."""

    def tensors(self) -> dict[str, tuple[Tensor, Box]]:
        """This rank's pieces of everything a checkpoint holds, by logical name (see `shard.piece_key`); copying
        into them, and then handing them to `load_state`, restores."""

    def state(self) -> dict[str, Any]:
        """The numbers beside the tensors, as JSON values."""

    def load_state(self, state: dict[str, Any], tensors: Mapping[str, tuple[Tensor, Box]]) -> None:
        """Restores `state()` and what was copied into the result of `tensors()`."""

    def close(self) -> None:
        """Settles, and ends whatever the engine began beside the mesh, and perhaps the mesh's groups; the last call."""
