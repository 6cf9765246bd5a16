"""The planner's scoreboard: its figures on rows made up here, whose right answers are known.

No table of measurements is needed.
"""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import collectives, machine, planner_memory, planner_weak_scaling, predicted, throughput
from benchmarks.collectives import cluster_content
from benchmarks.planner import MEASURED, ROOT, parse, run
from benchmarks.planner_fit import Case, fit, steps
from benchmarks.planner_rows import SCHEDULES, Row, read
from benchmarks.planner_score import baseline, errors, operations, regret
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.planner.devices import read_cluster, read_device
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.profile import Profile
from megacore.tools.planner.step_time import BUBBLES, predict
from megacore.tools.planner.workload import Setting

SETTING = Setting(
    layers=16,
    hidden=2048,
    ffn=8192,
    heads=16,
    kv_heads=16,
    head_size=128,
    vocab=32000,
    seq=2048,
    global_batch=64,
    precision="bf16",
)
START = {"stages": "even", "product_rate": {"any": 0.7}, "layer_host": 1e-3}


def row(setting: Setting, seconds: float | None, memory: float | None = None) -> Row:
    device, cluster = read_device("h100"), read_cluster("dgx_h100")
    return Row(
        "made up", "nanotron", "model", setting, device, cluster, seconds is not None, seconds, memory, ""
    )


def layouts() -> list[Setting]:
    found = []
    for tensor, pipeline, data, micro in (
        (1, 1, 8, 1),
        (2, 1, 4, 2),
        (4, 1, 2, 4),
        (8, 1, 1, 8),
        (1, 2, 4, 1),
        (1, 4, 2, 2),
        (2, 2, 2, 1),
        (2, 4, 1, 4),
    ):
        found.append(replace(SETTING, tensor=tensor, pipeline=pipeline, data=data, micro_batch=micro))
    return found


def test_a_fit_finds_the_constants_that_made_the_rows() -> None:
    """Constants that the fit does not find again would mean nothing; rows that something
    else slowed must not move them.
    """
    truth = Profile("truth").with_constants(
        {"stages": "even", "product_rate": {"any": 0.55}, "layer_host": 3e-3}
    )
    device, cluster = read_device("h100"), read_cluster("dgx_h100")
    rows = [row(setting, predict(setting, device, cluster, truth).step) for setting in layouts()]
    slowed = row(replace(layouts()[0], micro_batch=2), 100.0)
    case = Case(lambda _: False, "none", START, ("product_rate/any", "layer_host"))
    found = fit([*rows, slowed], case, "found")
    assert found.product_rate["any"] == pytest.approx(0.55, rel=0.03) and found.layer_host == pytest.approx(
        3e-3, rel=0.03
    )
    assert errors(steps(rows, found), rows)["p90"] < 0.03
    assert errors(steps(rows, Profile("start").with_constants(START)), rows)["median"] > 0.1, (
        "the start was not yet right"
    )


def test_regret_is_the_chosen_layouts_time_over_the_best() -> None:
    """A predictor can err little and still choose badly: the planner is for choosing."""
    one, two, three = layouts()[:3]
    rows = [row(one, 1.0), row(two, 2.0), row(three, 4.0)]
    assert regret(np.array([1.0, 2.0, 3.0]), rows)["worst"] == 1.0
    assert regret(np.array([9.0, 2.0, 3.0]), rows)["worst"] == 2.0
    assert regret(np.array([1.0, 1.0, 1.0]), rows)["worst"] == pytest.approx(7 / 3), (
        "equal predictions choose any of them"
    )
    assert regret(np.array([1.0]), rows[:1]) == {}, "no choice"
    other = replace(two, tensor=1, data=8, micro_batch=1, global_batch=128)
    assert regret(np.array([1.0, 0.5]), [row(one, 1.0), row(other, 9.0)]) == {}, (
        "another batch is another question"
    )


