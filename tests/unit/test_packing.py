"""Best-fit packing: each document whole in one sample where it can be, each of its targets
once, and nothing else learned.
"""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacore.config.implied import masks_targets
from megacore.config.schema import IGNORED
from megacore.data import packing
from megacore.data.indexed import MASK, IndexedTokens
from megacore.data.packing import WholeDocuments, best_fit
from megacore.data.samples import EvalSamples, SampleStream
from megacore.errors import CheckpointError, DataError
from megacore.tools.inputs import Inputs
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.train.loader import Loader
from tests.build import mesh_of, run_of
from tests.training import run_rank, write_config, write_corpus

LENGTHS = [5, 1, 8, 2, 30, 3, 9, 17, 4, 7, 2, 16, 25, 1, 6]
SEQ = 8


def write(path: Path, lengths: list[int] = LENGTHS) -> str:
    """A corpus whose token at every position is the position."""
    start = 0
    with IndexedWriter(str(path), np.uint16) as writer:
        for length in lengths:
            writer.write(np.arange(start, start + length, dtype=np.uint16))
            writer.end_document()
            start += length
    return str(path)


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit-decreasing as it is defined: an item at a time, with a look at every bin."""
    rooms: list[int] = []
    bins = [0] * len(lengths)
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        _, found = min(
            ((room, i) for i, room in enumerate(rooms) if room >= lengths[item]), default=(0, len(rooms))
        )
        rooms += [capacity] * (found == len(rooms))
        rooms[found] -= lengths[item]
        bins[item] = found
    return bins


@pytest.mark.parametrize("seed", range(40))
def test_all_of_a_length_at_once_is_one_by_one(seed: int) -> None:
    """A bin too full would lose tokens; a worse fit would pad more, and another order than the
    reference's would be another run.
    """
    rng = np.random.default_rng(seed)
    capacity, count = int(rng.integers(2, 60)), int(rng.integers(1, 250))
    lengths = (
        rng.integers(1, capacity + 1, count) if seed % 2 else np.minimum(rng.geometric(0.2, count), capacity)
    )
    bins = best_fit(lengths.astype(np.int32), capacity)
    assert bins.tolist() == one_by_one(lengths.tolist(), capacity)
    assert np.bincount(bins, weights=lengths).max() <= capacity


def targets_of(starts: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """Each token of a document but its first, with the one before it."""
    return [
        (p - 1, p)
        for start, length in zip(starts, lengths, strict=True)
        for p in range(start + 1, start + length)
    ]


@pytest.mark.parametrize("block", [4, 1 << 22])
def test_each_target_of_each_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """In an epoch of training and in a validation: nothing lost where a document is cut, nothing twice,
    no padding, no other document.
    """
    monkeypatch.setattr(packing, "BLOCK", block)
    prefix = write(tmp_path / "c")
    starts = np.cumsum([0, *LENGTHS[:-1]]).tolist()
    right = Counter(targets_of(starts, LENGTHS))
    stream, samples = (
        SampleStream(prefix, SEQ, 1, 200, packing="best_fit"),
        EvalSamples(prefix, SEQ, 200, packing="best_fit"),
    )
    for epoch in range(2):
        indices = np.arange(epoch * stream.counts[0], (epoch + 1) * stream.counts[0])
        tokens, learned = stream.samples(indices), stream.learned(indices)
        assert learned is not None
        found = np.stack([tokens[:, :-1], tokens[:, 1:]], 2)[learned[:, 1:]]
        assert Counter(map(tuple, found.tolist())) == right
    inputs, targets = samples.samples(np.arange(len(samples) + 3))
    assert Counter(map(tuple, np.stack([inputs, targets], 2)[targets != IGNORED].tolist())) == right
    for row, bounds in zip(inputs, samples.documents(np.arange(len(samples))), strict=False):
        whole = [row[a:b] for a, b in pairwise(bounds)]
        assert all(np.all(np.diff(part) == 1) or not part.any() for part in whole), "a document, or padding"
        assert sum(not part.any() for part in whole if len(part)) <= 1, "padding is apart, and last"


def test_documents_that_fit_are_whole_and_counted(tmp_path: Path) -> None:
    """The figures that a run prints, against a plain count."""
    packed = WholeDocuments(IndexedTokens(write(tmp_path / "c")), SEQ)
    starts = np.cumsum([0, *LENGTHS[:-1]]).tolist()
    spans = [span for sample in range(packed.count) for span in packed.spans(sample)]
    for start, length in zip(starts, LENGTHS, strict=True):
        own = [span for span in spans if start <= span[0] < start + length]
        assert ((start, length) in spans) == (1 < length <= SEQ + 1) and len(own) == -(-(length - 1) // SEQ)
    assert (packed.documents, packed.cut) == (13, sum(length > SEQ + 1 for length in LENGTHS))
    assert packed.padding == packed.count * (SEQ + 1) - sum(length for _, length in spans)
    ends = [
        {(p - 1) // SEQ for p in range(start + 1, start + n)}
        for start, n in zip(starts, LENGTHS, strict=True)
    ]
    assert packed.cut_otherwise == sum(len(samples) > 1 for samples in ends)
    assert (
        f"13 documents in {packed.count} samples, {packed.padding / packed.count / 9:.2%} padding; 4 "
        "documents" in str(packed)
    )


def test_a_mask_and_packing_together(tmp_path: Path) -> None:
    """A token that the mask leaves out is no target, wherever its document is packed."""
    prefix = write(tmp_path / "c")
    mask = np.random.default_rng(0).integers(0, 2, sum(LENGTHS)).astype(np.uint8)
    Path(prefix + MASK).write_bytes(mask.tobytes())
    samples = EvalSamples(prefix, SEQ, 200, packing="best_fit")
    _, targets = samples.samples(np.arange(len(samples)))
    starts = np.cumsum([0, *LENGTHS[:-1]]).tolist()
    assert sorted(targets[targets != IGNORED].tolist()) == [
        p for _, p in targets_of(starts, LENGTHS) if mask[p]
    ]


def test_a_microbatch_keeps_documents_and_padding_apart(tmp_path: Path) -> None:
    """With document_mask: positions start anew in each document, and padding is a document of
    its own that no target follows.
    """
    path = write_config(
        tmp_path,
        write(tmp_path / "c"),
        train={"seq_len": SEQ, "global_batch_size": 2},
        model={"vocab_size": 200},
    )
    config = run_of(path, "data.packing=best_fit", "data.document_mask=true", f"log.dir={tmp_path}/run")
    mesh = mesh_of(config)
    stream = Inputs(config, 0).stream
    loader, seen = Loader(config, mesh, stream), 0
    for step in range(1, stream.counts[0] // 2 + 1):
        for microbatch in loader.read(step):
            assert microbatch.positions is not None and microbatch.documents is not None
            for inputs, targets, positions, bounds in zip(
                microbatch.tokens, microbatch.targets, microbatch.positions, microbatch.documents, strict=True
            ):
                real = targets != IGNORED
                assert torch.equal(targets[real], inputs[real] + 1)
                assert (positions == 0).nonzero().flatten().tolist() == list(bounds[:-1])
                seen += int(real.sum())
    loader.close()
    mesh.close()
    assert seen > 80


def test_targets_are_counted_where_some_may_be_masked(tmp_path: Path) -> None:
    """Ranks and the prediction of traffic must agree on whether there is one collective more."""

    def masks(*overrides: str) -> bool:
        return masks_targets(run_of(write_config(tmp_path, str(tmp_path / "c")), *overrides))

    assert not masks() and masks("data.packing=best_fit") and masks("data.document_mask=true")
    Path(str(tmp_path / "d") + MASK).touch()
    assert masks(f'data.train=[[1,"{tmp_path / "c"}"],[2,"{tmp_path / "d"}"]]')


def test_nothing_to_pack(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", [1, 1, 1])
    with pytest.raises(DataError, match=r"c\.bin: has no document of two tokens"):
        SampleStream(prefix, SEQ, 0, 200, packing="best_fit")


def test_an_index_whose_documents_overlap_is_refused(tmp_path: Path) -> None:
    """Spans of negative length would be read as others."""
    prefix = write(tmp_path / "c", [3, 4, 5])
    index = bytearray(Path(prefix + ".idx").read_bytes())
    index[-24:-16], index[-16:-8] = index[-16:-8], index[-24:-16]
    Path(prefix + ".idx").write_bytes(index)
    with pytest.raises(DataError, match=r"c\.idx: its documents do not follow one another"):
        SampleStream(prefix, SEQ, 0, 200, packing="best_fit")


def test_a_run_goes_on_with_its_own_packing_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Other samples would be read than the checkpoint says. The run prints what was padded and cut."""
    config = write_config(tmp_path, write_corpus(tmp_path), train={"steps": 1})
    run: Any = lambda *overrides: run_rank(config, list(overrides), str(tmp_path / "run"))  # noqa: E731
    assert run("data.packing=best_fit") == 0
    assert "8 documents in 250 samples, 0.05% padding; 8 documents are longer" in capfd.readouterr().out
    with pytest.raises(CheckpointError, match=r"was saved with data\.packing best_fit, not none"):
        run()
