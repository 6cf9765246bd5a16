"""Which checkpoint a run goes on from: looked for by rank 0, proved whole by all ranks together before any of it is used."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megacore.checkpoint import MeshRanks, Ranks, Reader
from megacore.distributed.comm import broadcast_text
from megacore.distributed.mesh import Mesh
from megacore.errors import CheckpointError
from megacore.train.inputs import Inputs


def choose(inputs: Inputs, mesh: Mesh) -> tuple[Reader, bool] | None:
    """The checkpoint that `inputs` name, or of several the newest that is whole, and whether only its weights are meant; None where
    nothing is named. Collective.

    Raises:
        CheckpointError: on every rank: what was named is damaged, or everything that could be resumed is.
    """
    ranks = MeshRanks(mesh)
    while True:
        # Rank 0 looked: others might see a shared file system in another state.
        whole, weights = (broadcast_text(str(path or ""), mesh.world, mesh.device) for path in (inputs.checkpoint, inputs.weights))
        if not whole and not weights:
            return None
        try:
            return proved(Path(whole or weights), ranks, partial(mesh.progress, "checking a checkpoint")), not whole
        except CheckpointError as damage:
            if not whole:
                raise
            if refusal := together(ranks, partial(inputs.fall_back, damage)):
                raise refusal from None


def proved(path: Path, ranks: Ranks, note: Callable[[], None]) -> Reader:
    """The checkpoint in folder `path`, every file of which one rank has read and compared with its digests. Collective.
    `note` is called meanwhile: it may take longer than a hang.

    Raises:
        CheckpointError: on every rank, with the first one's reason.
    """

    def verify_share() -> None:
        Reader(path).verify(ranks.rank, ranks.world, note)

    if damage := together(ranks, verify_share):
        raise damage
    return Reader(path, trusted=True)


def together(ranks: Ranks, check: Callable[[], None]) -> CheckpointError | None:
    """Run a check on every rank; the first rank's `CheckpointError`, if any has one, on all of them."""
    text = ""
    try:
        check()
    except CheckpointError as error:
        text = json.dumps([part[:1000] for part in (error.where, error.wrong, error.right)], ensure_ascii=False)  # fits in `TEXT_BYTES`
    if not (first := ranks.first(text)):
        return None
    return CheckpointError(*json.loads(first))
