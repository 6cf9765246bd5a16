"""A config is refused before anything starts, in one line that names the key, or resolved
with the origin of every value.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import compare, pretrain, supervise
from megacore.config import Config
from megacore.config.parallel import CHUNKS
from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.optimizers.rule import RULES as OPTIMIZERS
from megacore.tools.settings.load import Resolved, flatten, load, smallest_world
from megacore.tools.settings.other_words import MEANINGS, suggested_override, words_of_rows
from megacore.tools.settings.print_config import config_table
from megacore.tools.settings.validation import warmup_warning
from megacore.tools.stop_request import StopRequest
from tests.training import write_config, write_corpus

Load = Callable[..., Resolved]


@pytest.fixture
def load_raw(tmp_path: Path) -> Load:
    """`load_raw(sections, *overrides, world=1)` through a file named run.json."""

    def from_file(raw: Any, *overrides: str, world: int = 1) -> Resolved:
        path = tmp_path / "run.json"
        path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
        return load(str(path), list(overrides), world)

    return from_file


def refusal(run: Callable[[], object]) -> tuple[str, str]:
    """Key and rest of the one line that `run` is refused with."""
    with pytest.raises(ConfigError) as error:
        run()
    line = re.fullmatch(r"config error: (\S.*?): (\S.* \(\S.*\))", str(error.value))
    assert line, f"not one line `config error: <key>: … (…)`: {error.value}"
    return line[1], line[2]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("model.num_layer", "model.num_layers"),
        ("model.hiden_size", "model.hidden_size"),
        ("train.lr", "optim.lr"),  # the right name in the wrong section
        ("checkpoint.asynch", "checkpoint.async"),
        ("checkpoint.async_", "checkpoint.async"),  # the attribute's name in Python, which is no key
        ("modle.norm", "model.norm"),
        ("pipeline.schedule", "parallel.schedule or optim.schedule"),  # not a list of all sections
        ("model.n_embd", "model.hidden_size"),  # another trainer's word
        ("optim.learning_rate", "optim.lr"),
        ("training.local_batch_size", "train.micro_batch_size"),
        ("train.per_device_train_batch_size", "train.micro_batch_size"),
        ("optim.warmup_iters", "optim.warmup_steps"),
        ("parallel.tp", "parallel.tensor"),
    ],
)
def test_unknown_key_names_the_nearest(load_raw: Load, key: str, nearest: str) -> None:
    """A misspelt key would be ignored, and the run would train with a default."""
    section, name = key.split(".")
    for refused in (
        refusal(lambda: load_raw({section: {name: 1}})),
        refusal(lambda: load_raw({}, f"{key}=1")),
    ):
        assert refused[0] == key
        assert refused[1] == f"unknown key (did you mean {nearest}?)"


@pytest.mark.parametrize("key", ["model.foo", "foo.bar", "optim.rate", "x.y"])
def test_what_is_like_no_key_is_not_guessed(load_raw: Load, key: str) -> None:
    """`optim.rate` is like `optim.beta1` in no way that helps."""
    refused = refusal(lambda: load_raw({}, f"{key}=1"))
    assert refused == (key, "unknown key (launch/pretrain.py --print-config shows all keys)")


@pytest.mark.parametrize(
    ("option", "meaning"),
    [
        ("--micro-batch-size", "train.micro_batch_size=VALUE"),
        ("--tensor-model-parallel-size", "parallel.tensor=VALUE"),
        ("--learning_rate", "optim.lr=VALUE"),
        ("--n_layer=4", "model.num_layers=VALUE"),
        ("--per_device_train_batch_size", "train.micro_batch_size=VALUE"),
        ("--confg", "--config"),
        ("--deepspeed-config", "--deepspeed"),
        ("--print_config", "--print-config"),
    ],
)
def test_an_unknown_option_names_what_it_may_mean(option: str, meaning: str) -> None:
    with pytest.raises(ConfigError) as error:
        pretrain.parse(["--config", "c.json", option])
    assert str(error.value).endswith(f"unrecognized arguments: {option} (did you mean {meaning}?)")


def test_a_script_without_overrides_names_no_setting() -> None:
    """`--lr` of a script that takes no settings means none."""
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --lr \(see -h; "):
        compare.parse(["runs/a", "runs/b", "--lr"])


def test_an_option_that_is_like_none_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --zzz \(see -h; a setting"):
        pretrain.parse(["--config", "c.json", "--zzz"])


def test_a_bare_word_of_another_trainer_names_the_override(load_raw: Load) -> None:
    """nanoGPT's `n_layer=4`, typed without a section."""
    assert (
        refusal(lambda: load_raw({}, "n_layer=4"))[1] == "is no override (did you mean model.num_layers=4?)"
    )
    assert "such as train.steps=20" in refusal(lambda: load_raw({}, "zzz=4"))[1]


