"""What becomes of every key of the config that is another at a resume than in the checkpoint: refused by
name, heard and said, or without effect and said. A key that nobody has decided on fails here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from megacore.checkpoint.weights import recorded_sections
from megacore.config import Config
from megacore.config.engine import Int8Compression
from megacore.config.model import LinearRope
from megacore.config.optim import OptimGroup
from megacore.config.schema import ProfileConfig, StatisticsConfig
from megacore.errors import CheckpointError
from megacore.optimizers.rule import ReferenceStep, Rule, State, register, unregister
from megacore.optimizers.sgd import SGDSettings
from megacore.tools.choices.resolve_auto import resolved_auto
from megacore.tools.inputs import Inputs, recorded_rule
from megacore.tools.settings.load import flatten
from megacore.tools.startup_lines import HOW, UNHEARD, changes
from tests.build import run_of
from tests.checkpoints import save
from tests.manifests import edit_text
from tests.pieces import piece
from tests.training import write_config, write_corpus

# Another function of the same weights, other samples, or an optimizer's state that means something else.
REFUSED = """
model: block source_digest hf_config num_layers hidden_size num_heads num_kv_heads head_size ffn_size
vocab_size norm activation position
    max_positions rope_theta rope_scaling norm_eps bias qkv_bias output_bias qk_norm attention_scale
    embedding_scale residual_scale logit_scale
    tie_embeddings parametrization base_width base_head_size base_layers
    q_rank kv_rank plain_size value_size
    num_experts experts_per_token expert_ffn_size shared_experts first_dense experts_every router_scores
    router_normalised router_scale
    expert_groups groups_per_token router_bias
    norm_offset norm_place branches embedding_norm rotary_share nope_every window global_every attention_cap
    logit_cap
    attention_sinks attention_gate qk_norm_heads window_rope_theta head_bias window_schedule
train: seq_len global_batch_size batch_ramp seed
optim: kind groups
data: packing train
"""
HEARD = """
model: source hf hf_revision hf_version dropout attention kernels chunked_loss z_loss
    router_balance balance_coefficient router_z_loss capacity_factor
    router_bias_rate
parallel: expert expert_tensor expert_halves
    tensor pipeline data context context_method sequence schedule chunks backend shared_memory timeout_seconds
    hang_seconds
    heartbeat_seconds
train: steps micro_batch_size precision recompute offload_activations device compile deterministic eval_every
eval_batches
optim: lr min_lr warmup_steps warmup warmup_lr decay_steps schedule lag weight_decay grad_clip spike_threshold
max_skips max_rollbacks
    muon_momentum muon_nesterov muon_steps muon_scale muon_precision muon_heads muon_adamw_lr
    beta1 beta2 eps momentum ema lion_beta1 lion_beta2 slow_beta slow_alpha slow_warmup free_beta1 free_beta2
    free_eps
    soap_beta1 soap_beta2 soap_eps soap_adamw_lr
data: document_mask valid tokenizer
checkpoint: every last keep keep_every best mirror async on_failure resume
engine: kind config shard_optimizer shard_size reshard cpu_offload bucket_mib reduce_dtype reduce_levels
compression
cpu: keep_memory onednn widen
log: dir every figures tensorboard wandb price_per_device_hour prometheus_port profile statistics
"""
# of which `auto` keeps the checkpoint's choice
SETTLED = {"model.attention": "eager", "parallel.context_method": "ring"}


def keys_of(text: str) -> set[str]:
    """Dotted keys from such a list."""
    found, section = set[str](), ""
    for word in text.split():
        section = word.removesuffix(":") if word.endswith(":") else section
        found |= set() if word.endswith(":") else {f"{section}.{word}"}
    return found


def test_every_key_is_decided() -> None:
    """A new key would be one that changes the order of samples, or the meaning of a
    state, and nobody would have asked.
    """
    decided = [*keys_of(REFUSED), *keys_of(HEARD), *UNHEARD]
    assert sorted(decided) == sorted(flatten(Config().model_dump(by_alias=True)))


@pytest.fixture
def run(tmp_path: Path) -> tuple[Config, Path]:
    """A config, and the checkpoint of step 3 in its run's folder."""
    write_corpus(tmp_path, "other", seed=1)
    config = run_of(write_config(tmp_path, write_corpus(tmp_path)), f"log.dir={tmp_path}/run")
    # as the trainer settles them
    config = changed(changed(config, "model.attention", "sdpa"), "train.compile", False)
    engine = {"updates": 3.0, "skipped": 0.0}
    sections = {
        "model": config.model.model_dump(mode="json"),
        "config": config.model_dump(mode="json", by_alias=True),
    }
    tensors = {
        f"{kind}/w": (torch.zeros(2), piece((2,), 0, 0, 1))
        for kind in ("model", "adam_m", "adam_v", "momentum")
    }
    state = {"samples": 24, "rollbacks": 0, "engine": engine, **sections}
    return config, save(tmp_path / "run/checkpoints", 3, tensors, state, keep=1)


def changed(config: Config, key: str, value: Any) -> Config:
    """The config with another value, whatever else would have to change with it."""
    section, name = key.split(".")
    own = getattr(config, section)
    return config.model_copy(
        update={section: own.model_copy(update={"async_" if name == "async" else name: value})}
    )