def test_the_baseline_is_one_mfu() -> None:
    """If the baseline were weaker than it says, any planner would look good beside it."""
    rows = [row(setting, seconds) for setting, seconds in zip(layouts()[:3], (1.0, 2.0, 4.0), strict=True)]
    assert baseline(rows, rows) == pytest.approx([2.0] * 3), (
        "the median MFU, and as many operations in every layout"
    )
    double = replace(SETTING, layers=32)
    blocks = operations(double) - operations(SETTING)
    head = 3 * 64 * 2048 * 2 * 2048 * 32000
    assert operations(SETTING) == pytest.approx(blocks + head)


def test_links_and_devices_that_were_measured_can_be_read(tmp_path: Path) -> None:
    """The files that benchmarks write must give back the times that they were measured from."""
    truth = Machine(read_device("h100"), read_cluster("p5"), Profile("none", call=0.0))
    levels = truth.cluster.levels
    lines = []
    inside = 7 * levels[0].latency_seconds
    for ranks, latency, bandwidth in (
        (8, inside, 450e9),
        (32, inside + 3 * levels[1].latency_seconds, 8 * 50e9),
    ):
        lines.append(
            {
                "operation": "all_gather",
                "ranks": ranks,
                "alpha_seconds": latency,
                "beta_seconds_per_byte": 1 / bandwidth,
            }
        )
        lines.append(
            {"operation": "send", "ranks": ranks, "alpha_seconds": 1.0, "beta_seconds_per_byte": 1.0}
        )
    (tmp_path / "cluster.json").write_text(json.dumps(cluster_content(lines, 8)))
    found = Machine(truth.device, read_cluster(str(tmp_path / "cluster.json")), truth.profile)
    assert [level.ranks for level in found.cluster.levels] == [8, None]
    assert [level.bytes_per_second for level in found.cluster.levels] == pytest.approx([450e9, 50e9])
    assert found.collective(1.0, 1e9, 8) == pytest.approx(truth.collective(1.0, 1e9, 8))
    assert found.collective(1.0, 1e9, 32) == pytest.approx(truth.collective(1.0, 1e9, 32), rel=0.05), (
        "latency is shared among hops"
    )
    alone = cluster_content(lines[:2], 8)["levels"]
    assert [level["ranks"] for level in alone] == [None]
    # a call that takes long to begin, as gloo's, and then goes round a ring of four
    call, hop, byte = 4e-4, 1e-5, 1e-9
    rings = [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)]
    slow = [
        {"operation": n, "ranks": 4, "alpha_seconds": call + r * 3 * hop, "beta_seconds_per_byte": byte}
        for n, r in rings
    ]
    (tmp_path / "slow.json").write_text(json.dumps(cluster_content(slow, 4)))
    gloo = replace(found, cluster=read_cluster(str(tmp_path / "slow.json")))
    for share in (1.0, 2.0):
        assert gloo.collective(share, 1e6, 4) == pytest.approx(call + share * (3 * hop + 0.75e6 * byte)), (
            "a sum begins once, not twice"
        )
    assert gloo.transfer(1e6, 1) == pytest.approx(call + hop + 1e6 * byte)
    content = machine.device_content("fp32", 1e11, torch.device("cpu"))
    (tmp_path / "device.json").write_text(json.dumps(content))
    own = read_device(str(tmp_path / "device.json"))
    assert (
        own.peak_flops == {"fp32": 1e11}
        and (own.memory_bytes_per_second or 0.0) > 1e8
        and own.multiprocessors is None
    )
    assert not own.overlaps and truth.device.overlaps, "a CPU's cores send, and compute meanwhile nothing"


def test_memory_constants_are_found_again() -> None:
    """What is said of "does not fit" rests on these constants."""
    truth = dict.fromkeys(planner_memory.FEATURES, 0.0) | {
        "bytes_a_gradient": 1.5,
        "bytes_a_logit": 10.0,
        "bytes_a_waiting_feature": 3.0,
    }
    settings = [
        replace(s, zero=z, micro_batch=m, sequence=True)
        for s in layouts()
        for z in (0, 1)
        for m in (1, 4, 16)
    ]
    rows = [row(s, 1.0) for s in settings]
    rows = [replace(r, memory_gib=planner_memory.reserved_gib(r, "even", truth)) for r in rows]
    assert {planner_memory.host_is_ahead(r) for r in rows} == {True, False}, (
        "nothing waits behind a small microbatch"
    )
    found = planner_memory.fit([*rows, replace(rows[0], memory_gib=500.0)], "even")
    assert [planner_memory.reserved_gib(r, "even", found) for r in rows] == pytest.approx(
        [r.memory_gib for r in rows], rel=0.01
    )


