"""The predicted step time: each term against arithmetic by hand, and mistakes that these numbers would show.

No test needs a table of measurements: settings and devices are small and literal.
"""

import json
import re
from dataclasses import replace
from math import ceil, log, sqrt
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import ConfigError
from megacore.pipeline.generators import GENERATORS, build
from megacore.tools.choices import context_method
from megacore.tools.choices.context_method import CPU, exposed, fastest
from megacore.tools.choices.resolve_auto import context_method_of
from megacore.tools.planner.calibrate import calibrated, read_run, slowed
from megacore.tools.planner.devices import (
    Cluster,
    DeviceSpec,
    Level,
    cluster_names,
    device_names,
    read_cluster,
    read_device,
)
from megacore.tools.planner.layer_time import SECOND
from megacore.tools.planner.operations import START, TILES, Machine
from megacore.tools.planner.profile import Profile, profile, profile_names
from megacore.tools.planner.stages import StageWork, cut
from megacore.tools.planner.step_time import predict
from megacore.tools.planner.traffic import Transfer
from megacore.tools.planner.workload import Setting, setting_of
from megacore.tools.schedules.simulate import simulate
from tests.build import run_of

ROOT = Path(__file__).resolve().parents[2]
# A device with round numbers, and 4 ranks a machine.
DEVICE = DeviceSpec("round", {"bf16": 1e12, "fp8": 2e12}, 1.0, 1e9, 10)
SMOOTH = replace(DEVICE, multiprocessors=None)  # a product's time is its operations over the rate
CLUSTER = Cluster("round", (Level("fast", 4, 100.0, 0.5), Level("slow", None, 10.0, 2.0)))
PLAIN = Profile(
    "plain",
    stages="even",
    product_rate={"any": 1.0},
    attention_rate=1.0,
    memory_rate=1.0,
    passes=0.0,
    logit_passes=0.0,
    accumulate_bytes=0.0,
    optimizer_bytes=0.0,
    call=0.0,
    data_hidden=0.0,
)
SETTING = Setting(
    layers=4,
    hidden=64,
    ffn=256,
    heads=4,
    kv_heads=4,
    head_size=16,
    vocab=128,
    seq=32,
    micro_batch=2,
    global_batch=8,
)


def test_matrices_are_computed_while_others_travel() -> None:
    """By hand: 4e9 operations at 1e12 a second, or two exchanges of 1,000 bytes in all with
    three others inside a machine.
    """
    sent = Transfer("dp", "exchange", 4, 250, 4, 2)
    muon = replace(SETTING, matrix_operations=4e9, matrix_transfers=(sent,))
    assert (
        predict(muon, SMOOTH, CLUSTER, PLAIN).terms["optimizer"]
        == 2 * on().operation("exchange", 500, 4)
        == pytest.approx(2 * (0.5 + 3.75))
    )
    longer = replace(muon, matrix_operations=4e13)
    assert predict(longer, SMOOTH, CLUSTER, PLAIN).terms["optimizer"] == pytest.approx(40.0)


def on(profile: Profile = PLAIN, device: DeviceSpec = SMOOTH) -> Machine:
    return Machine(device, CLUSTER, profile)


