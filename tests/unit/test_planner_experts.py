"""The planned step of a mixture of experts: what ranks with experts wait for each other, whose rows are
most, and the search over them.
"""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks.planner_rows import read
from launch import plan as script
from megacore.errors import ConfigError
from megacore.model.expert_block import MixtureOfExperts
from megacore.tools.choices.flops import projection_weights
from megacore.tools.choices.measured import mixtures_of
from megacore.tools.choices.meta_watch import MetaWatch
from megacore.tools.dry_run.fake import as_on_its_device, playing
from megacore.tools.planner import search as search_module
from megacore.tools.planner.devices import read_cluster, read_device
from megacore.tools.planner.memory import communicators_of, fullest_rank, rank_memory
from megacore.tools.planner.mixture_time import exchange_once, mixture_times, waits
from megacore.tools.planner.operations import Machine
from megacore.tools.planner.profile import profile
from megacore.tools.planner.routing import read_routing
from megacore.tools.planner.search import Candidate, fitting, replace_config, search
from megacore.tools.planner.step_time import Prediction, predict
from megacore.tools.planner.workload import Mixture, Setting, routed, setting_of
from tests.build import run_of, topology_of
from tests.training import write_config

LARGE = Setting(
    layers=8,
    hidden=4096,
    ffn=8192,
    heads=32,
    kv_heads=8,
    head_size=128,
    vocab=32000,
    seq=4096,
    gated=True,
    data=16,
    zero=1,
    global_batch=64,
    mixture=Mixture(64, 4, 2048, ranks=8),
)
MODEL = {
    "num_experts": 8,
    "expert_ffn_size": 64,
    "shared_experts": 1,
    "first_dense": 1,
    "bias": False,
    "activation": "swiglu",
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
}


def step(setting: Setting, **mixture: float) -> Prediction:
    """On two machines of eight H100."""
    assert setting.mixture is not None
    changed = replace(setting, mixture=replace(setting.mixture, **mixture))  # type: ignore[arg-type]
    return predict(changed, read_device("h100"), read_cluster("dgx_h100"), profile("megacore"))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write_config(tmp_path, "unused", model=MODEL, train={"precision": "bf16", "global_batch_size": 16})


def test_an_exchange_between_machines_is_dearer_than_within(path: str) -> None:
    """As a ring's gather it cost hardly more: each link would carry what here one port carries alone."""
    alone, within, between = (step(LARGE, ranks=ranks).terms["experts"] for ranks in (1, 8, 16))
    assert alone == 0 and between > 2 * within > 0


def test_a_token_that_travels_once_spares_the_ports_between_machines() -> None:
    """Eight experts on two machines: seven or eight copies of a token in ten would cross,
    where less than two are needed.
    """
    machine = Machine(read_device("h100"), read_cluster("dgx_h100"), profile("megacore"))
    every, once = machine.links.exchange(1e9, 16), exchange_once(machine.links, 1e9, 16, 8)
    assert once < every / 3 and exchange_once(machine.links, 1e9, 16, 1) == pytest.approx(every, rel=0.01)
    assert (
        exchange_once(machine.links, 1e9, 8, 8) == machine.links.exchange(1e9, 8)
        and exchange_once(machine.links, 1e9, 1, 8) == 0.0
    )
    assert step(LARGE, ranks=16, once=True).step < step(LARGE, ranks=16).step


def test_rows_are_copied_no_more_often_than_the_framework_says() -> None:
    """Other passes than one for each operation are fitted to dense blocks: a copy of
    rows has none of them.
    """
    more = replace(profile("megacore"), passes=4.0)
    narrow = replace(LARGE, mixture=Mixture(64, 4, 1, ranks=8))
    device, cluster = read_device("h100"), read_cluster("dgx_h100")
    dense = replace(narrow, mixture=Mixture(64, 1, 1, ranks=1))  # with hardly any rows
    (one, other), (few, many) = (
        [predict(s, device, cluster, p).terms["passes"] for p in (profile("megacore"), more)]
        for s in (narrow, dense)
    )
    assert many > 1.5 * few and other - one == pytest.approx(many - few, rel=0.01)


def test_latent_attention_is_its_own_products() -> None:
    """DeepSeek-V3's: what is multiplied has as many weights as the model, and
    tensor ranks divide what they do.
    """
    config = run_of("configs/deepseek_v3.json", world=2048)
    s = setting_of(config)
    assert s.attention_weights == projection_weights(config) == 187_105_280
    assert s.head_size == 192 and s.latent is not None
    halves = replace(s, tensor=2, context=1, data=64)
    whole = replace(s, tensor=1, context=1, data=128)
    term = [
        predict(one, read_device("h100"), read_cluster("dgx_h100"), profile("megacore")).terms["products"]
        for one in (whole, halves)
    ]
    assert 0.9 < term[1] / term[0] < 1.1
    plain = replace(whole, latent=None)
    assert (
        predict(plain, read_device("h100"), read_cluster("dgx_h100"), profile("megacore")).terms["products"]
        > 1.1 * term[0]
    )