def test_memory_that_is_counted() -> None:
    """A wrong count would be made up for by the fitted constants, and models of
    other sizes would come out wrong.
    """
    nothing = dict.fromkeys(planner_memory.FEATURES, 0.0)

    def bytes_of(setting: Setting, **constants: float) -> tuple[float, float]:
        own = row(setting, 1.0)
        gib = (
            f(own, "even", nothing | constants)
            for f in (planner_memory.reserved_gib, planner_memory.needed_gib)
        )
        return tuple(2**30 * value for value in gib)  # type: ignore[return-value]

    alone = replace(layouts()[0], zero=1)
    block, vocabulary = 4 * 2048**2 + 2 * 2048 * 8192, 32000 * 2048
    parameters, kept = 16 * block + 2 * vocabulary, 16 * 2048 * (22 * 2048 + 4 * 8192)
    assert bytes_of(alone) == pytest.approx((7.5 * parameters + kept,) * 2), (
        "6 bytes a parameter, and 12 that eight ranks divide"
    )
    assert bytes_of(replace(alone, zero=0))[0] == pytest.approx(20 * parameters + kept), (
        "2 of them in buckets"
    )
    stages = replace(alone, pipeline=4, data=2)
    first = 12 * (4 * block + vocabulary) + kept
    assert bytes_of(stages) == pytest.approx((first, first)), "four microbatches of a quarter of the blocks"
    last = first - kept * 3 / 4 + 100.0 * 2048 * 32000
    assert bytes_of(stages, bytes_a_logit=100.0) == pytest.approx((first, last)), (
        "the first rank is logged, and the last is fullest"
    )
    split = replace(stages, tensor=2, data=1, sequence=True, micro_batch=16)
    waiting = 16 * 16 * 2048 * 2048
    alike = bytes_of(split), bytes_of(split, bytes_a_waiting_feature=1.0)
    assert alike[1][0] - alike[0][0] == pytest.approx(waiting) and alike[1][1] == pytest.approx(
        alike[0][1]
    ), "what waits can go"
    assert planner_memory.refused(replace(stages, global_batch=4)) and not planner_memory.refused(
        replace(stages, global_batch=6)
    )


