"""What a setting's `auto` stands for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacore.config import Config
from megacore.config.implied import attention_of, check_settled, compiles, why_whole
from megacore.config.precision import ELEMENT_BYTES
from megacore.model.attention import Attention
from megacore.pipeline.partition import plan_of
from megacore.tools.choices import resolve_auto as choices
from megacore.tools.choices.compiling import with_choices, with_compile
from megacore.tools.choices.context_method import CPU, Divided, Rates
from megacore.tools.choices.devices import KNOWN, known_as
from megacore.tools.choices.measured import cost_of
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.resolve_auto import context_method_of, resolved_auto
from megacore.tools.dry_run.dry_step import dry_run
from megacore.tools.planner.activations import rank_activations
from megacore.tools.planner.devices import device_names, read_device
from megacore.tools.planner.traffic import rank_traffic
from megacore.tools.planner.workload import setting_of
from megacore.tools.settings.load import resolve
from tests.build import model_of


def config_of(model: dict[str, Any], **train: Any) -> Config:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 32}
    return resolve(
        {"model": sizes | model, "train": {"precision": "fp32", "seq_len": 64} | train}, [], "auto", 1
    ).config


@pytest.mark.parametrize(
    ("precision", "head", "seq_len", "device", "chosen"),
    [
        ("fp32", 64, 512, "cpu", "eager"),
        ("fp32", 64, 513, "cpu", "sdpa"),
        ("bf16", 64, 1024, "cpu", "eager"),
        ("bf16", 64, 1025, "cpu", "sdpa"),
        ("bf16", 32, 512, "cpu", "eager"),
        ("bf16", 32, 513, "cpu", "sdpa"),  # the scores would be most of what a block keeps
        ("fp64", 64, 64, "cpu", "sdpa"),  # or the proof would compare the formula with itself
        ("bf16", 64, 64, "cuda", "sdpa"),
    ],
)
def test_attention_goes_by_device_precision_and_sizes(
    precision: str, head: int, seq_len: int, device: str, chosen: str
) -> None:
    """The rule is in docs/performance.md; another rule is slower, or needs memory that is not counted."""
    config = config_of({"head_size": head}, precision=precision, seq_len=seq_len)
    assert attention_of(config, device) == chosen
    for explicit in ("sdpa", "eager"):
        assert (
            attention_of(
                config_of({"head_size": head, "attention": explicit}, precision=precision, seq_len=seq_len),
                device,
            )
            == explicit
        )


# heads of 16 features: up to 256
@pytest.mark.parametrize(("seq_len", "chosen"), [(64, "eager"), (272, "sdpa")])
def test_the_model_does_what_is_chosen(monkeypatch: pytest.MonkeyPatch, seq_len: int, chosen: str) -> None:
    """A model that chose by itself would need other memory than is predicted."""
    called, sdpa = [], F.scaled_dot_product_attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        called.append(True)
        return sdpa(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    model_of(config_of({}, seq_len=seq_len)).hidden(torch.zeros(1, seq_len, dtype=torch.long))
    assert ("sdpa" if called else "eager") == chosen


def test_memory_is_predicted_for_the_device_that_is_named() -> None:
    """Scores are kept on a CPU alone: a plan for GPUs would ask for memory that nobody needs,
    and one for CPUs for too little.
    """
    both = [config_of({}, device=device) for device in ("cpu", "cuda")]
    for config, explicit in zip(both, ("eager", "sdpa"), strict=True):
        same = config_of({"attention": explicit}, device=config.train.device)
        assert cost_of(config, 1).kept == cost_of(same, 1).kept
    assert cost_of(both[0], 1).kept > cost_of(both[1], 1).kept


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("excluded", [{}, {"offload_activations": True}, {"dropout": 0.1}], ids=str)
def test_compilations_auto_is_no_and_excludes_nothing(device: str, excluded: dict[str, Any]) -> None:
    """What cannot be compiled goes with `auto`, on any device."""
    dropout = {"dropout": excluded["dropout"]} if "dropout" in excluded else {}
    config = config_of(dropout, device=device, **({} if dropout else excluded))
    assert config.train.compile == "auto" and not compiles(config)


@pytest.mark.parametrize(("asked", "compiled"), [("auto", 0), (False, 0), (True, 1)])
def test_blocks_are_compiled_where_somebody_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, asked: bool | str, compiled: int
) -> None:
    """`auto` is a word, and so true: a model that took it for a boolean would compile everywhere."""
    blocks: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda block, **_: blocks.append(block))
    model_of(config_of({}, compile=asked))
    assert len(blocks) == compiled


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "v_half", "v_min", "auto"])
def test_without_a_pipeline_backwards_stay_whole(schedule: str) -> None:
    """Nobody waits for the first half; but until the second a rank would hold
    several times as much as under 1F1B.
    """
    model = {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "vocab_size": 512}
    train = {"precision": "bf16", "seq_len": 64, "device": "cuda", "global_batch_size": 8}

    def configured(schedule: str, pipeline: int) -> Config:
        parallel = {"pipeline": pipeline, "schedule": schedule, "data": 1}
        return partitioned(
            resolve({"model": model, "train": train, "parallel": parallel}, [], "auto", pipeline).config
        )

    alone, plain = configured(schedule, 1), configured("1f1b", 1)
    assert not plan_of(alone).splits and why_whole(alone) == "one rank has no reason to split"
    assert rank_activations(alone)[0].total == pytest.approx(rank_activations(plain)[0].total, rel=0.01), (
        "chunks change no more"
    )
    assert dry_run(alone, 0).peak == pytest.approx(dry_run(plain, 0).peak, rel=0.01), (
        "what runs is what is planned"
    )
    assert plan_of(configured(schedule, 2)).splits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_attention_is_rounded_a_few_times_only(dtype: torch.dtype) -> None:
    """Of rows that sum to one, weighted with values up to 1: each of scores, softmax and result is rounded
    once, so that an error is at most the scores' largest times a rounding, and two more; sums in 16 bits
    would be off by ten times as much.
    """
    q, k, v = torch.randn(3, 2, 2, 64, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    v = v.clamp(-1, 1)
    attention = (
        model_of(config_of({}, precision="bf16" if dtype == torch.bfloat16 else "fp32")).blocks["0"].attention
    )
    assert isinstance(attention, Attention) and attention.kind(q) == "eager"
    right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    scores = float((q.double() @ k.double().transpose(-2, -1)).abs().max()) * attention.scale
    rounding = torch.finfo(dtype).eps / 2
    assert float((attention.attend(q, k, v).double() - right).abs().max()) < (2 * scores + 4) * rounding


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_all_that_depends_on_the_method_of_context_ranks_asks_one_place(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A model that chose by itself would send other bytes than the plan counts, and hang
    where two ranks choose differently.
    """
    config = config_of({}, device="cpu")
    divided = config.model_copy(update={"parallel": config.parallel.model_copy(update={"context": 2})})
    asked: list[bool] = []

    def planted(own: Divided, rates: Rates, **options: bool) -> str:
        asked.append(rates == CPU)
        return method

    monkeypatch.setattr(choices, "fastest", planted)
    operations = {"gather": "all_gather", "ring": "send", "ulysses": "all_to_all"}
    assert setting_of(divided).context_method == method
    assert operations[method] in {t.operation for t in rank_traffic(divided)[0] if t.group == "cp"}
    assert asked and all(asked)
    told = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"context": 2, "context_method": "ring"})}
    )
    assert context_method_of(told) == "ring"