def test_a_product_pays_for_whole_tiles_and_for_starting() -> None:
    """Without waves and tiles a small product would look as fast as a large one, and
    tensor parallelism would seem free.
    """
    machine = on(device=replace(DEVICE, memory_bytes_per_second=1e15))
    rows, inner, columns = 1024, 4096, 1280  # 4 × 10 tiles of 256 × 128 on 10 units: exactly 4 waves
    height, width, share = TILES[0]
    assert (rows // height, columns // width, share) == (4, 10, 1.0)
    assert machine.product(rows, inner, columns, "bf16") == pytest.approx(
        2 * rows * (inner + START) * columns / 1e12
    )
    # 44 tiles: 4.4 waves, half of what is missing is paid
    one_more = machine.product(rows, inner, columns + 1, "bf16")
    waves = min(
        (w + 0.5 * (ceil(w) - w)) * 10 * h * c / part
        for h, c, part in TILES
        for w in [ceil(rows / h) * ceil((columns + 1) / c) / 10]
    )
    assert one_more == pytest.approx(2 * waves * (inner + START) / 1e12)
    assert one_more > 1.05 * machine.product(rows, inner, columns, "bf16")
    short = machine.product(rows, 64, columns, "bf16")
    assert short / machine.product(rows, 64 * 64, columns, "bf16") > 4 / 64, (
        "a short inner dim is slower an operation"
    )
    assert machine.product(rows, inner, columns, "fp8") == pytest.approx(
        machine.product(rows, inner, columns, "bf16") / 2
    )


def test_a_thin_product_is_bound_by_memory() -> None:
    """A vector times a matrix reads the matrix: its operations alone would promise a
    hundred times the speed.
    """
    moved = 2 * (1 * 4096 + 4096 * 4096 + 1 * 4096)
    assert on(device=DEVICE).product(1, 4096, 4096, "bf16") >= moved / 1e9


def test_rings_pay_for_each_level_of_links() -> None:
    """Swapped levels would send a tensor group through the network, and a data group
    through a machine's own links.
    """
    machine = on()
    assert machine.collective(1.0, 0.0, 4) == machine.collective(1.0, 100.0, 1) == 0.0
    # 4 neighbours: 3 hops of 0.5 s, and 3/4 of 400 bytes at 100 a second.
    assert machine.collective(1.0, 400.0, 4) == pytest.approx(3 * 0.5 + 3.0)
    assert machine.collective(2.0, 400.0, 4) == pytest.approx(2 * (3 * 0.5 + 3.0)), (
        "a sum is a scatter and a gather"
    )
    # 8 neighbours on two machines: 3 hops inside and one between. Four network links carry the ring: 40 bytes
    # a second.
    assert machine.collective(1.0, 400.0, 8) == pytest.approx(3 * 0.5 + 2.0 + 400 * 7 / 8 / 40)
    # 4 ranks that are 4 apart, one on each machine: the network alone, one link each.
    assert machine.collective(1.0, 400.0, 4, stride=4) == pytest.approx(3 * 2.0 + 300 / 10)
    # 4 ranks that are 2 apart: pairs in machines, joined by the network with two links.
    assert machine.collective(1.0, 400.0, 4, stride=2) == pytest.approx(0.5 + 2.0 + 300 / 20)
    swapped = Machine(SMOOTH, Cluster("swapped", tuple(reversed(CLUSTER.levels))), PLAIN)
    assert swapped.collective(1.0, 400.0, 4) != machine.collective(1.0, 400.0, 4)
    assert machine.transfer(50.0, 1) == pytest.approx(0.5 + 0.5) and machine.transfer(
        50.0, 4
    ) == pytest.approx(2.0 + 5.0)


def test_products_and_attention_are_the_models_operations() -> None:
    """On a device without grain the products take what the FLOP count says: a
    product left out would show here.
    """
    terms = predict(SETTING, SMOOTH, CLUSTER, PLAIN).terms
    h, f, s, v, tokens = 64, 256, 32, 128, 8 * 32
    block = 2 * h * 3 * h + 2 * h * h + 2 * 2 * h * f
    assert terms["products"] == pytest.approx(3 * tokens * (4 * block + 2 * h * v) / 1e12)
    assert terms["attention"] == pytest.approx(3.5 * tokens * 4 * (2 * s * h) / 1e12), (
        "half of 4·s·h, and 2.5 times that backward"
    )
    assert sum(terms.values()) == pytest.approx(terms["products"] + terms["attention"])
    gated, grouped = (
        predict(replace(SETTING, gated=True), SMOOTH, CLUSTER, PLAIN),
        predict(replace(SETTING, kv_heads=2), SMOOTH, CLUSTER, PLAIN),
    )
    assert gated.terms["products"] - terms["products"] == pytest.approx(3 * tokens * 4 * 2 * h * f / 1e12)
    assert terms["products"] - grouped.terms["products"] == pytest.approx(3 * tokens * 4 * 2 * h * h / 1e12)
    full = predict(replace(SETTING, recompute="full"), SMOOTH, CLUSTER, PLAIN)
    assert full.terms["products"] == pytest.approx(tokens * (4 * 4 * block + 3 * 2 * h * v) / 1e12), (
        "blocks run forward twice, the head once"
    )


def test_tensor_collectives_are_counted_and_hidden() -> None:
    """Four sums a block, as two scatters and two gathers each way; with sequence parallelism
    backward gathers two inputs again.
    """
    tensor = replace(SETTING, tensor=2)
    sums = predict(tensor, SMOOTH, CLUSTER, PLAIN).terms["tensor"]
    moved, microbatches = 2 * 64 * 64, 4  # bytes of [tokens, hidden]
    ring = 1 * 0.5 + moved / 2 / 100
    assert sums == pytest.approx(microbatches * (4 * 4 * 2 * ring + 2 * 2 * ring)), (
        "4 blocks of 4 sums, and the head's two"
    )
    sequence = predict(replace(tensor, sequence=True), SMOOTH, CLUSTER, PLAIN).terms["tensor"]
    assert sequence == pytest.approx(microbatches * (4 * 10 * ring + 2 * ring))
    hidden = predict(tensor, SMOOTH, CLUSTER, replace(PLAIN, tensor_hidden=0.5)).terms["tensor"]
    assert hidden == pytest.approx(microbatches * (4 * 4 * ring + 2 * 2 * ring))
    cpu = predict(tensor, replace(SMOOTH, overlaps=False), CLUSTER, replace(PLAIN, tensor_hidden=0.5)).terms[
        "tensor"
    ]
    assert cpu == predict(tensor, SMOOTH, CLUSTER, PLAIN).terms["tensor"] > hidden, (
        "cores that send compute nothing meanwhile"
    )


def test_what_a_backward_repeats_is_counted() -> None:
    """Recomputation that costs nothing would always be chosen; counted as a whole forward it never would."""
    profile = replace(PLAIN, passes=1.0)

    def work(recompute: str, **values: bool) -> dict[str, float]:
        setting = replace(SETTING, recompute=recompute, flash=values.pop("flash", True))
        return predict(setting, SMOOTH, CLUSTER, replace(profile, **values)).terms

    none, full = work("none"), work("full")
    for term in ("products", "attention", "passes"):
        assert work("half")[term] == pytest.approx((none[term] + full[term]) / 2), term
    per_op = work("per_op")
    assert per_op["attention"] == none["attention"] and per_op["passes"] == full["passes"]
    assert per_op["products"] - none["products"] == pytest.approx(
        SECOND * (full["products"] - none["products"])
    )
    # megacore repeats the activation (4 blocks of 8 · 32 tokens read and write 256 numbers), Megatron its
    # fused attention.
    assert work("selective", repeats_attention=True)["attention"] == full["attention"]
    own = work("selective", repeats_attention=False)
    assert own["attention"] == none["attention"] and own["passes"] - none["passes"] == pytest.approx(
        4 * 8 * 32 * 2 * 256 * 2 / 1e9
    )
    assert (
        work("selective", repeats_attention=False, flash=False)["attention"]
        == work("full", flash=False)["attention"]
    )


def test_tensor_ranks_may_scatter_what_the_next_stage_gathers() -> None:
    """Each of them sending the whole message would fill the network with copies: it made large
    pipelines of 2022 a tenth too slow.
    """
    profile = replace(PLAIN, pipeline_hidden=0.0)
    setting = replace(SETTING, layers=4, tensor=2, pipeline=4, global_batch=8)
    whole, parts = (
        predict(setting, SMOOTH, CLUSTER, replace(profile, scatters=yes)).terms["pipeline"]
        for yes in (False, True)
    )
    # bytes, and transfers of 4 microbatches; 2 ranks away is inside of a machine
    moved, sides = 2 * 64 * 64, 4 * 4
    assert whole == pytest.approx(sides * (0.5 + moved / 100))
    assert parts == pytest.approx(sides * (0.5 + moved / 2 / 100 + 0.5 + moved / 2 / 100)), (
        "a half is sent, a half is gathered"
    )
    sequence = replace(setting, sequence=True)  # which divides messages anyway
    one, other = (
        predict(sequence, SMOOTH, CLUSTER, replace(profile, scatters=yes)).terms["pipeline"]
        for yes in (False, True)
    )
    assert one == other == pytest.approx(sides * (0.5 + moved / 2 / 100))


def test_scores_that_are_kept_are_moved() -> None:
    """Unfused attention is mostly that: with dropout a forward moves them six and a half times."""
    kept = replace(SETTING, flash=False)
    scores = 2 * 8 * 32 * 32 * 4  # bytes of a block's, of 8 sequences and 4 heads
    terms = predict(kept, SMOOTH, CLUSTER, replace(PLAIN, score_passes=6.5)).terms
    assert terms["passes"] == pytest.approx(4 * 2.5 * 6.5 * scores / 1e9), (
        "4 blocks; backward takes one and a half times the forward's"
    )


def test_what_is_compiled_or_asynchronous_or_made_for_another_device() -> None:
    """Each is stated by a row or a profile: mixed up, a constant would be fitted to another cause's time."""

    def terms(setting: Setting, **values: object) -> dict[str, float]:
        return predict(setting, SMOOTH, CLUSTER, PLAIN.with_constants(values)).terms

    compiled = replace(SETTING, compiled=True)
    assert terms(compiled, passes=3.0, compiled_passes=0.4)["passes"] == pytest.approx(
        terms(SETTING, passes=1.2)["passes"]
    )
    tensor = replace(SETTING, tensor=2)
    plain, parts = (
        terms(replace(tensor, async_tensor=yes), async_hidden=0.75)["tensor"] for yes in (False, True)
    )
    head = 4 * 2 * 2 * (0.5 + 2 * 64 * 64 / 2 / 100)
    assert parts - head == pytest.approx((plain - head) / 4), "the head's collectives are not in pieces"
    slow = terms(SETTING, attention_on={"round": 0.5, "another": 0.1})
    assert (
        slow["attention"] == pytest.approx(2 * terms(SETTING)["attention"])
        and slow["products"] == terms(SETTING)["products"]
    )
    ring = replace(SETTING, context=4, context_method="ring")
    balanced, last = (terms(ring, ring_balanced=yes)["attention"] for yes in (True, False))
    assert last == pytest.approx(balanced * 7 / 4), (
        "half of its own part and three whole ones, where the mean is two"
    )


@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 4), (4, 16)])
@pytest.mark.parametrize("schedule", GENERATORS)
def test_the_bubble_is_that_of_the_simulated_schedule(
    schedule: str, pipeline: int, microbatches: int
) -> None:
    """The formula stands for a simulation of thousands of microbatches; it must agree
    where the simulation is small.
    """
    plan = build(schedule, pipeline, microbatches)
    chunks = plan.stages // pipeline
    setting = replace(
        SETTING,
        layers=8,
        pipeline=pipeline,
        chunks=chunks,
        schedule=schedule,
        vocab=0,
        micro_batch=1,
        global_batch=microbatches,
        seq=1,
    )
    free = replace(PLAIN, pipeline_hidden=1.0, attention_rate=1e9)
    prediction = predict(setting, SMOOTH, CLUSTER, free)
    work = (prediction.terms["products"] + prediction.terms["attention"]) / microbatches / chunks
    timeline = simulate(plan, [work / 3] * plan.stages, [2 * work / 3] * plan.stages)
    # half a rank's forward, which BUBBLES leaves out (docs/schedules.md has it)
    known = work / 3 if schedule == "v_min" else 0.0
    assert prediction.step == pytest.approx(timeline.makespan, abs=known + 1e-9), (
        "BUBBLES has another bubble, or none"
    )
    uneven = replace(setting, layers=9)
    assert predict(uneven, SMOOTH, CLUSTER, free).terms["products"] > prediction.terms["products"], (
        "the stage with one more sets the pace"
    )


