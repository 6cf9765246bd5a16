"""Which tokens are in which sample: nothing lost, nothing twice, whatever the epoch,
the blend and the batch.
"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megacore.config.schema import IGNORED, MASK
from megacore.data.samples import EvalSamples, SampleStream, blend, training_stream
from megacore.distributed.communicator import SOLO
from megacore.errors import DataError
from megacore.tools.corpora import check_corpora
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.verify.reference import Corpus, batch_of
from megacore.train.loader import Loader, validation_batches
from tests.build import mesh_of, run_of


def write(path: Path, values: np.ndarray) -> str:
    with IndexedWriter(str(path), values.dtype) as writer:
        for document in np.array_split(values, 3):
            writer.write(document)
            writer.end_document()
    return str(path)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """103 tokens, each its own position: with sequences of 10, ten samples and a rest."""
    return write(tmp_path / "c", np.arange(103, dtype=np.uint16))


def test_epochs(corpus: str) -> None:
    """Each epoch shows every sample once, in an order of its own; inputs and targets overlap by one token."""
    stream = SampleStream(corpus, 10, seed=1, vocab_size=103)
    orders = []
    for epoch in range(3):
        samples = stream.samples(np.arange(10 * epoch, 10 * epoch + 10))
        assert np.array_equal(samples, samples[:, :1] + np.arange(11))
        assert sorted(samples[:, 0].tolist()) == list(range(0, 100, 10))
        orders.append(tuple(samples[:, 0].tolist()))
        assert [stream.where(10 * epoch + i) for i in range(10)] == [
            (corpus, epoch, start // 10) for start in orders[-1]
        ]
    assert len(set(orders)) == 3
    assert not np.array_equal(
        stream.samples(np.arange(10)), SampleStream(corpus, 10, seed=2, vocab_size=103).samples(np.arange(10))
    )


def test_corpora_of_one_size_have_orders_of_their_own(tmp_path: Path, corpus: str) -> None:
    """Of two that belong together, line by line, such as translations, the pairs
    would always be met side by side.
    """
    stream = SampleStream(
        [(1, corpus), (1, write(tmp_path / "twin", np.arange(103, dtype=np.uint16)))],
        5,
        seed=1,
        vocab_size=103,
    )
    places = [stream.where(i) for i in range(40)]
    orders = [
        [sample for prefix, epoch, sample in places if prefix == own.prefix and epoch == 0]
        for own in stream.corpora
    ]
    assert [sorted(order) for order in orders] == [list(range(20))] * 2
    assert sum(a == b for a, b in zip(*orders, strict=True)) < 10


def test_pure_function_of_the_index(tmp_path: Path, corpus: str) -> None:
    """Resumed runs and other layouts ask for other batches of the same indices, and get the same samples."""
    other = write(tmp_path / "d", np.arange(57, dtype=np.uint16))
    stream = SampleStream([(0.3, corpus), (0.7, other)], 5, seed=3, vocab_size=103)
    whole = stream.samples(np.arange(200))
    shuffled = np.random.default_rng(0).permutation(200)
    assert np.array_equal(stream.samples(shuffled), whole[shuffled])
    assert np.array_equal(np.concatenate([stream.samples(np.array([i])) for i in range(200)]), whole)


def test_blend_repeats_nothing_within_an_epoch(tmp_path: Path, corpus: str) -> None:
    """Every corpus of a blend has its own epochs: its samples come once each before any comes again."""
    prefixes = [
        corpus,
        write(tmp_path / "d", np.arange(61, dtype=np.uint16)),
        write(tmp_path / "e", np.arange(21, dtype=np.uint16)),
    ]
    stream = SampleStream(
        [(2, prefixes[0]), (1, prefixes[1]), (0.5, prefixes[2])], 10, seed=0, vocab_size=103
    )
    places = [stream.where(i) for i in range(500)]
    for prefix, per_epoch in zip(prefixes, (10, 6, 2), strict=True):
        own = [(epoch, sample) for where, epoch, sample in places if where == prefix]
        assert [epoch for epoch, _ in own] == [k // per_epoch for k in range(len(own))]
        assert set(Counter(own[: len(own) // per_epoch * per_epoch]).values()) == {1}


def counted(corpora: np.ndarray, k: int) -> np.ndarray:
    """How many of the first i + 1 samples each corpus had: ``[samples, k]``."""
    return (corpora[:, None] == np.arange(k)).cumsum(axis=0)


def deviation(corpora: np.ndarray, shares: list[float]) -> float:
    """The largest distance, at any point of the run, of a corpus's count from its share."""
    return float(
        np.abs(counted(corpora, len(shares)) - np.arange(1, len(corpora) + 1)[:, None] * shares).max()
    )