LONG = {"model": {"num_layers": 1, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 32}}
LONG |= {
    "train": {"precision": "bf16", "seq_len": 2048, "micro_batch_size": 1},
    "parallel": {"context": 4, "data": 1},
}


def long_text(**parallel: Any) -> Config:
    return resolve(
        LONG | {"parallel": LONG["parallel"] | parallel}, [], "auto", 4 * parallel.get("tensor", 1)
    ).config


def test_a_run_chooses_for_the_device_that_is_there() -> None:
    """Where links are slow, or attention is, another method is fastest than on an H100.

    A device that is not known counts as one.
    """
    config, names = long_text(), ("NVIDIA H100 80GB HBM3", "?", "NVIDIA L4", "Tesla V100-SXM2-32GB")
    chosen = [resolved_auto(config, "cuda", name)["parallel.context_method"] for name in names]
    assert chosen == ["gather", "gather", "ulysses", "ring"] and chosen[0] == context_method_of(config)
    assert resolved_auto(config, "cpu", "")["parallel.context_method"] == context_method_of(config, "cpu")


def test_what_a_run_has_chosen_is_kept_where_it_can_be() -> None:
    """A resumed run that chose anew would round otherwise than it began; what another
    layout cannot do must not end it.
    """
    whole, parts = config_of({}, device="cpu"), long_text(tensor=8)
    assert resolved_auto(whole, "cpu", "") == {"model.attention": "eager"}
    for kept in ("sdpa", "eager"):
        assert resolved_auto(whole, "cpu", "", {"model": {"attention": kept}}) == {"model.attention": kept}
    for lost in ("auto", None, ["sdpa"], 3):
        assert resolved_auto(whole, "cpu", "", {"model": {"attention": lost}, "parallel": 3}) == {
            "model.attention": "eager"
        }
    assert (
        resolved_auto(
            whole.model_copy(update={"model": whole.model.model_copy(update={"attention": "sdpa"})}),
            "cpu",
            "",
        )
        == {}
    )
    before = {"model": {"attention": "eager"}, "parallel": {"context_method": "ulysses"}}
    assert resolved_auto(long_text(), "cuda", "", before) == {
        "model.attention": "sdpa",
        "parallel.context_method": "ulysses",
    }
    # 3 of a tensor rank, for 4 ranks
    odd = parts.model_copy(update={"model": parts.model.model_copy(update={"num_heads": 24})})
    assert resolved_auto(odd, "cuda", "", before)["parallel.context_method"] != "ulysses"