def test_gradients_are_summed_behind_the_backward() -> None:
    """Data parallelism costs what the last backward does not hide, and a divided optimizer
    gathers its parameters besides.
    """
    data = replace(SETTING, data=4, global_batch=8)
    parameters = 4 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 128 * 64
    ring = 3 * 0.5
    sums = predict(data, SMOOTH, CLUSTER, PLAIN).terms["data"]
    assert sums == pytest.approx(2 * (ring + 4 * parameters * 3 / 4 / 100))
    divided = predict(replace(data, zero=1), SMOOTH, CLUSTER, PLAIN).terms["data"]
    assert divided == pytest.approx(
        (ring + 4 * parameters * 3 / 4 / 100) + (ring + 2 * parameters * 3 / 4 / 100)
    )
    exact = predict(
        replace(data, zero=1, precision="fp32"), replace(SMOOTH, peak_flops={"fp32": 1e12}), CLUSTER, PLAIN
    ).terms["data"]
    assert exact == pytest.approx(2 * (ring + 4 * parameters * 3 / 4 / 100)), (
        "fp32 parameters are gathered as they are"
    )
    slow = replace(SMOOTH, peak_flops={"bf16": 1.0})  # so slow that its backward hides anything
    assert predict(data, slow, CLUSTER, replace(PLAIN, data_hidden=1.0)).terms["data"] == 0.0
    shown = replace(PLAIN, data_hidden=1.0, sharded_hidden=0.0)  # a framework may hide plain sums only
    assert predict(data, slow, CLUSTER, shown).terms["data"] == 0.0
    divided = replace(data, zero=1)
    plain, kept, hidden = (
        predict(divided, slow, CLUSTER, p).terms["data"]
        for p in (PLAIN, shown, replace(PLAIN, data_hidden=1.0))
    )
    assert kept == plain > hidden