SHARES = [
    [1.0],
    [0.5, 0.5],
    [0.9, 0.1],
    [0.001, 0.999],
    [1 / 3, 1 / 3, 1 / 3],
    [0.1, 0.2, 0.3, 0.4],
    [0.7, 0.1, 0.1, 0.05, 0.05],
    [1 / 16] * 16,
    [0.013] * 30 + [0.61],
    [1 - 1e-9, 1e-9],
    [0.5 - 1e-7, 0.5 + 1e-7],
]


@pytest.mark.parametrize("shares", SHARES)
def test_blend_keeps_its_shares(shares: list[float]) -> None:
    """At every step the mixture is the one that was asked for, and visits count on by one:
    checked against a plain count.
    """
    corpora, visits = blend(shares, np.arange(5000))
    assert deviation(corpora, shares) <= 1 + np.log(len(shares)) / 2
    assert np.array_equal(visits, counted(corpora, len(shares))[np.arange(5000), corpora] - 1)


def test_deviation_catches_random_mixtures() -> None:
    """Drawing a corpus for each sample, the usual way, strays too far."""
    drawn = np.random.default_rng(0).choice(2, size=5000, p=[0.9, 0.1])
    assert deviation(drawn, [0.9, 0.1]) > 1 + np.log(2) / 2


def test_blend_far_into_a_run() -> None:
    """Where ``index · share`` no longer fits a float's 53 bits, visits still count on by one."""
    corpora, visits = blend([0.6, 0.3, 0.1], 2**57 + np.arange(3000))
    for c in range(3):
        assert set(np.diff(visits[corpora == c]).tolist()) == {1}


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_a_blend_of_unlike_corpora_equals_a_plain_reader(tmp_path: Path, packing: str) -> None:
    """Tokens, targets, documents and positions of each sample are those of its own corpus, by the proof's
    reader: one corpus has long documents, the other short ones, of which some tokens are not learned.
    """
    rng, parts = np.random.default_rng(0), []
    for share, name, length, often in ((0.6, "long", 900, 0.02), (0.4, "short", 500, 0.2)):
        prefix, tokens = str(tmp_path / name), rng.integers(0, 61, length).astype(np.uint16)
        starts = 1 + np.flatnonzero(rng.random(length - 1) < often)
        starts.astype(np.int64).tofile(f"{prefix}.starts")
        with IndexedWriter(prefix, np.uint16) as writer:
            for document in np.split(tokens, starts):
                writer.write(document)
                writer.end_document()
        parts.append([share, prefix])
    (rng.random(length) < 0.5).astype(np.uint8).tofile(f"{prefix}{MASK}")
    train = {"seq_len": 16, "micro_batch_size": 2, "global_batch_size": 4, "device": "cpu"}
    data = {"train": parts, "document_mask": True, "packing": packing}
    model = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "vocab_size": 61}
    config = run_of({"model": model, "train": train, "data": data})
    stream = training_stream(config)
    plain = {prefix: Corpus(prefix, config) for _, prefix in parts}
    loader, seen = Loader(config, mesh_of(config), stream), set()
    for index, microbatch in enumerate(
        microbatch for step in range(1, 11) for microbatch in loader.read(step)
    ):
        for row in range(2):
            prefix, _, sample = stream.where(2 * index + row)
            right = batch_of([(plain[prefix], plain[prefix].training[sample])])
            seen.add(prefix)
            assert torch.equal(microbatch.tokens[row], right.inputs[0]) and torch.equal(
                microbatch.targets[row], right.targets[0]
            )
            assert (
                microbatch.documents is not None
                and microbatch.positions is not None
                and right.documents[1] is not None
            )
            assert tuple(map(int, microbatch.documents[row])) == tuple(right.documents[0][0])
            assert torch.equal(microbatch.positions[row], right.documents[1][0])
    loader.close()
    assert len(seen) == 2