def another(key: str, config: Config, folder: Path) -> Any:
    """Another value of a key."""
    special = {
        "model.block": "another",
        "model.source_digest": "another",
        "model.hf_config": {"model_type": "llama"},
        "model.hf_revision": "0123abcd",
        "model.hf_version": "5.0",
        "model.rope_scaling": LinearRope(type="linear", factor=2.0),
        "optim.groups": (OptimGroup(match=("w",), kind="sgd"),),
        "data.train": str(folder / "other"),
        "data.valid": str(folder / "other"),
        "data.tokenizer": "bytes",
        "parallel.data": 2,
        "parallel.schedule": "gpipe",
        "engine.config": {},
        "engine.reshard": True,
        "train.compile": True,
        "train.batch_ramp": ((2, 4),),
        "optim.lag": (1, 1),
        "log.profile": ProfileConfig(steps=(1, 2)),
        "log.statistics": StatisticsConfig(every=2),
        "log.figures": ("train/*",),
        "engine.compression": Int8Compression(kind="int8"),
        "checkpoint.resume": str(folder / "run"),
        "log.dir": config.log.dir,
        "checkpoint.weights": "another",
        "checkpoint.mirror": str(folder / "second"),
    }
    if key in special:
        return special[key]
    value = flatten(config.model_dump(by_alias=True))[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + (value == 0)
    section, name = key.split(".")
    field = type(getattr(config, section)).model_fields["async_" if name == "async" else name]
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str) and choice != value]
    return choices[-1] if choices else 2 if value is None else "adamw" if value == "sgd" else "sgd"


@pytest.mark.parametrize("key", sorted(keys_of(REFUSED)))
def test_a_key_that_gives_a_checkpoint_another_meaning_is_refused(
    key: str, run: tuple[Config, Path], tmp_path: Path
) -> None:
    """Samples would come twice, or never; weights would be another function; a sum
    would be taken for a mean.
    """
    with pytest.raises(CheckpointError) as refused:
        Inputs(changed(run[0], key, another(key, run[0], tmp_path)), 0)
    assert key.removesuffix("_digest") in str(refused.value)


@pytest.mark.parametrize("key", sorted((keys_of(HEARD) | {*UNHEARD}) - {"model.source", "model.hf"}))
def test_no_other_key_changes_in_silence(key: str, run: tuple[Config, Path], tmp_path: Path) -> None:
    """The run goes on with the new value, and says so; or says that the value has no effect.
    (Of a source in test_source.py, of a folder in test_hf_folder.py.)
    """
    config, _ = run
    value = another(key, config, tmp_path)
    new = changed(config, key, value)
    inputs = Inputs(new, 0)
    assert inputs.opened is not None
    recorded = recorded_sections(inputs.opened)
    said, now = changes(new, recorded), json.dumps(flatten(new.model_dump(mode="json", by_alias=True))[key])
    if key in HOW:
        assert said == []
    else:
        assert [f"{key}={now} (was " in line for line in said] == [True] and (
            "WARNING: without effect" in said[0]
        ) == (key in UNHEARD)
    assert changes(config, recorded) == []


@pytest.mark.parametrize("key", SETTLED)
def test_what_a_run_settled_stays(key: str, run: tuple[Config, Path]) -> None:
    """`auto` may stand for something else on the machine that goes on."""
    section, name = key.split(".")
    open_again = changed(changed(run[0], "parallel.context", 1 + (section == "parallel")), key, "auto")
    assert resolved_auto(open_again, "cpu", "", {section: {name: SETTLED[key]}}) == {key: SETTLED[key]}


@pytest.fixture
def namesake() -> Iterator[type[Rule[Any]]]:
    """A rule whose state has the name of SGD's, and is a mean and not a sum."""

    @register
    class Mean(Rule[SGDSettings]):
        name, settings_type, kinds = "mean_of_gradients", SGDSettings, ("momentum",)

        def reference_state(self, step: ReferenceStep) -> State:
            return step.before

        def reference_direction(self, step: ReferenceStep, after: State) -> np.ndarray:
            return step.gradient

    yield Mean
    unregister(Mean)


def test_a_state_of_the_same_name_is_not_taken_from_another_rule(
    run: tuple[Config, Path], namesake: type[Rule[Any]]
) -> None:
    """SGD's sum of gradients, taken for a mean, makes a step ten times as long, and nothing else shows it."""
    config, path = run

    def saved_with(kind: str) -> None:
        edit_text(path, lambda manifest: manifest["state"]["config"]["optim"].update(kind=kind))

    for kind in ("sgd", namesake.name):
        saved_with(kind)
        assert Inputs(changed(config, "optim.kind", kind), 0).checkpoint == path
    with pytest.raises(
        CheckpointError,
        match=r"holds momentum of w as mean_of_gradients left it, and optim\.kind=sgd means something else",
    ):
        Inputs(changed(config, "optim.kind", "sgd"), 0)


@pytest.mark.parametrize(
    "optim", [None, [], {"groups": 3, "kind": 5}, {"groups": [3, {"match": 3}, {"match": [3]}]}, {}]
)
def test_a_recorded_optimizer_may_be_any_json(optim: Any) -> None:
    assert recorded_rule(optim, "w") in (None, 5)
    groups = [{"match": ["v"], "kind": "a"}, {"match": ["w*"], "kind": "b"}, {"match": ["x"]}]
    assert [recorded_rule({"kind": "c", "groups": groups}, name) for name in ("v", "w1", "x", "y")] == [
        "a",
        "b",
        "c",
        "c",
    ]