def test_the_host_and_the_slowest_rank_cost_time() -> None:
    """A block that the host starts more slowly than the device runs it takes the host's time."""
    plain = predict(SETTING, SMOOTH, CLUSTER, PLAIN)
    busy = predict(SETTING, SMOOTH, CLUSTER, replace(PLAIN, layer_host=1.0))
    head = 4 * 3 * 2 * 64 * 128 * 64 / 1e12
    assert busy.step == pytest.approx(4 * 4 * 1.0, rel=1e-6) and head < plain.step < 1e-3
    assert predict(SETTING, SMOOTH, CLUSTER, replace(PLAIN, step_host=3.0)).step == pytest.approx(
        plain.step + 3.0
    )
    many = predict(replace(SETTING, data=4), SMOOTH, CLUSTER, replace(PLAIN, jitter=0.1))
    assert many.step == pytest.approx(
        predict(replace(SETTING, data=4), SMOOTH, CLUSTER, PLAIN).step * (1 + 0.1 * sqrt(2 * log(4)))
    )


def test_stages_are_cut_by_the_frameworks_rule() -> None:
    """nanotron lets a stage pass its share, so that the head stands alone: as if cut evenly,
    its pipelines would look faster.
    """
    setting = replace(
        SETTING,
        layers=16,
        hidden=2048,
        ffn=8192,
        heads=32,
        kv_heads=32,
        head_size=64,
        vocab=131072,
        gated=True,
        pipeline=8,
    )
    assert [stage.blocks for stage in cut(setting, "nanotron")] == [3, 3, 2, 3, 2, 3, 0, 0]
    assert [stage.head for stage in cut(setting, "nanotron")].index(True) == 6
    assert cut(setting, "even") == tuple(StageWork(2, i == 0, i == 7) for i in range(8))
    assert cut(setting, "cost")[-1].blocks < 2, "the head costs four blocks"