@pytest.mark.parametrize(
    ("override", "meaning"),
    [
        ("gradient_accumulation_steps=4", "train.global_batch_size: sequences of a step"),
        ("attention_bias=true", "model.qkv_bias and model.output_bias"),
        ("mlp_bias=true", "model.bias with model.qkv_bias=false model.output_bias=false"),
        ("always_save_checkpoint=true", "checkpoint.every: steps"),
        ("init_from=resume", "checkpoint.resume: auto, never or"),
        ("num_train_epochs=3", "train.steps: a number of steps"),
        ("bf16=true", "train.precision: fp32, bf16"),
        ("dtype=bfloat16", "train.precision: fp32, bf16"),
        ("warmup_ratio=0.1", "optim.warmup_steps: a number"),
        ("gradient_checkpointing=true", "train.recompute: none"),
        ("hidden_act=silu", "model.activation: such as swiglu"),
        ("optim=adamw_torch", "optim.kind: such as adamw"),
        ("report_to=wandb", "log.wandb: off, offline or online"),
        ("disable_bias_linear=true", "model.bias: the opposite"),
        ("num_experts=8", "model.num_experts=8"),
        ("compile=True", "train.compile=true"),
        ("save_total_limit=2", "checkpoint.keep=2"),
        ("beta1=0.8", "optim.beta1=0.8"),
        ("tp=2", "parallel.tensor=2"),
    ],
)
def test_a_value_is_carried_over_only_where_it_means_the_same(
    load_raw: Load, override: str, meaning: str
) -> None:
    """A suggestion that is typed as printed would be rejected, or would train something else."""
    wrong = refusal(lambda: load_raw({}, override))[1]
    assert wrong.startswith(f"is no override (did you mean {meaning}")


def test_every_suggested_override_fits_its_key(load_raw: Load) -> None:
    """A key of another type than the word would be rejected when the suggestion is typed."""
    suggestions = {word: suggested_override(word, "VALUE") or "" for word in words_of_rows()}
    carried = {text.removesuffix("=VALUE") for text in suggestions.values() if text.endswith("=VALUE")}
    assert len(carried) > 40 and carried <= flatten(Config().model_dump(by_alias=True)).keys()
    # Every entry explains a word of the table, and names one of its keys first.
    for word, meaning in MEANINGS.items():
        assert suggestions[word] == meaning
        keys = {key for key, _ in words_of_rows()[word]}
        assert re.findall(r"[a-z]+\.\w+", meaning)[0] in keys, word


def test_a_key_for_both_betas(load_raw: Load) -> None:
    """`optim.betas` is more than the one beta whose name is most like it."""
    assert "(did you mean optim.beta1 and optim.beta2?)" in refusal(lambda: load_raw({}, "optim.betas=1"))[1]