def test_shared_experts_hide_what_travels_meanwhile() -> None:
    """The rows' way there, in forward; nothing else runs while they come back."""
    alone, beside, long = (
        step(LARGE, ranks=8, shared=features).terms["experts"] for features in (0, 128, 2**16)
    )
    assert long < beside < alone
    assert long == pytest.approx(step(LARGE, ranks=8, shared=2**20).terms["experts"]) and long > alone / 2


def test_the_busiest_rank_decides() -> None:
    """All ranks wait for it in every block: its rows are multiplied, moved and received."""
    balanced, uneven = step(LARGE), step(LARGE, busiest=2.0)
    for term in ("products", "passes", "experts"):
        assert uneven.terms[term] > 1.1 * balanced.terms[term], term
    assert uneven.terms["attention"] == balanced.terms["attention"]


def test_halves_hide_each_others_exchanges() -> None:
    """By hand, two halves with 1 s an exchange and 3 s of experts each: the first has come at 1, and is
    computed at 4. The second is at 7, and is back at 8: of 8 s 2 are waited. In one part both exchanges of 2
    s are, of which shared experts hide one.
    """
    assert (waits(1.0, 3.0, 2), waits(2.0, 6.0, 1), waits(2.0, 6.0, 1, 5.0)) == (2.0, 4.0, 2.0)
    # Exchanges of 3 s, experts of 1: rows come at 3 and 6, are back at 9 and 12, and only the experts' 2 s
    # are hidden; beside them 2 more.
    assert (waits(3.0, 1.0, 2), waits(3.0, 1.0, 2, 2.0)) == (10.0, 8.0)


def test_halves_are_predicted() -> None:
    """Of exchanges less is waited for; products have half the rows, and every
    expert's gradient is added twice.
    """
    machine, m = Machine(read_device("h100"), read_cluster("dgx_h100"), profile("megacore")), LARGE.mixture
    assert m is not None
    in_halves = replace(LARGE, mixture=replace(m, halves=True))
    (forward, backward), (whole, whole_back) = (
        mixture_times(setting, machine) for setting in (in_halves, LARGE)
    )
    rows = 4096 * 4 / 2
    up, down = (machine.product(rows / 8, i, c, "bf16", 8) for i, c in ((4096, 2 * 2048), (2048, 4096)))
    computed = up + down + machine.pass_over(machine.profile.passes * 2 * rows * 3 * 2048)
    one, counts = machine.links.exchange(2 * rows * 4096, 8), machine.links.exchange(2 * 8 * 64, 8)
    assert computed > one, "the first half is back, and the second has come, while experts compute"
    assert (
        forward["experts"] == pytest.approx(counts + 2 * one) and whole["experts"] > 1.8 * forward["experts"]
    )
    assert forward["products"] == pytest.approx(machine.product(4096, 4096, 64, "bf16") + 2 * (up + down))
    again = machine.pass_over(machine.profile.accumulate_bytes * LARGE.expert_parameters)
    assert (
        backward["passes"] - whole_back["passes"] == pytest.approx(again)
        and forward["passes"] == whole["passes"]
    )
    slow = replace(machine, device=replace(machine.device, overlaps=False))
    assert mixture_times(in_halves, slow)[0]["experts"] == pytest.approx(counts + 4 * one)


def test_the_search_sends_rows_in_halves_where_that_is_faster(path: str) -> None:
    """Sixteen ranks on two machines, whose rows take as long as products; within one machine
    and of few features it is slower.
    """
    wide = [
        "model.num_experts=16",
        "model.hidden_size=4096",
        "model.expert_ffn_size=4096",
        "train.seq_len=4096",
        "parallel.expert=16",
    ]
    every = ((16, wide, True), (8, ["parallel.expert=8"], False))
    for world, sizes, faster in every:
        layout = run_of(path, *sizes, "train.global_batch_size=32", world=world)
        with patch.object(search_module, "layouts", lambda *_, layout=layout: [layout]):
            found = search(
                layout, world, read_device("h100"), read_cluster("dgx_h100"), profile("megacore"), 1e6
            )
        assert [c.config.parallel.expert_halves for c in found.fit] == ([True, False] if faster else [False])
        assert f"parallel.expert_halves={str(faster).lower()}" in found.fit[0].overrides()
        assert ("in halves" in found.fit[0].describe()) == faster
        own = setting_of(found.fit[0].config)
        assert own.mixture is not None and own.mixture.halves == faster
        assert (
            predict(own, read_device("h100"), read_cluster("dgx_h100"), profile("megacore"))
            == found.fit[0].prediction
        )