def test_the_planner_knows_of_a_device_what_a_run_knows() -> None:
    """MFU and predictions would divide by other peaks."""
    assert set(device_names()) == set(KNOWN)
    for name, facts in KNOWN.items():
        device = read_device(name)
        own = {precision: peak for precision, peak in device.peak_flops.items() if precision in ELEMENT_BYTES}
        assert own == pytest.approx(
            dict(facts.peaks), rel=1e-9
        ) and device.memory_bytes_per_second == pytest.approx(facts.memory), name
    assert known_as("") is None


def test_every_rank_chooses_the_same_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the config alone: `auto` and `cuda` are for one device, whatever a rank sees,
    and nothing of the rank is asked.
    """
    parallel = {"context": 4, "data": 1}
    sizes = {"num_layers": 1, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 32}

    def chosen(device: str) -> str:
        train = {"precision": "bf16", "seq_len": 4096, "device": device}
        return context_method_of(
            resolve({"model": sizes, "train": train, "parallel": parallel}, [], "auto", 4).config
        )

    found = [chosen(device) for device in ("auto", "cuda", "cpu")]
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    assert [chosen(device) for device in ("auto", "cuda", "cpu")] == found and found[0] == found[1] != found[
        2
    ]


def test_a_run_is_settled_before_it_begins() -> None:
    """A trainer would take no for an open question, and record `auto`: ranks, or the run that goes
    on, might answer it otherwise.
    """
    config = config_of({})
    with pytest.raises(RuntimeError, match=r"model\.attention and train\.compile on auto"):
        check_settled(config)
    divided = long_text()
    with pytest.raises(RuntimeError, match=r"parallel\.context_method on auto"):
        check_settled(with_compile(with_choices(divided, {"model.attention": "sdpa"}), False))