LLAMA3 = (
    '{"type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,'
    '"original_max_position_embeddings":64}'
)
ROPE_SCALING = "{type: linear or llama3 or longrope or ntk or yarn, …} or null"
LINEAR = "{type: linear, factor} or null"
YARN = (
    "{type: yarn, factor, original_max_position_embeddings, beta_fast, beta_slow, attention_factor, "
    "truncate} or null"
)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("train.steps", '"20"', "a whole number above 0"),
        ("train.steps", "2.5", "a whole number above 0"),
        ("train.steps", "true", "a whole number above 0"),
        ("train.steps", "0", "a whole number above 0"),
        ("train.steps", "1e400", "a whole number above 0"),
        ("train.steps", "twenty", "a whole number above 0"),
        ("train.compile", "1", "true or false or auto"),
        ("train.compile", '"always"', "true or false or auto"),
        ("optim.lr", '"3e-4"', "a number at least 0 and at most 1e+06"),
        ("optim.lr", "NaN", "a number at least 0 and at most 1e+06"),
        ("optim.lr", "null", "a number at least 0 and at most 1e+06"),
        ("optim.beta2", "1.0", "a number at least 0 and below 1"),
        *(
            ("train.batch_ramp", value, "a list of [last step, size]")
            for value in ("[[0,4]]", "[4]", "64", "[[10,4,2]]", '[[10,"4"]]')
        ),
        *(("optim.ema", value, "a number above 0 and below 1 or null") for value in ("1.0", "0", "true")),
        ("optim.lion_beta1", "1", "a number at least 0 and below 1"),
        ("optim.slow_beta", "0", "a number above 0 and below 1"),
        ("optim.slow_warmup", "2.5", "a whole number at least 0 or null"),
        ("optim.free_eps", "0", "a number at least 1e-30 and at most 1"),
        ("optim.kind", "lionn", " or ".join(OPTIMIZERS)),
        ("model.norm", "batchnorm", "layernorm or rmsnorm"),
        ("model.num_kv_heads", "0", "a whole number above 0 and at most 1,048,576 or null"),
        ("model.qkv_bias", "1", "true or false or null"),
        ("parallel.hang_seconds", "0", "a number at least 0.001 and at most 1e+08 or null"),
        *(
            ("model.rope_scaling", value, ROPE_SCALING)
            for value in ("2", "[]", '{"factor": 2}', '{"type": "cubic", "factor": 2}')
        ),
        ("model.rope_scaling", '{"type": "yarn", "factor": 2}', YARN),
        ("model.rope_scaling", '{"type": "linear"}', LINEAR),
        ("model.rope_scaling", '{"type": "linear", "factor": "2"}', LINEAR),
        ("model.rope_scaling", '{"type": "linear", "factor": 2, "low_freq_factor": 1}', LINEAR),
        ("parallel.data", "every", "a whole number above 0 and at most 1,048,576 or auto"),
        ("data.train", '[["a", 1]]', "a string or a list of [weight, prefix] or null"),
        ("data.valid", "[]", "a string or a list of [weight, prefix] or null"),
        ("checkpoint.async", '"yes"', "true or false"),
        (
            "parallel.schedule",
            '"zb_h9"',
            " or ".join([*CHUNKS, "auto", "file:PLAN.json"]),
        ),  # and nothing that would be refused next
    ],
)
def test_wrong_type_or_bound(load_raw: Load, key: str, value: str, accepted: str) -> None:
    """A coerced value ("20" to 20, 2.5 to 2, true to 1) hides a mistake until the run's results are wrong."""
    refused, rest = refusal(lambda: load_raw({}, f"{key}={value}"))
    assert refused == key and rest.endswith(f"({accepted})")