def test_weak_scaling_is_scored_beside_one_rate(tmp_path: Path) -> None:
    """The measured seconds come from the table's rate and its own count of operations; a slip
    there would shift all errors alike.
    """
    path = tmp_path / "table.csv"
    head = "params_billion,heads,hidden,layers,tensor,pipeline,gpus,global_batch,tflops_per_gpu\n"
    path.write_text(
        head + "1.7,24,2304,24,1,1,32,512,137\n" + (last := "76.1,80,10240,60,8,4,1024,1792,140") + "\n"
    )
    small, large = planner_weak_scaling.score(path)
    block = 2 * 12 * 2304**2 + 4 * 2048 * 2304
    # four passes over a block, three over the head
    seconds = 512 * 2048 * (4 * 24 * block + 3 * 2 * 2304 * 51200) / 32 / 137e12
    assert small["measured"] == pytest.approx(seconds, rel=1e-6) and small["baseline"] == pytest.approx(
        137 / 138.5 - 1
    )
    assert abs(small["error"]) < 0.1 and abs(large["error"]) < 0.15
    chosen = planner_weak_scaling.setting(dict(zip(head.strip().split(","), last.split(","), strict=True)))
    assert (chosen.data, chosen.microbatches, chosen.chunks, chosen.schedule) == (32, 28, 3, "interleaved")
    for wrong in (tmp_path / "missing.csv", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            planner_weak_scaling.score(wrong)
    path.write_text(head.replace("heads", "head") + "1.7,24,2304,24,1,1,32,512,137\n")
    with pytest.raises(ConfigError, match="no such table"):
        planner_weak_scaling.score(path)


def test_a_table_is_read_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that anyone types: a table in, the scoreboard out; rows that say too little
    are counted with their reason.
    """
    columns = [
        "source_id",
        "framework",
        "hardware",
        "interconnect",
        "n_gpus",
        "model",
        "arch",
        "mlp",
        "params_b",
        "layers",
        "hidden",
        "ffn",
        "heads",
        "kv_heads",
        "seq",
        "vocab",
        "experts",
        "topk",
        "moe_ffn",
        "tp",
        "pp",
        "vp",
        "cp",
        "ep",
        "dp",
        "zero",
        "sp",
        "mbs",
        "gbs",
        "precision",
        "recompute",
        "schedule",
        "step_time_s",
        "mem_gib",
        "status",
        "note",
    ]
    common = dict.fromkeys(columns, "") | {
        "source_id": "made up",
        "framework": "nanotron",
        "hardware": "H100-80GB",
        "interconnect": "EFA",
        "arch": "dense",
        "mlp": "swiglu",
        "layers": 16,
        "hidden": 2048,
        "ffn": 8192,
        "heads": 32,
        "kv_heads": 32,
        "seq": 4096,
        "vocab": 131072,
        "params_b": 1.34,
        "pp": 1,
        "cp": 1,
        "sp": 1,
        "gbs": 256,
        "precision": "bf16",
        "recompute": "none",
        "status": "ok",
        "zero": 0,
    }
    rows = [
        common | {"model": model, "tp": tp, "dp": 8 // tp, "mbs": 1, "step_time_s": seconds, "mem_gib": 30}
        for model in ("nanotron-1.34B", "nanotron-3.57B")
        for tp, seconds in ((1, 3.3), (2, 4.5), (4, 9.1))
    ]
    rows += [
        common | {"model": "nanotron-1.34B", "tp": 1, "dp": 8, "mbs": 64, "status": "failed"},
        common | {"model": "x", "tp": 1, "dp": 8},
    ]
    words = {
        "framework": "torchtitan",
        "tp": 8,
        "dp": 8,
        "mbs": 1,
        "step_time_s": 3,
        "hardware": "A100-80GB",
        "recompute": "selective (op)",
    }
    rows += [
        common
        | words
        | {"interconnect": "Storage: 400Gb/s, Compute: 8x 400Gb/s, one", "note": "compile, async TP"},
        common | words | {"interconnect": "8x ConnectX-7 400Gb/s"},
        common | words | {"interconnect": "400Gb/s", "hardware": "H100-80GB"},
        common | words | {"interconnect": "400Gb/s", "precision": "fp8-rowwise", "note": "vanilla TP"},
    ]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    found, skipped = read(path)
    assert (len(found), [s.why for s in skipped]) == (11, ["mbs is not stated"])
    one, two = found[-4].setting, found[-1].setting
    assert one.compiled and one.async_tensor and not two.compiled and not two.async_tensor, "the note's words"
    assert (one.recompute, one.precision, two.precision, found[0].setting.recompute) == (
        "per_op",
        "bf16",
        "bf16",
        "none",
    )
    networks = [row.cluster.name for row in found[-4:]]
    assert networks == ["dgx_a100", "dgx_a100", "dgx_h100", "a100_400g"], (
        "a disk's is not the ranks', one port's not all, A100's not H100's"
    )
    assert (
        found[0].setting.tied
        and found[0].setting.head_size == 64
        and found[1].setting.sequence
        and not found[-5].fits
    )
    run([str(path)])
    said = capsys.readouterr().out
    assert (
        "| nanotron | 3 fitted |" in said
        and "| nanotron | 3 held out |" in said
        and "| all tuned tables | 4 " in said
        and "mbs is not stated" in said
    )
    (tmp_path / "no.csv").write_text("a,b\n1,2\n")
    for wrong in (tmp_path / "no.csv", tmp_path / "missing.csv"):
        with pytest.raises(ConfigError):
            run([str(wrong)])


@pytest.mark.parametrize(
    ("column", "cell", "line"),
    [
        ("pp", "1e9", "line 3: pp is 1e9, and not a whole number from 1 to 1,024"),
        ("tp", "0", "line 3: tp is 0"),
        ("gbs", "1e400", "line 3: gbs is 1e400"),
        ("dp", "0.5", "line 3: dp is 0.5"),
        ("seq", "long", "line 3: could not convert string to float: 'long'"),
        ("step_time_s", "nan", "line 3: step_time_s is nan, and not a number above 0"),
        ("mem_gib", "-3", "line 3: mem_gib is -3"),
        ("status", "crashed", "line 3: status is 'crashed', and not ok or failed"),
        ("framework", "nobody's", "has no row whose step can be predicted"),
    ],
)
def test_a_broken_table_is_one_line(column: str, cell: str, line: str, tmp_path: Path) -> None:
    """A cell that cannot be took 15 GB, or ended in a traceback: it is named with its line.

    So is a table of which nothing is known.
    """
    good = {
        "source_id": "made up",
        "framework": "nanotron",
        "hardware": "H100-80GB",
        "interconnect": "",
        "model": "small",
        "arch": "dense",
        "mlp": "gelu",
        "params_b": "",
        "layers": 2,
        "hidden": 512,
        "ffn": 2048,
        "heads": 8,
        "kv_heads": "",
        "seq": 512,
        "vocab": 32000,
        "experts": "",
        "topk": "",
        "moe_ffn": "",
        "tp": 1,
        "pp": 1,
        "vp": "",
        "cp": "",
        "ep": "",
        "dp": 8,
        "zero": "",
        "sp": "",
        "mbs": 1,
        "gbs": 64,
        "precision": "bf16",
        "recompute": "none",
        "schedule": "",
        "step_time_s": 1.0,
        "mem_gib": 9.0,
        "status": "ok",
        "note": "",
    }
    rows = [good, good | {column: cell}] if line.startswith("line") else [good | {column: cell}]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(good))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ConfigError) as caught:
        run([str(tmp_path / "rows.csv")])
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_the_scoreboard_is_of_the_table_in_the_checkout() -> None:
    """The command without arguments reads it, so a reader can make the scoreboard again."""
    rows, skipped = read(parse([]).data)
    scores = json.loads((ROOT / "benchmarks/results/planner.json").read_text())
    for name in ("nanotron", "megatron-2023", "nemo"):
        scored = sum(scores["frameworks"][name][part]["rows"] for part in ("fitted", "held out"))
        assert scored == sum(
            row.framework == name and row.seconds is not None and row.setting.mixture is None for row in rows
        )
    assert len(skipped) == sum(count for _, count in scores["skipped"])
    assert MEASURED.parent / "a100_weak_scaling.csv" == parse([]).weak_scaling


def test_a_place_for_results_is_asked_for_first(tmp_path: Path) -> None:
    """After minutes of measuring, a missing folder would lose what was measured."""
    nowhere, tiny, alone = (
        str(tmp_path / "no" / "x.json"),
        ["--config", "configs/gpt_tiny.json"],
        RankInfo(0, 2, 0, 2, "127.0.0.1", 1),
    )
    for measure in (
        lambda: run([str(tmp_path / "rows.csv"), "--output", nowhere]),
        lambda: predicted.parse([*tiny, "--layouts", "one", "--output", nowhere]),
        lambda: collectives.main([*tiny, "--cluster-file", nowhere], alone),
        lambda: throughput.main([*tiny, "--peak", "--device-file", nowhere], alone),
    ):
        with pytest.raises(ConfigError, match="cannot write"):
            measure()


def test_published_names_of_schedules_are_known() -> None:
    """A row of a split schedule would count as 1F1B, whose bubble is up to three times as long."""
    assert {"zb_h1", "zb_v", "v_half", "v_min"} == set(SCHEDULES.values()) - {"interleaved"} <= set(BUBBLES)