def test_a_config_becomes_a_setting() -> None:
    """What the planner predicts for a config is what the config trains."""
    config = run_of(
        {"model": {"num_layers": 4, "activation": "swiglu", "hidden_size": 64, "num_heads": 4}},
        "parallel.tensor=2",
        world=4,
    )
    setting = setting_of(config)
    assert (setting.layers, setting.tensor, setting.data, setting.world, setting.gated) == (4, 2, 2, 4, True)
    assert (
        setting.microbatches == config.num_microbatches and setting.precision == "bf16" and setting.zero == 0
    )
    divided = setting_of(
        run_of({}, "parallel.context=2", "parallel.pipeline=2", "parallel.schedule=interleaved", world=8)
    )
    assert (divided.context, divided.pipeline, divided.data, divided.chunks, divided.world) == (2, 2, 2, 2, 8)
    assert divided.tokens == divided.seq * divided.micro_batch // 2
    halves = setting_of(run_of({}, "engine.reduce_dtype=bf16", world=8))
    assert (setting.gradient_bytes, halves.gradient_bytes) == (4, 2), "what travels, not what is added up"
    engines = ([], ["engine.shard_optimizer=true"], ["engine.kind=fsdp"])
    assert [setting_of(run_of({}, *own, world=8)).zero for own in engines] == [0, 1, 3]
    piped = [["engine.kind=fsdp", "parallel.pipeline=2", *more] for more in ([], ["engine.reshard=true"])]
    assert [setting_of(run_of({}, *own, world=8)).zero for own in piped] == [2, 3], (
        "whole during a step, unless it says otherwise"
    )


def test_context_ranks_share_the_tokens_and_gather_keys_and_values() -> None:
    """Counted as data ranks alone, they would halve a step without paying for it;
    left out, they would double it.
    """
    plain, divided = (predict(replace(SETTING, context=c), SMOOTH, CLUSTER, PLAIN).terms for c in (1, 2))
    for term in ("products", "attention"):
        assert divided[term] == pytest.approx(plain[term] / 2), term
    # keys and values of both sequences, in two bytes: half of them come from the other rank
    gathered = 0.5 + 2 * 2 * 64 * 64 / 2 / 100
    assert divided["context"] == pytest.approx(4 * 4 * 3 * gathered), (
        "once forward and twice backward, in 4 blocks and 4 microbatches"
    )
    assert divided["data"] > plain["data"] == 0.0, "they sum gradients"


def context_terms(method: str, ranks: int = 4, **values: float) -> float:
    """Seconds of a block and microbatch in which context ranks wait, with 16 · 2 tokens a rank and as
    slow an attention as is given.
    """
    setting = replace(SETTING, seq=16 * ranks, context=ranks, context_method=method, layers=1, global_batch=2)
    return predict(setting, SMOOTH, CLUSTER, replace(PLAIN, **values)).terms["context"]