# Every rule of validation.py and model.py: overrides that break it and nothing before it, ranks, the key it
# names, and what would be right.
RULES: list[tuple[str, int, str, str]] = [
    ("parallel.chunks=2", 1, "parallel.chunks", "1, or null"),
    ("parallel.schedule=interleaved parallel.chunks=1", 1, "parallel.chunks", "2 or more, or null"),
    (
        "model.num_layers=4 parallel.schedule=interleaved parallel.pipeline=3",
        3,
        "parallel.pipeline",
        "times parallel.chunks at most model.num_layers 4",
    ),
    (
        "engine.kind=deepspeed",
        1,
        "engine.config",
        "an object or a file's path, such as configs/deepspeed/zero2.json",
    ),
    (
        "engine.kind=deepspeed parallel.pipeline=2 parallel.schedule=zb_v",
        2,
        "parallel.schedule",
        "1f1b, or engine.kind=native",
    ),
    (
        "engine.kind=fsdp parallel.pipeline=2 parallel.schedule=zb_v",
        4,
        "parallel.schedule",
        "model.tie_embeddings=false",
    ),
    ("optim.max_rollbacks=1", 1, "optim.max_rollbacks", "0, or checkpoint.every=1000"),
    (
        "train.compile=true train.offload_activations=true",
        1,
        "train.compile",
        "false, or train.offload_activations=false",
    ),
    (
        "engine.kind=fsdp parallel.context=2 parallel.schedule=zb_v",
        2,
        "parallel.schedule",
        "model.tie_embeddings=false",
    ),
    ("engine.kind=fsdp engine.config=ds.json", 2, "engine.config", "leave it out with engine.kind=fsdp"),
    ("engine.kind=fsdp engine.shard_optimizer=true", 2, "engine.shard_optimizer", "false"),
    ("engine.kind=fsdp train.compile=true", 2, "train.compile", "false, or engine.kind=native"),
    ("engine.kind=fsdp engine.shard_size=1", 2, "engine.shard_size", "at least 2, or engine.kind=native"),
    (
        "engine.kind=fsdp engine.shard_size=3 train.global_batch_size=12",
        4,
        "parallel.data",
        "3 or 6 would be",
    ),
    ("engine.kind=fsdp engine.cpu_offload=true", 1, "engine.cpu_offload", "false, or at least 2 data ranks"),
    ("engine.shard_size=2", 2, "engine.shard_size", "engine.kind=fsdp, or leave it out"),
    ("engine.reshard=true", 2, "engine.reshard", "engine.kind=fsdp, or leave it out"),
    ("engine.kind=fsdp engine.reduce_dtype=bf16", 2, "engine.reduce_dtype", "fp32; or engine.kind=native"),
    ("engine.kind=fsdp engine.reduce_levels=2", 2, "engine.reduce_levels", "1, and engine.shard_size"),
    (
        "engine.kind=deepspeed engine.reduce_dtype=bf16",
        2,
        "engine.reduce_dtype",
        "fp32, and communication_data_type in engine.config",
    ),
    (
        "train.precision=fp64 engine.reduce_dtype=bf16",
        2,
        "engine.reduce_dtype",
        "fp32, or train.precision=bf16",
    ),
    (
        'engine.kind=fsdp engine.compression={"kind":"int8"}',
        2,
        "engine.compression",
        "null, or engine.kind=native",
    ),
    (
        'engine.kind=deepspeed engine.compression={"kind":"int8"}',
        2,
        "engine.compression",
        "null, or engine.kind=native",
    ),
    ('train.precision=fp64 engine.compression={"kind":"low_rank"}', 2, "engine.compression", '"rank": null'),
    (
        'engine.reduce_dtype=bf16 engine.compression={"kind":"int8"}',
        2,
        "engine.compression",
        "engine.reduce_dtype=fp32",
    ),
    (
        'train.precision=fp64 engine.compression={"kind":"int8"}',
        2,
        "engine.compression",
        '"rounding": "none"',
    ),
    ("engine.reduce_levels=3", 2, "engine.reduce_levels", "1 or 2"),
    ("engine.cpu_offload=true", 2, "engine.cpu_offload", "engine.kind=fsdp, or leave it out"),
    ("engine.config=ds.json", 1, "engine.config", "leave it out"),
    ("checkpoint.every=10 checkpoint.keep_every=25", 1, "checkpoint.keep_every", "20 or 30"),
    (
        "checkpoint.best=true checkpoint.every=10 train.eval_every=5",
        1,
        "checkpoint.best",
        "data.valid, train.eval_every and",
    ),
    (
        "checkpoint.best=true checkpoint.every=10 train.eval_every=4 data.valid=x",
        1,
        "checkpoint.every",
        "8 or 12",
    ),
    ("log.prometheus_port=90000", 1, "log.prometheus_port", "from 1 to 65535"),
    ("model.hidden_size=770", 1, "model.hidden_size", "768 or 780 would be"),
    ("model.num_kv_heads=5", 1, "model.num_heads", "10 or 15 would be"),
    ("model.num_kv_heads=24", 1, "model.num_heads", "24 would be"),
    ("parallel.tensor=5", 5, "model.num_heads", "10 or 15 would be"),
    ("model.num_kv_heads=3 parallel.tensor=2", 2, "model.num_kv_heads", "2 or 4 would be"),
    ("model.ffn_size=7 parallel.tensor=2", 2, "model.ffn_size", "6 or 8 would be"),
    ("model.hidden_size=36 model.position=rope", 1, "model.position", "an even head size, or learned"),
    ("model.head_size=7 model.position=rope", 1, "model.position", "an even head size, or learned"),
    (f"model.rope_scaling={LLAMA3}", 1, "model.rope_scaling", "null, or model.position=rope"),
    (
        f"model.position=rope model.rope_scaling={LLAMA3.replace('4,', '1,')}",
        1,
        "model.rope_scaling",
        "a larger high_freq_factor",
    ),
    ("model.max_positions=1023", 1, "model.max_positions", "at least 1024"),
    (
        "model.vocab_size=9 parallel.tensor=4",
        4,
        "model.vocab_size",
        "a larger vocabulary or a smaller parallel.tensor",
    ),
    ("model.num_layers=3 parallel.pipeline=4", 4, "parallel.pipeline", "at most model.num_layers 3"),
    ("parallel.sequence=true parallel.tensor=2 train.seq_len=9", 2, "train.seq_len", "8 or 10 would be"),
    ("model.attention=fused train.precision=fp64", 1, "model.attention", "sdpa or eager"),
    ("parallel.tensor=2", 3, "parallel", "a multiple of tensor × pipeline = 2 ranks"),
    ("parallel.context=2", 3, "parallel", "a multiple of tensor × pipeline × context = 2 ranks"),
    ("parallel.context=2 train.seq_len=18", 2, "train.seq_len", "16 or 20 would be"),
    (
        "parallel.context=5 train.seq_len=20 parallel.context_method=ulysses",
        5,
        "parallel.context_method",
        "gather or ring, or another parallel.context",
    ),
    (
        "parallel.context=2 model.position=learned model.head_size=5 parallel.context_method=ulysses",
        2,
        "parallel.context_method",
        "gather or ring, or another parallel.context",
    ),
    ("parallel.context=2 engine.kind=deepspeed", 2, "parallel.context", "1, or engine.kind=native or fsdp"),
    ("parallel.tensor=4", 2, "parallel", "a multiple of tensor × pipeline = 4 ranks"),
    ("parallel.tensor=2 parallel.data=3", 4, "parallel.data", "2 or auto"),
    ("train.micro_batch_size=3", 1, "train.global_batch_size", "a multiple of 3: 6 or 9"),
    ("train.micro_batch_size=8", 2, "train.global_batch_size", "a multiple of 16: 16"),
    (
        "train.batch_ramp=[[10,2],[10,4]]",
        1,
        "train.batch_ramp",
        "[last step, size] in the order of the steps",
    ),
    (
        "train.batch_ramp=[[10,4],[20,2]]",
        1,
        "train.batch_ramp",
        "sizes that grow, below train.global_batch_size",
    ),
    ("train.batch_ramp=[[10,8]]", 1, "train.batch_ramp", "sizes that grow, below train.global_batch_size"),
    ("train.batch_ramp=[[10,3]]", 2, "train.batch_ramp", "a multiple of 2: 2 or 4"),
    (
        "train.batch_ramp=[[10,4]] engine.kind=deepspeed",
        1,
        "train.batch_ramp",
        "[], or engine.kind=native or fsdp",
    ),
    (
        "train.batch_ramp=[[10,4]] parallel.schedule=auto",
        1,
        "train.batch_ramp",
        "[], or a schedule with a name",
    ),
    ("optim.ema=0.9 engine.kind=deepspeed", 1, "optim.ema", "null, or engine.kind=native or fsdp"),
    ("optim.ema=0.9 optim.kind=schedule_free", 1, "optim.ema", "null, or another optim.kind"),
    (
        'optim.ema=0.9 optim.groups=[{"match":["*"],"kind":"schedule_free"}]',
        1,
        "optim.ema",
        "null, or another optim.kind",
    ),
    ("optim.kind=ademamix engine.kind=deepspeed", 1, "optim.kind", "adamw, or another engine.kind"),
    (
        'optim.groups=[{"match":["*"],"kind":"lion","beta1":0.5}]',
        1,
        "optim.groups",
        "lion_beta1, lion_beta2 or another kind",
    ),
    ("model.position=rope model.nope_every=1", 1, "model.nope_every", "2 or more, or null"),
    ("optim.muon_steps=3", 1, "optim.muon_steps", "5, or optim.kind=muon"),
    ("optim.kind=sgd optim.beta1=0.5", 1, "optim.beta1", "0.9, or optim.kind=adamw"),
    ("optim.kind=lion optim.muon_adamw_lr=0.1", 1, "optim.muon_adamw_lr", "null, or optim.kind=muon"),
    ("optim.min_lr=0.1", 1, "optim.min_lr", "at most 0.0003"),
    ("optim.warmup_steps=30 optim.decay_steps=20", 1, "optim.warmup_steps", "at most 20"),
    (
        "optim.schedule=wsd optim.warmup_steps=900 optim.decay_steps=200",
        1,
        "optim.decay_steps",
        "at most 100",
    ),
]


