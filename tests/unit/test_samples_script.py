"""`launch/samples.py`: the names it gives are those of the tokens that the run reads, and
its proof sees what goes wrong.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from launch.samples import run
from megacore.data import shuffle as batches
from megacore.data.samples import SampleStream, training_stream, visits
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.events import Listeners
from megacore.distributed.mesh import Mesh
from megacore.errors import UserError
from megacore.tools.prepare.indexed_writer import IndexedWriter
from megacore.tools.verify import coverage
from megacore.tools.verify.coverage import Epoch, EpochCoverage, Leg
from megacore.train.loader import Loader
from tests.build import run_of

# their lengths; a's samples: 26, b's 12, c's 2
DOCUMENTS = {"a": [7, 1, 30, 22, 5, 66], "b": [40, 2, 19], "c": [9, 3]}
SHARES = [(2.0, "a"), (1.0, "b"), (0.4, "c")]


def write(folder: Path, name: str) -> str:
    """A corpus whose token at every position is the position, and whose second document
    has two sequences where it can.
    """
    start = 0
    with IndexedWriter(str(folder / name), np.uint16) as writer:
        for length in DOCUMENTS[name]:
            tokens = np.arange(start, start + length, dtype=np.uint16)
            writer.write(tokens[:2])
            writer.write(tokens[2:])
            writer.end_document()
            start += length
    return str(folder / name)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Samples of 5 tokens in batches of 8, from a blend."""
    sections = {
        "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 200},
        "train": {"steps": 60, "seq_len": 5, "micro_batch_size": 2, "global_batch_size": 8, "seed": 3},
        "data": {"train": [[share, write(tmp_path, name)] for share, name in SHARES], "tokenizer": "bytes"},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sections))
    return str(path)