OWN = 2 * 32 * 64 * 2  # bytes of a rank's keys and values


def test_a_ring_hides_its_transfers_behind_attention() -> None:
    """Counted in full, it would never be chosen; forgotten, it would win also where attention is short."""
    step, home = 0.5 + OWN / 100, 0.5 + OWN / 100  # latency and bytes over the fast link
    merging = 10 * 32 * 64 * 3 / 4 * 4 / 1e9
    slow, fast = context_terms("ring", attention_rate=1e-11), context_terms("ring")
    assert slow == pytest.approx(merging + home)
    attention = 4 * 32 * 64 * 64 / 2 / 1e12  # of all steps
    assert fast == pytest.approx(
        merging + 3 * (step - attention / 4) + 3 * (2 * step - 2.5 * attention / 4) + home
    )
    between = context_terms("ring", ranks=8, attention_rate=1e-11)
    assert between == pytest.approx(2 * merging + 2.0 + OWN / 10), (
        "its slowest neighbours are on two machines"
    )


def test_an_exchange_leaves_a_machine_through_one_port() -> None:
    """A gather passes each of the machine's ports once; what is exchanged between machines
    leaves through each rank's own.
    """
    queries = OWN / 2
    one = 0.5 + queries * 3 / 4 / 100
    assert context_terms("ulysses") == pytest.approx(8 * one), "q, k, v and the output, forward and backward"
    apart = 2.0 + queries * 4 / 8 / 10
    shared = 2.0 + 2 * queries * 4 / 8 / 10  # four heads, on eight ranks
    assert on().links.exchange(queries, 8) == pytest.approx(apart)
    assert context_terms("ulysses", ranks=8) == pytest.approx(2 * 2 * (apart + shared))
    assert on().links.exchange(queries, 1) == 0.0


def test_a_devices_memory_is_what_a_process_can_have() -> None:
    """A layout that fills the 80 GiB of a datasheet would end on an H100, of which a process gets 79.1."""
    files = sorted((ROOT / "megacore/tools/planner/devices").glob("*.json"))
    assert len(files) > 20
    for path in files:
        content = json.loads(path.read_text())
        least = min(map(float, re.findall(r"\d+\.\d\d", content["memory_source"])))
        assert least - 0.2 < content["memory_gib"] <= least, path.name
    assert read_device("h100").memory_gib == 79.1 and read_device("mi300x").memory_gib == 191.6


def test_known_devices_and_clusters_can_be_read(tmp_path: Path) -> None:
    """A file with a slip would fail at the first prediction for that device, or silently halve a time."""
    for name in device_names():
        device = read_device(name)
        assert device.name == name and device.peak_flops and device.memory_gib and device.power_watts
    for name in cluster_names():
        levels = read_cluster(name).levels
        assert levels[0].bytes_per_second > levels[-1].bytes_per_second
    for known in profile_names():
        assert profile(known).name == known
    (tmp_path / "bad.json").write_text('{"name": "x", "levels": []}')
    for read, path, said in (
        (read_device, "h1000", "not known"),
        (read_cluster, str(tmp_path / "bad.json"), "no cluster file"),
    ):
        with pytest.raises(ConfigError, match=said):
            read(path)
    with pytest.raises(ConfigError, match="no device file"):
        read_device(str(tmp_path / "bad.json"))