@pytest.mark.parametrize(("overrides", "world", "key", "right"), RULES)
def test_every_rule_refuses_in_one_line(
    load_raw: Load, overrides: str, world: int, key: str, right: str
) -> None:
    """A rule that lets this through leaves it to a rank that fails, or hangs, when the
    others already wait.
    """
    refused, rest = refusal(lambda: load_raw({}, *overrides.split(), world=world))
    assert refused == key
    assert right in rest.rpartition("(")[2] or rest.endswith(f"({right})")


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        # 3 + 3 + 3 + 1: uneven, but nobody is left without a row
        ("model.vocab_size=10 parallel.tensor=4", 4),
        # 18 tokens divide
        ("parallel.sequence=true parallel.tensor=2 train.seq_len=9 train.micro_batch_size=2", 2),
        ("train.micro_batch_size=4", 2),
        ("optim.min_lr=3e-4", 1),
        ("model.num_layers=4 parallel.pipeline=4", 4),
        ("model.hidden_size=770 model.head_size=64", 1),
        ("model.max_positions=1024", 1),
        (f"model.position=rope model.rope_scaling={LLAMA3}", 1),
        ("optim.schedule=wsd optim.warmup_steps=900 optim.decay_steps=100", 1),
    ],
)
def test_rules_do_not_refuse_their_edge(load_raw: Load, overrides: str, world: int) -> None:
    """A rule that is off by one would refuse a good run."""
    load_raw({}, *overrides.split(), world=world)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("steps", [1, 20, 30, 31])