def test_small_groups_share_the_device() -> None:
    """Products of experts run at once: one by one, 64 small ones would leave most of the device idle."""
    many = replace(LARGE, mixture=Mixture(256, 4, 512, ranks=1))
    few = replace(LARGE, mixture=Mixture(8, 4, 512, ranks=1))
    assert step(many).terms["products"] < 2 * step(few).terms["products"]


def logged(folder: Path, loads: list[float]) -> str:
    """A run's records, of which the first half is of a router that knew nothing."""
    early, late = ({"expert_load/blocks.1": own} for own in ([8.0] + [0.0] * 7, loads))
    found = folder / "metrics.jsonl"
    found.write_text("".join(json.dumps({"step": n, **own}) + "\n" for n, own in enumerate((early, late), 1)))
    return str(found)


def test_a_runs_loads_say_how_many_rows_the_busiest_rank_has(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neighbours are on one rank: a busy expert beside an idle one costs nothing."""
    metrics = logged(tmp_path, [2.0, 0.0, 1, 1, 1.5, 1.5, 0.5, 0.5])
    routing = read_routing(metrics, 8)
    assert [routing.busiest(ranks) for ranks in (1, 2, 4, 8)] == [1.0, 1.0, 1.5, 2.0]
    setting = setting_of(run_of(path, "parallel.expert=4", world=4))
    assert setting.mixture == Mixture(8, 2, 64, 64, 0.5, ranks=4)
    found = routed(setting, routing).mixture
    assert found is not None and found.busiest == 1.5
    for factor, most in ((2.0, 1.5), (1.25, 1.25)):  # a capacity bounds it
        bounded = setting_of(run_of(path, "parallel.expert=4", f"model.capacity_factor={factor}", world=4))
        assert (found := routed(bounded, routing).mixture) is not None and found.busiest == most
    command = [
        "--config",
        path,
        "--world",
        "4",
        "--gpu",
        "h100",
        "--cluster",
        "dgx_h100",
        "parallel.expert=4",
    ]
    assert script.run([*command, "--routing", metrics]) == 0
    assert "1.50 times the mean on the busiest rank" in capsys.readouterr().out
    assert (
        script.run([*command[:4], "parallel.expert=4", "--simulate-ranks", "0,2", "--routing", metrics]) == 0
    ), "ranks have the run's rows"
    for options, said in (
        ((), "no device is named .also --gpu"),
        (("--compare-schedules", "--gpu", "h100"), "no effect beside it"),
    ):
        with pytest.raises(ConfigError, match=said):
            script.run([*command[:4], "parallel.expert=4", "--routing", metrics, *options])
    (tmp_path / "dense.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "odd.jsonl").write_text(
        '["expert_load/"]\n{"expert_load/": 1, "expert_load/blocks.1": [1, null], "expert_load/blocks.2": '
        '[], "expert_load/blocks.3": 0}\n'
    )
    with pytest.raises(ConfigError, match="the model has no experts"):
        read_routing(metrics, None)
    for wrong, experts, said in (
        (f"{tmp_path}/odd.jsonl", 8, "no list"),
        (metrics, 16, "loads of 8 experts"),
        (f"{tmp_path}/dense.jsonl", 8, "no list"),
        ("no", 8, "cannot read"),
    ):
        with pytest.raises(ConfigError, match=f"--routing: .*{said}"):
            read_routing(wrong, experts)


def test_the_fullest_ranks_rows_decide_whether_a_plan_fits(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank of four has all rows of a step of the run's second half: memory for a
    quarter of them would end that run.
    """
    metrics, layout = (
        logged(tmp_path, [4.0, 4.0, 0, 0, 0, 0, 0, 0]),
        ["parallel.expert=4", "train.seq_len=8192"],
    )
    config = run_of(path, *layout, world=4)
    even, uneven = (fullest_rank(config, routing)[2] for routing in (None, read_routing(metrics, 8)))
    assert uneven > 1.01 * even
    limit = str((even + uneven) / 2)
    for options, fits in (((), "fits          yes"), (("--routing", metrics), "fits          NO")):
        assert script.run(["--config", path, "--world", "4", "--memory-gib", limit, *layout, *options]) == 0
        assert fits in capsys.readouterr().out
    candidate = Candidate(config, step(LARGE), 1.0)
    assert [
        len(fitting([candidate], (even + uneven) / 2, routing).fit)
        for routing in (None, read_routing(metrics, 8))
    ] == [1, 0]
    least = [fitting([candidate], 0.001, routing).least for routing in (None, read_routing(metrics, 8))]
    assert [one is not None and round(one.needs_gib, 6) for one in least] == [
        round(even, 6),
        round(uneven, 6),
    ], "what lacks"
    sharded = replace_config(config, "engine", kind="fsdp")
    assert fullest_rank(sharded, read_routing(metrics, 8))[2] > 1.01 * fullest_rank(sharded)[2]


def test_a_mixture_elsewhere_has_no_loads_of_a_block(path: str) -> None:
    """A model of one's own may have one in its first layer: no plan could be made of it."""
    config = run_of(path)
    one, other = (
        MixtureOfExperts(config, topology_of(config), torch.float32, torch.device("meta"), 0.02)
        for _ in range(2)
    )
    stage = nn.ModuleDict(
        {"front": one, "blocks": nn.ModuleDict({"3": nn.ModuleDict({"feed_forward": other})})}
    )
    assert list(mixtures_of(stage)) == [(3, other)]


def test_the_search_divides_experts(path: str) -> None:
    """A tenth of a billion weights of experts: whole on a device, with their state, they do not fit;
    and a run takes what is found.
    """
    wide = [
        "model.expert_ffn_size=65536",
        "model.ffn_size=64",
        "model.shared_experts=0",
        "train.global_batch_size=2",
    ]
    config = run_of(path, *wide)
    found = search(config, 2, read_device("h100"), read_cluster("dgx_h100"), profile("megacore"), 1.3)
    plain = [c for c in found.fit if c.config.engine.kind == "native" and not c.config.engine.shard_optimizer]
    assert plain and all(c.config.expert_sizes["ep"] * c.config.expert_sizes["etp"] == 2 for c in plain)
    assert {(c.config.parallel.expert, c.config.parallel.expert_tensor) for c in plain} == {(1, 2), (2, 1)}
    best = plain[0]
    assert rank_memory(run_of(path, *wide, *best.overrides(), world=2)) == rank_memory(best.config)


ROW = {
    "source_id": "made up",
    "framework": "Megatron-Bridge",
    "hardware": "H100-80GB",
    "interconnect": "",
    "n_gpus": "16",
    "model": "x",
    "arch": "moe",
    "mlp": "swiglu",
    "params_b": "",
    "layers": "4",
    "hidden": "2048",
    "ffn": "6144",
    "heads": "32",
    "kv_heads": "4",
    "seq": "4096",
    "vocab": "1000",
    "experts": "128",
    "topk": "8",
    "moe_ffn": "768",
    "tp": "2",
    "pp": "1",
    "vp": "",
    "cp": "",
    "ep": "8",
    "etp": "",
    "dp": "8",
    "zero": "1",
    "sp": "",
    "mbs": "1",
    "gbs": "16",
    "precision": "bf16",
    "recompute": "",
    "schedule": "",
    "step_time_s": "1",
    "mem_gib": "",
    "status": "ok",
    "note": "",
    "engine": "",
}


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ({}, Mixture(128, 8, 768, ranks=8, parts=2, copies=False, once=True)),
        ({"framework": "NeMo"}, Mixture(128, 8, 768, ranks=8, parts=2, copies=False)),
        (
            {"etp": "1", "model": "llama4-maverick-400b"},
            Mixture(128, 8, 768, 768, 0.5, ranks=8, parts=1, copies=False, once=True),
        ),
        (
            {"etp": "1", "model": "kimi-k2", "arch": "moe-mla"},
            Mixture(128, 8, 768, 768, 60 / 61, 8, copies=False, once=True),
        ),
        ({"ep": "16"}, None),  # with two parts each, 32 ranks
        ({"topk": ""}, None),
        ({"arch": "hybrid-mamba"}, None),
    ],
)
def test_rows_of_mixtures_are_read(cells: dict[str, str], found: Mixture | None, tmp_path: Path) -> None:
    """Experts are divided as attention is, unless the row says otherwise; what cannot
    be is left out with its reason.
    """
    row = ROW | cells
    (tmp_path / "rows.csv").write_text("\n".join((",".join(row), ",".join(row.values()))) + "\n")
    rows, skipped = read(tmp_path / "rows.csv")
    assert [row.setting.mixture for row in rows] == ([] if found is None else [found]) and len(skipped) == (
        found is None
    )


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "parallel.expert=4",
        "parallel.expert=2 parallel.context=2",
        "parallel.expert=8 parallel.expert_tensor=1",
    ],
)
def test_a_rank_has_as_many_communicators_as_planned(layout: str, path: str) -> None:
    """Each takes memory; groups of the same ranks share one."""
    config = run_of(path, "parallel.tensor=2", *layout.split(), world=8)
    with playing(as_on_its_device(config), 0, MetaWatch()) as mesh:
        assert communicators_of(config) == [sum(group is not None for group in mesh.communicators.values())]