def test_a_run_calibrates_its_machine(tmp_path: Path) -> None:
    """One short run must correct what is predicted for more devices, in what the device
    does and not in what links do.
    """
    truth = slowed(PLAIN, 1.7)
    seconds = predict(SETTING, SMOOTH, CLUSTER, truth).step
    found = calibrated(PLAIN, SETTING, seconds, SMOOTH, CLUSTER)
    assert found is not None
    many = replace(SETTING, data=8, tensor=2, global_batch=64)
    assert predict(many, SMOOTH, CLUSTER, found).step == pytest.approx(
        predict(many, SMOOTH, CLUSTER, truth).step
    )
    assert (
        predict(many, SMOOTH, CLUSTER, found).terms["data"]
        == predict(many, SMOOTH, CLUSTER, PLAIN).terms["data"]
    )
    assert calibrated(PLAIN, SETTING, 1e9, SMOOTH, CLUSTER) is None
    config = run_of(
        {"model": {"num_layers": 4, "hidden_size": 64, "num_heads": 4}}, "parallel.tensor=2", world=4
    )
    (tmp_path / "config.json").write_text(config.model_dump_json(by_alias=True))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step_seconds": {t}}}\n' for t in (9, 9, 9, 1, 1, 2, 1))
    )
    assert read_run(str(tmp_path)) == (setting_of(config), 1.0)
    for name, text, said in (
        ("metrics.jsonl", '{"valid_loss": 1}\n', "logged no step"),
        ("config.json", "[]", "no run's config"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_run(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_run(str(tmp_path / "none"))


def test_chunks_that_take_turns_hide_gradient_sums_longer() -> None:
    """Under `interleaved` a chunk's gradients are complete a round of microbatches before the next one's: as
    if all came at the end, large pipelines would seem to wait for their data ranks.
    """
    slow = replace(SETTING, layers=8, pipeline=4, data=4, global_batch=64)
    hidden = []
    for chunks, schedule in ((1, "1f1b"), (2, "interleaved")):
        setting = replace(slow, chunks=chunks, schedule=schedule)
        none, half = (
            predict(setting, SMOOTH, CLUSTER, replace(PLAIN, data_hidden=h, step_host=0.0)).terms["data"]
            for h in (0.0, 0.5)
        )
        hidden.append(none - half)
    assert hidden[0] > 0 and hidden[1] == pytest.approx(hidden[0] * (4 + 1) / 2, rel=1e-4), (
        "one chunk's round, and the last chunk's end"
    )


def best(
    setting: Setting,
    *,
    again: bool = False,
    exchanges: bool = True,
    cluster: Cluster = CLUSTER,
    **values: Any,
) -> str:
    """The fastest method of context ranks, on links and by constants that are given."""
    rates = Machine(SMOOTH, cluster, replace(PLAIN, **values)).rates(setting.precision)
    return fastest(setting.divided, rates, again=again, exchanges=exchanges)


def test_the_fastest_method_goes_by_links_heads_and_the_length_of_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rule of thumb would choose alike on any links, and for a sequence of any length."""
    many = replace(SETTING, seq=64, context=4, heads=8, head_size=8, kv_heads=8)
    few = replace(many, kv_heads=1)  # whose keys are short, and which ulysses has to send four times
    slow_start = Cluster("slow start", (Level("fast", None, 1e9, 2.0),))
    assert best(many) == "ulysses", "it sends least"
    assert best(few) != "ulysses", "its queries are more than all keys"
    assert best(few, exchanges=False) != "ulysses" != best(many, exchanges=False), "heads cannot be dealt"
    assert best(many, attention_rate=1e-11) == "ring", "attention hides it, but for one transfer home"
    assert best(many, attention_rate=1e-11, ring_hidden=0.0) == "ulysses", (
        "a device that cannot compute while it sends hides nothing"
    )
    assert best(few, cluster=slow_start) == "ulysses", (
        "an exchange takes one hop, where the others take as many as there are ranks"
    )
    assert best(replace(many, context=8, seq=128), exchanges=False) == "gather", (
        "between machines it uses all their ports"
    )
    slower = {"gather": 0.5, "ring": 0.5}
    assert best(few, attention_rate=1e-9, pieces_rate=slower) == "ulysses" != best(few, attention_rate=1e-9)
    monkeypatch.setattr(context_method, "exposed", lambda own, method, rates, attention: (1.0, 1.0))
    assert best(many) == best(many, attention_rate=1e-11), "an estimate that knows no method says nothing"


def test_a_forward_that_is_computed_again_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted once, auto would take under full recomputation what is fast only without it."""
    seconds = {"gather": (2.0, 3.0), "ring": (1.0, 4.5), "ulysses": (9.0, 9.0)}
    monkeypatch.setattr(context_method, "exposed", lambda own, method, rates, attention: seconds[method])
    found = {}
    for recompute in ("none", "selective", "full"):
        train = {"seq_len": 64, "micro_batch_size": 1, "global_batch_size": 1, "recompute": recompute}
        model = {"num_layers": 1, "num_heads": 8, "hidden_size": 64, "vocab_size": 2}
        config = run_of({"model": model, "train": train, "parallel": {"context": 4}}, world=4)
        found[recompute] = context_method_of(config)
    assert found == {"none": "gather", "selective": "gather", "full": "ring"}


def test_on_a_cpu_auto_takes_what_was_fastest_there() -> None:
    """The constants of a CPU explain what `benchmarks.context` measured; auto must not take what was
    slowest, as a rule of thumb did.
    """
    report = json.loads((ROOT / "benchmarks" / "results" / "context_2026-11-22.json").read_text())
    for kv_heads in {row["kv_heads"] for row in report["rows"]}:
        rows = {row["method"]: row["seconds"] for row in report["rows"] if row["kv_heads"] == kv_heads}
        model = {
            "num_layers": 1,
            "num_heads": 8,
            "num_kv_heads": kv_heads,
            "hidden_size": 512,
            "vocab_size": 2,
        }
        train = {
            "precision": "fp32",
            "seq_len": 4096,
            "micro_batch_size": 1,
            "global_batch_size": 1,
            "device": "cpu",
        }
        config = run_of({"model": model, "train": train, "parallel": {"context": 4}}, world=4)
        assert context_method_of(config) == min(rows, key=rows.__getitem__)
        own = setting_of(config).divided
        attention = 2 * own.tokens * own.seq * own.size / CPU.operations
        for method, measured in rows.items():
            found = 3.5 * attention + sum(exposed(own, method, CPU, (attention, 2.5 * attention)))
            assert found == pytest.approx(measured, rel=0.15), (method, kv_heads)
        del rows["ulysses"]
        assert fastest(own, CPU, again=False, exchanges=False) == min(rows, key=rows.__getitem__)


def test_every_term_of_a_step_by_hand() -> None:
    """A term that is forgotten, counted twice or goes over the wrong links: all are computed here once
    more, without the model's code.
    """
    peak, memory = 1e15, 1e12
    device = DeviceSpec("plain", {"bf16": peak}, memory_bytes_per_second=memory)
    levels = (Level("a", 2, 1e11, 1e-6), Level("b", 4, 5e10, 1e-5), Level("c", None, 1e10, 1e-4))
    profile = Profile(
        product_rate={"any": 1.0},
        attention_rate=1.0,
        memory_rate=1.0,
        call=0.0,
        data_hidden=0.0,
        step_host=0.5,
        jitter=0.01,
        stages="even",
    )
    tokens, hidden, ffn, vocab, microbatches = 2048, 1024, 4096, 32768, 8
    setting = Setting(
        layers=8,
        hidden=hidden,
        ffn=ffn,
        heads=8,
        kv_heads=8,
        head_size=128,
        vocab=vocab,
        seq=tokens,
        tensor=2,
        pipeline=4,
        data=2,
        sequence=True,
        zero=1,
        global_batch=2 * microbatches,
    )
    block, table = (4 * hidden**2 + 2 * hidden * ffn) / 2, vocab * hidden / 2  # parameters of a tensor rank
    moved = 2 * tokens * (10 * hidden / 2 + 4 * hidden / 2 + 2 * ffn / 2)
    ring = 1e-6 + 2 * tokens * hidden / 2 / 1e11  # of two neighbours
    blocks = {  # of the last stage, which also has the head
        "products": 2 * 6 * tokens * block / peak,
        "attention": 2 * 3.5 * 4 * tokens**2 * hidden / 2 / 2 / peak,
        "passes": 2 * (2.5 * moved + 8 * block) / memory,
        "tensor": 2 * 10 * ring,  # four times forward, and six backward
    }
    head = {
        "products": 6 * tokens * table / peak,
        "passes": (8 * 2 * tokens * vocab / 2 + 8 * table) / memory,
        "tensor": 2 * ring,
    }
    other, last = sum(blocks.values()), sum(blocks.values()) + sum(head.values())
    message = 1e-4 + 2 * tokens * hidden / 2 / 1e10  # four ranks away: beyond both inner levels
    held = 2 * block + table
    terms = {name: microbatches * (seconds + head.get(name, 0.0)) for name, seconds in blocks.items()}
    terms |= {
        "pipeline": microbatches * 4 * message,
        "bubble": 3 * other + 2 * 3 * message,
        # two ranks apart: the middle level
        "data": (1e-5 + 2 * held / 2 / 5e10) + (1e-5 + 4 * held / 2 / 5e10),
        "optimizer": 30 * held / 2 / memory,
        "host": 0.5,
    }
    terms["stragglers"] = 0.01 * sqrt(2 * log(16)) * sum(terms.values())
    found = predict(setting, device, Cluster("plain", levels), profile)
    assert {name: value for name, value in found.terms.items() if abs(value) > 1e-12} == pytest.approx(
        terms, rel=1e-9
    )
    assert found.step == pytest.approx(sum(terms.values()), rel=1e-9) and last > other
    folded = predict(replace(setting, schedule="zb_v", chunks=2), device, Cluster("plain", levels), profile)
    one = 6 * tokens * (2 * block + table) / peak
    assert folded.terms["products"] == pytest.approx(microbatches * one, rel=1e-9), (
        "of a V the first rank has the head"
    )