def test_a_run_cut_short_keeps_its_warmup(load_raw: Load, schedule: str, steps: int) -> None:
    """`train.steps=20` on the command line, to try a config with 30 steps of warmup, would be refused."""
    config = load_raw({"optim": {"warmup_steps": 30, "schedule": schedule}}, f"train.steps={steps}").config
    assert config.optim.decay_steps is not None and config.optim.decay_steps >= 1


def test_override_beats_file_beats_default_and_origins_say_so(load_raw: Load) -> None:
    """`--print-config` would name the wrong source for a value, or the command line would not win."""
    file = {"train": {"steps": 7, "seed": 3}, "model": {"num_kv_heads": None, "ffn_size": 96}}
    resolved = load_raw(
        file, "train.steps=9", "train.steps=20", "model.norm=rmsnorm", "data.train=some/prefix"
    )
    config, origins = resolved.config, resolved.origins
    expected: dict[str, tuple[Any, Any, str]] = {
        "train.steps": (config.train.steps, 20, "override"),  # the last of two counts
        "train.seed": (config.train.seed, 3, "file"),
        "train.seq_len": (config.train.seq_len, 1024, "default"),
        "model.norm": (config.model.norm, "rmsnorm", "override"),
        "model.ffn_size": (config.model.ffn_size, 96, "file"),
        "model.num_kv_heads": (config.model.num_kv_heads, 12, "derived"),  # null in the file asks for it
        "data.train": (config.data.train, "some/prefix", "override"),  # no JSON, so a string
        "log.dir": (config.log.dir, "runs/run", "derived"),
    }
    for key, (value, right, origin) in expected.items():
        assert (value, origins[key]) == (right, origin), key
    lines = [line for line in config_table(resolved).splitlines() if line and not line.startswith("#")]
    rows = {line.split()[0]: line.split() for line in lines}
    assert rows.keys() == origins.keys() == flatten(Config().model_dump(by_alias=True)).keys()
    assert rows["train.steps"][1:] == ["20", "override"]
    assert rows["checkpoint.async"][1:] == ["false", "default"]