def test_too_short(corpus: str) -> None:
    """A sequence longer than the corpus is refused with the longest that would do, and that one works."""
    with pytest.raises(DataError, match=r"sequence longer than the corpus.*train\.seq_len at most 102"):
        SampleStream(corpus, 103, seed=0, vocab_size=103)
    assert (
        SampleStream(corpus, 102, seed=0, vocab_size=103).samples(np.arange(3)).tolist()
        == [list(range(103))] * 3
    )


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    """Refused on opening, and on reading where opening did not see it, with the position."""
    prefix = write(tmp_path / "c", np.array([0, 1, 2, 3, 4, 5, 9, 7], dtype=np.int32))
    with pytest.raises(DataError, match="holds token id 9"):
        check_corpora(SampleStream(prefix, 7, seed=0, vocab_size=8).corpora, 8)
    stream, evaluation = SampleStream(prefix, 7, seed=0, vocab_size=10), EvalSamples(prefix, 7, vocab_size=10)
    stream.vocab_size = evaluation.vocab_size = 8
    for read in (stream.samples, evaluation.samples):
        with pytest.raises(DataError, match=r"token 6 \(document 2\) is id 9"):
            read(np.array([0]))
    below = SampleStream(
        write(tmp_path / "d", np.array([0, 1, -2, 3, 4, 5, 6, 7], dtype=np.int32)), 7, seed=0, vocab_size=8
    )
    # which would read the vocabulary's rows from behind
    with pytest.raises(DataError, match=r"token 2 \(document 0\) is id -2"):
        below.samples(np.array([0]))


@pytest.mark.parametrize("seq_len", [1, 7, 51, 102, 103, 1000])
def test_evaluation_counts_every_token_once(corpus: str, seq_len: int) -> None:
    """The validation loss is over the whole corpus: no target lost at a cut, none twice, padding ignored."""
    samples = EvalSamples(corpus, seq_len, vocab_size=103)
    inputs, targets = samples.samples(np.arange(len(samples) + 2))
    real = targets != IGNORED
    assert targets[real].tolist() == list(range(1, 103)) and inputs[real].tolist() == list(range(102))
    # the last token, and padding
    assert {*inputs[~real].tolist()} <= {102, 0} and not real[len(samples) :].any()


def test_evaluation_of_a_blend(tmp_path: Path, corpus: str) -> None:
    """All of one corpus, then all of the next; no sample crosses over."""
    other = write(tmp_path / "d", np.arange(50, 75, dtype=np.uint16))
    samples = EvalSamples([(5.0, corpus), (0.1, other)], 10, vocab_size=103)
    _, targets = samples.samples(np.arange(len(samples)))
    assert len(samples) == 11 + 3
    assert targets[targets != IGNORED].tolist() == [*range(1, 103), *range(51, 75)]


def test_nothing_to_evaluate(tmp_path: Path) -> None:
    """A single token has nothing before it to be predicted from."""
    with pytest.raises(DataError, match="no token to predict"):
        EvalSamples(write(tmp_path / "c", np.array([1], dtype=np.uint8)), 4, vocab_size=8)


class Numbered:
    """Validation samples, each its own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def samples(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return indices[:, None], indices[:, None]


def validated(count: int, eval_batches: int, data_size: int) -> list[list[int]]:
    """Which samples each global batch of a validation holds, over all data ranks."""
    settings = [
        "train.global_batch_size=8",
        "train.micro_batch_size=1",
        f"train.eval_batches={eval_batches}",
        f"parallel.data={data_size}",
    ]
    config: Any = run_of(Path(__file__).parents[2] / "configs/gpt_tiny.json", *settings, world=data_size)
    found: list[list[int]] = []
    for rank in range(data_size):
        mesh: Any = SimpleNamespace(
            sample_group=SimpleNamespace(size=data_size, rank=rank), cp=SOLO, device=torch.device("cpu")
        )
        for number, batch in enumerate(validation_batches(config, mesh, Numbered(count))):  # type: ignore[arg-type]
            found += [[]] * (number == len(found))
            found[number] = sorted(
                found[number] + [int(i) for microbatch in batch for i in microbatch.tokens]
            )
    return found


@pytest.mark.parametrize("count", [25, 47, 1000])
def test_some_batches_of_a_validation_are_spread_evenly_over_all_of_it(count: int) -> None:
    """The beginning alone may be one kind of text: its loss would be that kind's.

    The same samples each time, in every layout.
    """
    batches = validated(count, 3, 1)
    samples = [sample for batch in batches for sample in batch]
    assert [len(batch) for batch in batches] == [8, 8, 8] and len(set(samples)) == 24
    steps = np.diff([*samples, samples[0] + count])  # around the end too
    assert set(steps.tolist()) <= {count // 24, -(-count // 24)}, "no stretch of the corpus is left out"
    assert batches == validated(count, 3, 1) == validated(count, 3, 2) == validated(count, 3, 4)


@pytest.mark.parametrize(("count", "eval_batches"), [(20, 0), (24, 3), (20, 9), (1, 2)])
def test_more_batches_than_there_are_read_every_sample_once(count: int, eval_batches: int) -> None:
    for data_size in (1, 2):
        samples = [sample for batch in validated(count, eval_batches, data_size) for sample in batch]
        assert [sample for sample in samples if sample < count] == list(range(count)), (
            "what fills up the last batch lies behind the end"
        )
        assert len(samples) == -(-count // 8) * 8
