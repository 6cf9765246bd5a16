"""Chooses the checkpoint that a run resumes: rank 0 finds it, and all ranks check that it is whole before they use it."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megacore.checkpoint import Ranks, Reader
from megacore.checkpoint.weights import recorded_sections
from megacore.distributed.collectives import broadcast_text
from megacore.distributed.mesh import Mesh
from megacore.errors import CheckpointError
from megacore.train.inputs import Inputs


def choose(inputs: Inputs, mesh: Mesh) -> tuple[Reader, bool] | None:
    """The newest whole checkpoint that `inputs` name, and whether only its weights are meant; None if they name none. Collective.

    Raises:
        CheckpointError: on every rank, if the checkpoint that was named is damaged, or all that could be resumed are.
    """
    ranks = Ranks(mesh)
    while True:
        # Only rank 0 has looked: others might see the shared file system in another state, and thousands would keep it busy.
        whole, weights = (broadcast_text(str(path or ""), mesh.world, mesh.device) for path in (inputs.checkpoint, inputs.weights))
        if not whole and not weights:
            return None
        try:
            opened, inputs.opened = inputs.opened, None
            return proved(Path(whole or weights), ranks, opened, partial(mesh.progress, "checking a checkpoint")), not whole
        except CheckpointError as damage:
            if not whole:
                raise
            if refusal := together(ranks, partial(inputs.fall_back, damage)):
                raise refusal from None


def proved(path: Path, ranks: Ranks, opened: Reader | None, note: Callable[[], None]) -> Reader:
    """Opens the checkpoint in folder `path`; together, the ranks have read all its files and compared them with their digests.
    Collective. Rank 0 has `opened` it already, and gives the manifest to the others. `note` is called now and then, because this
    may take longer than a hang.

    Raises:
        CheckpointError: on every rank, with the first one's reason.
    """

    text = ranks.share(opened.manifest.text if opened else b"")
    readers = [opened] if opened else []

    def verify_share() -> None:
        if not readers:
            readers.append(Reader(path, text=text))
        readers[0].verify(ranks.rank, ranks.world, note)

    if damage := together(ranks, verify_share):
        raise damage
    readers[0].trust()
    return readers[0]


def engine_state(reader: Reader) -> dict[str, Any]:
    """What a checkpoint says for `Engine.load_state`. Older ones say a loss scale of 1 for runs that did not scale: it is left out."""
    state: dict[str, Any] = reader.state["engine"]
    scaled = recorded_sections(reader)["train"].get("precision") == "fp16"
    return {name: value for name, value in state.items() if scaled or name not in ("loss_scale", "good_steps")}


def together(ranks: Ranks, check: Callable[[], None]) -> CheckpointError | None:
    """Runs a check on every rank. Returns the first rank's `CheckpointError` on all of them, or None."""
    text = ""
    try:
        check()
    except CheckpointError as error:
        text = json.dumps([part[:1000] for part in (error.where, error.wrong, error.right)], ensure_ascii=False)  # fits in `TEXT_BYTES`
    if not (first := ranks.first(text)):
        return None
    return CheckpointError(*json.loads(first))