@pytest.mark.parametrize(
    ("overrides", "world", "key", "value"),
    [
        ("model.num_heads=6", 1, "model.num_kv_heads", 6),
        ("", 1, "model.ffn_size", 4 * 768),
        ("model.num_heads=6", 1, "model.head_size", 128),
        ("model.head_size=16", 1, "model.attention_scale", 0.25),
        ("model.hidden_size=192", 1, "model.attention_scale", 0.25),
        ("model.bias=false", 1, "model.qkv_bias", False),
        ("train.seq_len=99", 1, "model.max_positions", 99),
        ("model.activation=swiglu", 1, "model.ffn_size", 2048),
        # 8/3 × 120, already a multiple of 64
        ("model.activation=swiglu model.hidden_size=120", 1, "model.ffn_size", 320),
        ("model.activation=swiglu model.hidden_size=132", 1, "model.ffn_size", 384),  # 352, rounded up
        ("parallel.tensor=2 parallel.pipeline=2", 8, "parallel.data", 2),
        ("", 1, "optim.decay_steps", 1000),
        ("optim.schedule=wsd", 1, "optim.decay_steps", 100),
        ("optim.schedule=wsd optim.warmup_steps=950", 1, "optim.decay_steps", 50),  # no room for a tenth
        ("train.steps=20 optim.warmup_steps=30", 1, "optim.decay_steps", 30),
        ("", 1, "engine.bucket_mib", 25),
        ("", 1, "parallel.chunks", 1),
        ("parallel.schedule=interleaved", 1, "parallel.chunks", 2),
        (
            "train.global_batch_size=512 train.micro_batch_size=1 parallel.tensor=2",
            1024,
            "engine.bucket_mib",
            4 * 512,
        ),
    ],
)
def test_derived_values(load_raw: Load, overrides: str, world: int, key: str, value: float) -> None:
    """Each is documented at its key in the schema; another value would be another model
    or another schedule.
    """
    resolved = load_raw({}, *overrides.split(), world=world)
    assert flatten(resolved.config.model_dump(by_alias=True))[key] == value
    assert resolved.origins[key] == "derived"


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("data", [1, 2, 5])
def test_batch_equation(load_raw: Load, microbatches: int, data: int) -> None:
    """global_batch_size = micro_batch_size × microbatches × data, or ranks would run
    different numbers of microbatches.
    """
    batch = 2 * microbatches * data
    config = load_raw({"train": {"micro_batch_size": 2, "global_batch_size": batch}}, world=data).config
    assert config.num_microbatches == microbatches


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"checkpoint": {"every": 5}, "log": {"dir": "elsewhere"}},
        {"data": {"train": [[0.5, "a"], [2, "b"]], "valid": "c"}, "optim": {"lr": 1, "eps": 1e-12}},
        {"model": {"num_kv_heads": 4, "activation": "swiglu"}, "parallel": {"timeout_seconds": 0.5}},
        {
            "model": {
                "position": "rope",
                "rope_scaling": json.loads(LLAMA3),
                "head_size": 10,
                "logit_scale": 0.3,
            }
        },
    ],
)
def test_resolved_config_round_trips(load_raw: Load, raw: dict[str, Any]) -> None:
    """A run's config.json could not start the same run again."""
    config = load_raw(raw).config
    assert Config.model_validate_json(config.model_dump_json(by_alias=True)) == config
    again = load_raw(config.model_dump_json(by_alias=True))
    assert again.config == config and "derived" not in again.origins.values()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1"),
        ('{"train": {"steps": 20,\n}}', "line 2"),
        ("train: {steps: 20}", "line 1"),
        ("[1, 2]", "does not hold sections"),
        ('{"train": 20}', "does not hold sections"),
        # Python's JSON reads half a character, nothing after it does
        ('{"log": {"dir": "\\ud800"}}', "invalid json"),
    ],
)
def test_a_file_that_is_no_config(load_raw: Load, text: str, says: str) -> None:
    key, rest = refusal(lambda: load_raw(text))
    assert key == "--config" and says in rest


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, a folder, or not text: one line each, no traceback."""
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, says in (
        (tmp_path / "missing.json", "No such file"),
        (tmp_path, "directory"),
        (binary, "not UTF-8"),
    ):
        key, rest = refusal(lambda path=path: load(str(path)))  # type: ignore[misc]
        assert key == "--config" and says in rest


@pytest.mark.parametrize(
    ("typed", "override"),
    [
        (["--train.steps=20"], "train.steps=20"),
        (["--train.steps", "20"], "train.steps=20"),
        (["--log.figures", "loss=1"], "log.figures=loss=1"),
        # only what stands first is an option
        (['--data.train=[[1.0,"--a.b=c"]]'], 'data.train=[[1.0,"--a.b=c"]]'),
        (["train.steps=20"], "train.steps=20"),
    ],
)
def test_a_setting_may_be_typed_as_an_option(typed: list[str], override: str) -> None:
    """So people type it for other trainers; under a supervisor it stands in the launcher's command."""
    for words in (["--config", "c.json", *typed], [*typed, "--config", "c.json"]):
        assert pretrain.parse(words).overrides == [override]
        command = supervise.parse(
            ["--restarts", "1", "torchrun", "--rdzv-endpoint=a.b=c", "launch/pretrain.py", *words]
        ).command
        assert supervise.config_in(command) == ("c.json", [override]) and "--rdzv-endpoint=a.b=c" in command
    with pytest.raises(ConfigError, match="--trial"):
        pretrain.parse(["--config", "c.json", "--trial=20"])
    with pytest.raises(ConfigError, match=r"train\.steps: has no value"):
        pretrain.parse(["--config", "c.json", "--train.steps"])