def found(config: str, folder: Path, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    """What the script writes as JSON."""
    path = folder / "found.json"
    assert run(["--config", config, "--json", str(path), *arguments]) == status
    return json.loads(path.read_text())


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_names_are_those_of_what_each_rank_reads(config: str, tmp_path: Path, data_size: int) -> None:
    """Against the tokens of the loader of every data rank, and documents counted from their lengths."""
    rows = found(config, tmp_path, "--step", "4:5", f"parallel.data={data_size}")
    assert [(row["step"], row["position"]) for row in rows] == [
        (step, position) for step in (4, 5) for position in range(8)
    ]
    resolved = run_of(config, f"parallel.data={data_size}", world=data_size)
    stream = training_stream(resolved)
    for rank in range(data_size):
        dp = Group("dp", tuple(range(data_size)), rank)
        mesh = SimpleNamespace(sample_group=dp, cp=SOLO, device=torch.device("cpu"), listeners=Listeners())
        loader = Loader(resolved, cast(Mesh, mesh), stream)
        for step in (4, 5):
            for j, microbatch in enumerate(loader.read(step)):
                own = [
                    row
                    for row in rows
                    if (row["step"], row["data_rank"], row["microbatch"]) == (step, rank, j)
                ]
                for row, inputs, targets in zip(own, microbatch.tokens, microbatch.targets, strict=True):
                    for end, token in (("first", inputs[0]), ("last", targets[-1])):
                        lengths = DOCUMENTS[Path(row["corpus"]).name]
                        document = row[end]["document"]
                        assert 0 <= row[end]["offset"] < lengths[document]
                        assert sum(lengths[:document]) + row[end]["offset"] == token
                    assert row["sample"] * 5 == inputs[0]
        loader.executor.shutdown()


def test_the_global_batch_is_the_same_in_every_layout(config: str, tmp_path: Path) -> None:
    """Only who reads a sample changes; which share a microbatch does not."""
    whole = found(config, tmp_path, "--step", "7")
    cut = found(config, tmp_path, "--step", "7", "parallel.data=4")
    for row, other in zip(whole, cut, strict=True):
        assert row["microbatch"] == other["data_rank"] and other["microbatch"] == 0
        for key in ("corpus", "epoch", "sample", "first", "last"):
            assert row[key] == other[key]


def test_text_and_table(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = found(config, tmp_path, "--step", "1", "--text")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "step",
        "position",
        "corpus",
        "epoch",
        "sample",
        "first",
        "last",
        "data",
        "rank",
        "microbatch",
        "text",
    ]
    assert len(lines) == 9 and len(set(map(len, (line.partition("'")[0] for line in lines[1:])))) == 1
    for row, line in zip(rows, lines[1:], strict=True):
        start = row["sample"] * 5
        assert row["text"] == bytes(range(start, start + 6)).decode(errors="replace")
        assert (
            line.endswith(repr(row["text"]))
            and f"{row['first']['document']}:{row['first']['offset']}" in line
        )


def test_the_plot_counts_what_the_run_reads(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against every sample of the run looked up on its own, at each step that is drawn."""
    parts = found(config, tmp_path, "--plot", str(tmp_path / "blend.png"))
    stream = training_stream(run_of(config))
    read = [stream.where(index)[0] for index in range(60 * 8)]
    for part, (_, name), size in zip(parts, SHARES, (26, 12, 2), strict=True):
        assert part["prefix"] == str(tmp_path / name) and part["size"] == size
        assert part["steps"][0] == 0 and part["steps"][-1] == 60
        assert part["samples"] == [read[: 8 * step].count(part["prefix"]) for step in part["steps"]]
        assert part["share"] == part["samples"][-1] / 480
    assert (tmp_path / "blend.png").read_bytes().startswith(b"\x89PNG")
    assert (
        f"{tmp_path}/a: {parts[0]['samples'][-1]} samples, {parts[0]['share']:.2%} of the run, "
        in capsys.readouterr().out
    )


# --- the proof ----------------------------------------------------------------------------------------------


def counted(stream: SampleStream, corpus: int, epoch: int, read: list[int]) -> Counter[int]:
    """How often each sample of an epoch is among the global indices `read`, by asking
    for one after another.
    """
    places = [stream.where(index) for index in read]
    return Counter(
        sample for prefix, e, sample in places if prefix == stream.corpora[corpus].prefix and e == epoch
    )


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_the_proof_is_a_plain_count(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """Epochs that begin and end within a step, some steps at a time: against every
    sample of 1600 looked up on its own.
    """
    monkeypatch.setattr(coverage, "BLOCK", 20)
    findings = found(config, tmp_path, "--prove", f"--epoch={epoch}", "--layouts", "dp2:3,dp4:9,dp1")
    stream = training_stream(run_of(config))
    places = [stream.where(index) for index in range(1600)]
    for finding, tokens, count in zip(findings, stream.corpora, (26, 12, 2), strict=True):
        own = [index for index, (prefix, e, _) in enumerate(places) if prefix == tokens.prefix and e == epoch]
        assert len(own) == count == finding["samples"] == finding["reads"]
        assert (finding["first_step"], finding["last_step"]) == (own[0] // 8 + 1, own[-1] // 8 + 1)
        assert finding["missing"] == finding["repeated"] == 0 and finding["examples"] == []


def test_visits_count_the_blend(config: str) -> None:
    stream = training_stream(run_of(config))
    corpora = [stream.where(index)[0] for index in range(300)]
    for corpus, tokens in enumerate(stream.corpora):
        assert [visits(stream.shares, corpus, n) for n in range(301)] == [
            corpora[:n].count(tokens.prefix) for n in range(301)
        ]


def same_for_all(indices: np.ndarray) -> np.ndarray:
    """All data ranks read what the first reads."""
    return np.broadcast_to(indices[:, :1], indices.shape)


def last_microbatch_dropped(indices: np.ndarray) -> np.ndarray:
    """The batch's last round of microbatches is left out, as an uneven batch is."""
    return indices[:, :, :-1]


def shifted_rank(indices: np.ndarray) -> np.ndarray:
    """The last data rank reads one sample too far: the next step's first."""
    shifted = indices.copy()
    shifted[:, -1] += 1
    return shifted


def counted_by_ranks(indices: np.ndarray) -> np.ndarray:
    """Each step begins where a run would be that had always had these data ranks,
    with a batch of each rank's own.
    """
    return indices + indices.min(axis=(1, 2, 3), keepdims=True) * (indices.shape[1] - 1)


WHOLE = [Leg(2)]
FAULTS: dict[str, tuple[Callable[[np.ndarray], np.ndarray] | None, list[Leg]]] = {
    "data ranks read the same samples": (same_for_all, WHOLE),
    "the last round of microbatches is dropped": (last_microbatch_dropped, WHOLE),
    "a rank is off by one": (shifted_rank, WHOLE),
    "a resume repeats a step": (None, [Leg(4, 1, 2), Leg(2, 2)]),
    "a resume skips a step": (None, [Leg(4, 1, 2), Leg(2, 4)]),
    "growing repeats a step": (None, [Leg(1, 1, 2), Leg(2, 2, 4), Leg(1, 5)]),
    "growing loses a step": (None, [Leg(1, 1, 1), Leg(2, 3, 4), Leg(1, 5)]),
    "shrinking repeats a step": (None, [Leg(1, 1, 2), Leg(2, 3, 4), Leg(1, 4)]),
    "a run that has grown counts its samples by its ranks": (
        counted_by_ranks,
        [Leg(1, 1, 1), Leg(2, 2, 3), Leg(1, 4)],
    ),
    "a resume starts the epoch again": (None, [Leg(4, 1, 2), Leg(2, 1)]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("corpus", [0, 1])
def test_planted_faults_are_found(
    config: str, monkeypatch: pytest.MonkeyPatch, fault: str, corpus: int
) -> None:
    """Each is reported with the samples that are missing or repeated, as a plain count finds
    them, and where they were read.
    """
    broken, legs = FAULTS[fault]
    if broken is not None:
        monkeypatch.setattr(coverage, "dealt", lambda *arguments: broken(batches.dealt(*arguments)))
    resolved = run_of(config)
    stream = training_stream(resolved)
    finding = Epoch(stream, corpus, 0, legs, resolved.train).check()
    last = finding.last_step
    read = []
    for leg in legs:
        for step in range(leg.first, min(last, leg.last or last) + 1):
            indices = batches.dealt(range(step, step + 1), leg.data_size, resolved.train)
            read += (indices if broken is None else broken(indices)).flatten().tolist()
    counts = counted(stream, corpus, 0, read)
    missing = [sample for sample in range(finding.samples) if counts[sample] == 0]
    repeated = [sample for sample in counts if counts[sample] > 1]
    assert not finding.holds and (missing or repeated), fault
    assert (finding.missing, finding.repeated, finding.reads) == (len(missing), len(repeated), counts.total())
    for example in finding.examples:
        sample = int(example.split()[1])
        assert sample in (missing if "never" in example else repeated)
        assert "never" in example or f"read {counts[sample]} times: step " in example


def test_where_a_sample_is_read_twice_is_named(config: str) -> None:
    """The step, the data rank and the microbatch, on both sides of a resume that repeats step 2."""
    resolved = run_of(config, "data.train=" + run_of(config).data.train[0][1])  # type: ignore[index]
    finding = Epoch(training_stream(resolved), 0, 0, [Leg(4, 1, 2), Leg(1, 2)], resolved.train).check()
    assert (finding.repeated, finding.missing) == (8, 0)
    stream = training_stream(resolved)
    positions = {stream.where(index)[2]: index - 8 for index in range(8, 16)}
    for example in finding.examples:
        microbatch = positions[int(example.split()[1])] // 2
        assert (
            f"step 2, data rank {microbatch} of 4, microbatch 0; step 2, data rank 0 of 1, microbatch "
            f"{microbatch}" in example
        )


def test_a_count_that_wraps_is_not_taken_for_one(config: str) -> None:
    """A byte holds 257 reads as 1: the number of reads tells."""
    resolved = run_of(config, "data.train=" + run_of(config).data.train[2][1])  # type: ignore[index]
    finding = Epoch(training_stream(resolved), 0, 0, [Leg(1)] * 257, resolved.train).check()
    assert (finding.samples, finding.reads, finding.holds) == (2, 514, False)


def test_a_device_is_written_to_and_not_replaced(config: str, tmp_path: Path) -> None:
    """Root would turn /dev/null into a file of results."""
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    assert run(["--config", config, "--json", str(link), "--step", "1"]) == 0
    assert link.is_symlink() and not link.is_file()


def test_not_proved_is_status_1(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coverage, "dealt", lambda *arguments: same_for_all(batches.dealt(*arguments)))
    assert all(
        EpochCoverage(**finding).missing
        for finding in found(config, tmp_path, "--prove", "--layouts", "dp2", status=1)
    )
    assert "NOT proved" in capsys.readouterr().out


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--step", "61"], "--step: 61 goes beyond the run's steps (1 to train.steps 60)"),
        (["--step", "0"], "--step: 0 goes beyond"),
        (["--step", "9:3"], "--step: 9:3 ends before it begins"),
        (["--step", "x"], "--step: x is no step"),
        (
            ["--prove", "--layouts", "dp3"],
            "--layouts: dp3: 8 = micro_batch_size 2 × microbatches × data 3 has no whole solution",
        ),
        (["--prove", "--layouts", "dp4,dp2"], "--layouts: dp4 has no last step"),
        (["--prove", "--layouts", "dp4:9,dp2:20"], "--layouts: dp2:20 has a last step"),
        (["--prove", "--layouts", "dp4:9,dp2:9,dp1"], "--layouts: dp2:9 ends before it begins, with step 10"),
        (["--prove", "--layouts", "tp2"], "--layouts: 'tp2' is no layout"),
        (["--prove", "--epoch", "-1"], "--epoch: -1 is no epoch"),
        (["--prove", "--epoch", str(10**18)], "data.train: no run gets to epoch 1000000000000000000"),
        (["--prove", "--text"], "--text: belongs to --step"),
        (["--step", "3", "--layouts", "dp2"], "--layouts: belongs to --prove"),
        (["--step", "3", "--prove"], "--prove: not allowed with argument --step"),
        (["--plot", "blend.txt"], "--plot: cannot write blend.txt: its ending names no image format"),
        (["--plot", "nowhere/blend.png"], "--plot: cannot write nowhere/blend.png"),
        ([], "one of the arguments --step --prove --plot is required"),
        (["--step", "3", "data.train=null"], "data.train: no corpus is given"),
        (["--step", "3", "data.train=nowhere"], "data error: nowhere.bin: missing"),
        (["--step", "3", "--text", "data.tokenizer=null"], "data.tokenizer: --text needs one"),
        (["--step", "3", "parallel.data=3"], "train.global_batch_size: 8 = micro_batch_size 2"),
        (["--step", "3", "--json", "nowhere/found.json"], "--json: cannot write nowhere/found.json"),
    ],
)
def test_bad_input_is_one_line(config: str, arguments: list[str], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        run(["--config", config, *arguments])
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