@pytest.mark.parametrize(
    "override", ["steps=20", "train.steps", "train.steps.x=1", "--train.steps=20", "=3", "train=20"]
)
def test_what_is_no_override(load_raw: Load, override: str) -> None:
    key, rest = refusal(lambda: load_raw({}, override))
    assert (key, rest) == (override, "is no override (section.key=value, such as train.steps=20)")


def test_shipped_configs_load() -> None:
    """Each file in configs/ resolves on some number of ranks that its own mesh divides."""
    files = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
    assert files
    for file in files:
        load(str(file), [], smallest_world(str(file), []))


@pytest.mark.parametrize(
    ("warmup", "steps", "warned"), [(0, 1, False), (1, 2, False), (2, 2, True), (25, 8, True)]
)
def test_when_a_warmup_is_warned_of(load_raw: Load, warmup: int, steps: int, warned: bool) -> None:
    config = load_raw({"optim": {"warmup_steps": warmup}, "train": {"steps": steps}}).config
    warning = warmup_warning(config)
    assert (warning is not None) is warned
    if warning is not None:
        assert f"optim.warmup_steps is {warmup} and train.steps {steps}" in warning and "\n" not in warning


def test_training_prints_the_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On rank 0, before the ranks meet, however the config was made."""
    path = write_config(tmp_path, write_corpus(tmp_path), log={"dir": str(tmp_path / "run")})
    config = load(path, ["optim.warmup_steps=8", "train.steps=8", "parallel.pipeline=2"], 2).config

    def meet(*_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr("megacore.distributed.init.joined", meet)
    for rank, times in ((0, 1), (1, 0)):
        with pytest.raises(ConnectionError):
            pretrain.train(config, RankInfo(rank, 2, rank, 2), StopRequest(None))
        assert capsys.readouterr().out.count("WARNING: optim.warmup_steps is 8") == times


@pytest.mark.parametrize(
    ("sizes", "tensor", "key", "possible"),
    [
        ({"num_heads": 16, "num_kv_heads": 4, "ffn_size": 64}, 8, "model.num_kv_heads", "1, 2, 4"),
        ({"num_heads": 14, "num_kv_heads": 2, "ffn_size": 64}, 4, "model.num_heads", "1, 2"),
        ({"num_heads": 8, "num_kv_heads": 8, "ffn_size": 44}, 8, "model.ffn_size", "1, 2, 4"),
        ({"num_heads": 9, "num_kv_heads": 3, "ffn_size": 1536}, 2, "model.num_heads", "1, 3"),
        ({"num_heads": 8, "num_kv_heads": 1, "ffn_size": 64}, 2, "model.num_kv_heads", "1"),
    ],
)
def test_tensor_ranks_of_weights_that_exist(
    load_raw: Load, sizes: dict[str, int], tensor: int, key: str, possible: str
) -> None:
    """An imported model keeps its heads, so the error says what tensor ranks are possible instead."""
    model = sizes | {"hidden_size": 16, "head_size": 16, "position": "rope"}
    raw = {"model": model, "parallel": {"tensor": tensor}, "checkpoint": {"weights": "runs/imported"}}
    assert refusal(lambda: load_raw(raw, world=tensor)) == (
        key,
        f"{sizes[key.removeprefix('model.')]} is not a multiple of parallel.tensor {tensor} "
        f"(parallel.tensor {possible}: the sizes are those of checkpoint.weights)",
    )
    for ranks in map(int, possible.split(", ")):
        load_raw(raw | {"parallel": {"tensor": ranks}}, world=ranks)
