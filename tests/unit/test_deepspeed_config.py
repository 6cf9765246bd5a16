"""A ds_config is completed from the run's config, or refused in one line that names the key, the
reason and what works instead.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launch import pretrain
from launch.supervise import config_in
from megacore.config import Config
from megacore.config.optim import OptimConfig
from megacore.engine.learning_rate import learning_rate
from megacore.errors import ConfigError
from megacore.tools.settings import from_ds_config
from megacore.tools.settings.ds_config import print_note, walk
from megacore.tools.settings.ds_keys import KNOWN, MONITORS, OFF, REFUSED, REMOVED, SWITCHES
from megacore.tools.settings.ds_settings import ds_settings
from megacore.tools.settings.load import flatten, load, parse_override
from megacore.tools.verify.replay import rate
from tests.build import run_of
from tests.pool import PATIENCE
from tests.training import write_config

ROOT = Path(__file__).resolve().parents[2]
Configure = Callable[..., Config]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """`configure(ds_config, overrides, world)`: the tests' small config with the deepspeed engine."""
    path = write_config(tmp_path, "unused")

    def from_settings(ds_config: Any, overrides: str = "", world: int = 4) -> Config:
        source = ds_config if isinstance(ds_config, str) else json.dumps(ds_config)
        return run_of(
            path, "engine.kind=deepspeed", f"engine.config={source}", *overrides.split(), world=world
        )

    return from_settings


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/deepspeed").glob("*.json")), ids=lambda path: path.stem
)
def test_shipped_files_are_completed(configure: Configure, path: Path) -> None:
    settings = ds_settings(
        configure(str(path), "parallel.tensor=2 optim.grad_clip=0.25 train.precision=bf16")
    )
    assert "auto" not in json.dumps(settings)
    assert (
        settings["train_batch_size"],
        settings["train_micro_batch_size_per_gpu"],
        settings["gradient_accumulation_steps"],
    ) == (8, 2, 2)
    assert (
        settings["gradient_clipping"] == 0.25
        and settings["bf16"]["enabled"] is True
        and settings["fp16"]["enabled"] is False
    )
    assert settings["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert settings["communication_data_type"] == settings["data_types"]["grad_accum_dtype"] == "fp32"


def test_the_rest_passes_through_unchanged(configure: Configure) -> None:
    zero = {
        "stage": 2,
        "overlap_comm": True,
        "allgather_bucket_size": 1234,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    given = {
        "zero_optimization": zero,
        "communication_data_type": "bf16",
        "tensorboard": {"enabled": True, "job_name": "auto_pilot"},
    }
    settings = ds_settings(configure(given))
    assert {key: settings[key] for key in given} == given
    assert given["zero_optimization"] is zero and "reduce_bucket_size" not in zero, (
        "the run's own config must stay as it was"
    )


def test_swap_files_stand_in_the_runs_folder_unless_told(configure: Configure) -> None:
    zero = {
        "stage": 3,
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
    }
    zero = ds_settings(configure({"zero_optimization": zero}, "log.dir=runs/mine"))["zero_optimization"]
    assert (zero["offload_param"]["nvme_path"], zero["offload_optimizer"]["nvme_path"]) == (
        "runs/mine/swap",
        "/disk",
    )


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0.1}}


def warmup(**params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": "WarmupLR", "params": params}}


CHECKPOINTING = "activation_checkpointing"
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}
# What is refused: the ds_config, overrides, the key that is named, and what it says is wrong or right.
REFUSALS: list[tuple[Any, str, str, str]] = [
    (zero(3), "parallel.pipeline=2", "zero_optimization.stage", "deadlocks with a pipeline"),
    (zero(0), "parallel.pipeline=2", "zero_optimization.stage", "loses gradients with a pipeline"),
    ({}, "parallel.pipeline=2", "zero_optimization.stage", "(1 or 2)"),
    (zero(0), "train.precision=bf16", "zero_optimization.stage", "1, 2 or 3; or train.precision=fp32"),
    (zero(4), "", "zero_optimization.stage", "0, 1, 2 or 3"),
    (zero(1), "train.precision=fp64", "train.precision", "fp32, or engine.kind=native"),
    (zero(1), "train.precision=fp16", "train.precision", "no fp16 on CPUs"),
    (zero(2), "train.compile=true", "train.compile", "false, or engine.kind=native"),
    (zero(2), "engine.shard_optimizer=true", "engine.shard_optimizer", "ZeRO stage 1"),
    (
        zero(0, offload_optimizer={"device": "cpu"}),
        "",
        "zero_optimization.offload_optimizer.device",
        "stage 1 or above",
    ),
    (
        zero(2, offload_optimizer={"device": "nvme"}),
        "",
        "zero_optimization.offload_optimizer.device",
        "(stage 3)",
    ),
    (
        zero(2, offload_param={"device": "cpu"}),
        "",
        "zero_optimization.offload_param.device",
        "silently ignore cpu (stage 3)",
    ),
    (
        zero(3, offload_param={"device": "disk"}),
        "",
        "zero_optimization.offload_param.device",
        "none, cpu or nvme",
    ),
    (
        zero(3, zero_hpz_partition_size=2),
        "parallel.tensor=2",
        "zero_optimization.zero_hpz_partition_size",
        "parallel.tensor=1",
    ),
    (zero(3, mics_shard_size=2), "", "zero_optimization.mics_shard_size", "zero_hpz_partition_size"),
    (zero(2) | {"train_batch_size": 16}, "", "train_batch_size", "16 contradicts train.global_batch_size 8"),
    (
        zero(2) | {"train_micro_batch_size_per_gpu": 1},
        "",
        "train_micro_batch_size_per_gpu",
        "contradicts train.micro_batch_size 2",
    ),
    (
        zero(2) | {"gradient_accumulation_steps": 4},
        "",
        "gradient_accumulation_steps",
        'contradicts the microbatches a step 1 ("auto" there, or train.global_batch_size=32 here)',
    ),
    (zero(2) | {"gradient_clipping": 1.0}, "", "gradient_clipping", "contradicts optim.grad_clip 0.5"),
    (zero(2) | {"bf16": {"enabled": True}}, "", "bf16.enabled", 'contradicts train.precision "fp32"'),
    (zero(2) | {"fp16": {"enabled": 1}}, "", "fp16.enabled", "1 is not valid (true or false)"),
    (
        zero(2) | {"bf16": {"enabled": False}},
        "train.precision=bf16",
        "bf16.enabled",
        'false contradicts train.precision "bf16" ("auto", or leave it out)',
    ),
    (zero(2) | {"train_batch_size": True}, "", "train_batch_size", "(a whole number above 0)"),
    (zero(2) | {"gradient_clipping": True}, "", "gradient_clipping", "(a number, 0 or more)"),
    (zero(2) | {"optimizer": {"params": {"lr": True}}}, "", "optimizer.params.lr", "(a number, 0 or more)"),
    (zero(2) | {"seed": 1}, "", "seed", "no such key (leave it out; the key of the run is train.seed)"),
    (zero(2) | {"lr": 1}, "", "lr", "(did you mean optimizer.params.lr of the ds_config?)"),
    (zero(2, compute_grad_norm=False), "", "zero_optimization.compute_grad_norm", "needs the gradient norm"),
    (zero(1, legacy_stage1=True), "", "zero_optimization.legacy_stage1", "DeepSpeed 0.5.9 has removed"),
    (
        zero(3, pipeline_loading_checkpoint=True),
        "",
        "zero_optimization.pipeline_loading_checkpoint",
        "is of loading DeepSpeed's own checkpoints",
    ),
    (zero(2) | {"tensor_parallel": {"enabled": False}}, "", "tensor_parallel", "(parallel.tensor)"),
    (zero(2) | {"tensor_parallel": {"autotp_size": 2}}, "", "tensor_parallel", "(parallel.tensor)"),
    (zero(2) | {"compile": {"enabled": False}}, "", "compile", "replaces the model"),
    (zero(2) | {"compile": {"deepcompile": True}}, "", "compile", "replaces the model"),
    (zero(2) | {"datastates_ckpt": {"enabled": False}}, "", "datastates_ckpt", "DeepSpeed's own checkpoints"),
    (zero(2) | {"gradient_allreduce_op": "sum"}, "", "gradient_allreduce_op", "DeepSpeed's mean"),
    (zero(2) | {"sequence_parallel_size": 2}, "", "sequence_parallel_size", "parallel.sequence"),
    (zero(2) | {"weight_quantization": {}}, "", "weight_quantization", "quantizes weights"),
    (
        zero(2) | {"optimizer": ADAMW | {"type": "Lamb"}},
        "",
        "optimizer.type",
        "Lamb is not the run's optimizer",
    ),
    (
        zero(2) | {"optimizer": ADAMW | {"type": "OneBitAdam"}},
        "",
        "optimizer.type",
        "removed its 1-bit optimizers",
    ),
    # The type is what is wrong with these, and not what their parameters are called.
    (
        zero(2) | {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 23000}}},
        "",
        "optimizer.type",
        "removed its 1-bit optimizers",
    ),
    (
        zero(2) | {"optimizer": {"type": "OneBitLamb", "params": {"max_coeff": 0.3}}},
        "",
        "optimizer.type",
        "removed its 1-bit optimizers",
    ),
    (
        zero(2)
        | {"optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": 1, "cuda_aware": True}}},
        "",
        "optimizer.type",
        "removed its 1-bit optimizers",
    ),
    (
        zero(2) | {"optimizer": {"type": "Muon", "params": {"momentum": 0.9}}},
        "",
        "optimizer.type",
        "Muon is not the run's optimizer",
    ),
    (
        zero(2) | {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-4}}},
        "",
        "scheduler.type",
        '"LRRangeTest" has no equal here',
    ),
    (
        zero(2) | {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        "",
        "optimizer.params.adam_w_mode",
        "AdamW",
    ),
    (
        zero(2) | {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
        "",
        "optimizer.params.bias_correction",
        "the run's AdamW corrects the bias",
    ),
    (
        zero(2) | {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        "",
        "optimizer.params.max_grad_norm",
        "DeepSpeed does not accept it there (gradient_clipping)",
    ),
    (
        zero(2) | {"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}},
        "",
        "optimizer.params.amsgrad",
        "has no AMSGrad",
    ),
    (
        zero(2) | {"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}},
        "",
        "optimizer.params.momentum",
        "AdamW has no such parameter (leave it out)",
    ),
    (
        zero(2) | {"optimizer": {"params": {"lr": 1e-4}}},
        "",
        "optimizer.params.lr",
        "contradicts optim.lr 0.003",
    ),
    (
        zero(2) | {"optimizer": {"params": {"betas": [0.9, 0.999]}}},
        "optim.beta2=0.9",
        "optimizer.params.betas",
        "contradicts optim.beta2",
    ),
    (
        zero(2) | {"scheduler": {"type": "WarmupLR"}},
        "optim.warmup_steps=10",
        "scheduler",
        "1000 contradicts optim.warmup_steps 10",
    ),
    (
        zero(2) | {"scheduler": {"type": "LRRangeTest"}},
        "",
        "scheduler.type",
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle",
    ),
    (
        zero(2) | {"scheduler": {"type": "WarmupDecayLR"}},
        "",
        "scheduler.params.total_num_steps",
        "is missing",
    ),
    (zero(2) | warmup(cos_min_ratio=0), "", "scheduler.params.cos_min_ratio", "no such parameter"),
    (zero(2) | warmup(warmup_type="slow"), "", "scheduler.params.warmup_type", "log or linear"),
    (zero(2) | {"scheduler": CYCLE}, "", "scheduler.params", '"cycle_momentum": false'),
    (
        zero(2) | {CHECKPOINTING: {"partition_activations": True}},
        "",
        f"{CHECKPOINTING}.partition_activations",
        "parallel.sequence",
    ),
    (zero(2) | {"managed_gradient_accumulation": False}, "", "managed_gradient_accumulation", "leave it out"),
    (zero(2) | {"gradient_cliping": 1.0}, "", "gradient_cliping", "did you mean gradient_clipping?"),
    (zero(2) | {"cuda_visible_devices": 0}, "", "cuda_visible_devices", "has no such key (leave it out)"),
    (zero(2) | {"learning_rate": 0.1}, "", "learning_rate", "(leave it out; the key of the run is optim.lr)"),
    (
        zero(2) | {"loss_scale": 0},
        "",
        "loss_scale",
        "no such key (did you mean fp16.loss_scale of the ds_config?)",
    ),
    (
        zero(2) | {"stage": 2},
        "",
        "stage",
        "no such key (did you mean zero_optimization.stage of the ds_config?)",
    ),
    (zero(2) | {"compression_training": {}}, "", "compression_training", "has removed this key"),
    (zero(2) | {"amp": None}, "", "amp", "DeepSpeed 0.19 has removed this key (train.precision)"),
    (zero(2) | {"sparse_gradients": False}, "", "sparse_gradients", "has removed this key"),
    (zero(3, zeropp_loco_param={}), "", "zero_optimization.zeropp_loco_param", "has removed this key"),
    (zero(2) | {"autotuning": {"enabled": True}}, "", "autotuning", "launch/plan.py --search"),
    (zero(2) | {"bfloat16": {"enabled": True}}, "", "bfloat16", "is an old name (bf16)"),
    (zero(2) | {"vocabulary_size": 1000}, "", "vocabulary_size", "model.vocab_size"),
    (zero(2, cpu_offload=True), "", "zero_optimization.cpu_offload", "is an old name (offload_optimizer)"),
    (
        zero(3, max_live_parameters=1),
        "",
        "zero_optimization.max_live_parameters",
        "is a short name (stage3_max_live_parameters)",
    ),
    (zero(2) | {"tensorboard": {"job": "x"}}, "", "tensorboard.job", "has no such key (leave it out)"),
    (zero(2) | {"wandb": {"enable": True}}, "", "wandb.enable", "did you mean"),
    (zero(2, overlap_com=True), "", "zero_optimization.overlap_com", "did you mean overlap_comm?"),
    (zero(2) | {"steps_per_print": "auto"}, "", "steps_per_print", "nothing to be filled from"),
    (
        zero(2, overlap_comm="false"),
        "",
        "zero_optimization.overlap_comm",
        '"false" is not valid (true or false)',
    ),
    (zero(2, reduce_bucket_size=0), "", "zero_optimization.reduce_bucket_size", "(a whole number above 0)"),
    (
        zero(2, sub_group_size=1.5),
        "",
        "zero_optimization.sub_group_size",
        "1.5 is not valid (a whole number, 0 or more)",
    ),
    (
        zero(3, zero_hpz_partition_size="2"),
        "",
        "zero_optimization.zero_hpz_partition_size",
        "(a whole number above 0)",
    ),
    (
        zero(3, zero_hpz_partition_size="auto"),
        "",
        "zero_optimization.zero_hpz_partition_size",
        "nothing to be filled",
    ),
    (zero(2) | {"communication_data_type": "int8"}, "", "communication_data_type", "(fp32, bf16 or fp16)"),
    (zero(2) | {"gradient_clipping": 10**400}, "", "gradient_clipping", "(a number, 0 or more)"),
    ({"zero_optimization": True}, "", "zero_optimization", "an object"),
    ("missing.json", "", "", "cannot read missing.json"),
    ("README.md", "", "", "is no JSON"),
]


@pytest.mark.parametrize(
    ("ds_config", "overrides", "path", "says"),
    REFUSALS,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
    ds_config: Any,
    overrides: str,
    path: str,
    says: str,
) -> None:
    """DeepSpeed would hang, train something else, or ignore it, without a word or
    with a traceback on every rank.
    """
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as error:
        configure(ds_config, overrides)
    where = (
        path
        if path.startswith(("train.", "engine."))
        else f"engine.config: {path}"
        if path
        else "engine.config"
    )
    assert str(error.value).startswith(f"config error: {where}: ") and says in str(error.value), error.value


@pytest.mark.parametrize("section", KNOWN)
def test_no_key_takes_any_value(configure: Configure, section: str) -> None:
    """DeepSpeed took "false" for true, and said of most others with a traceback on
    every rank that they are none.
    """
    for name in KNOWN[section].split():
        for wrong in (["x"], -1, 10**400, float("nan")):
            given: Any = {name: wrong}
            for outer in reversed([part for part in section.split(".") if part]):
                given = {outer: given}
            with pytest.raises(ConfigError) as error:
                configure(
                    given | {"zero_optimization": {"stage": 3} | given.get("zero_optimization", {})}
                    if "zero" in section
                    else given
                )
            assert name in error.value.where and "\n" not in str(error.value), (name, wrong, error.value)


def test_what_a_ds_config_says_of_the_run_is_taken_over(tmp_path: Path) -> None:
    """People's files state batch, precision, optimizer and rates: a run that ignored
    one would train something else.
    """
    path = tmp_path / "silent.json"
    path.write_text(json.dumps({"model": {"num_layers": 2}, "data": {"train": "unused"}}))
    adamw = {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-7, "weight_decay": 0.01},
    }
    decay = {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 500, "warmup_max_lr": 1e-4},
    }
    ds_config = zero(2) | {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 7,
    }
    ds_config |= {
        "bf16": {"enabled": True},
        "optimizer": adamw,
        "scheduler": decay,
        CHECKPOINTING: {"cpu_checkpointing": True},
    }
    loaded = load(str(path), ["engine.kind=deepspeed", f"engine.config={json.dumps(ds_config)}"], 4)
    taken = {key for key, origin in loaded.origins.items() if origin == "ds_config"}
    values = {
        key: value for key, value in flatten(loaded.config.model_dump(mode="json")).items() if key in taken
    }
    assert values == {
        "train.global_batch_size": 128,
        "train.micro_batch_size": 2,
        "train.precision": "bf16",
        "train.recompute": "full",
        "train.offload_activations": True,
        "optim.lr": 1e-4,
        "optim.beta1": 0.9,
        "optim.beta2": 0.999,
        "optim.eps": 1e-7,
        "optim.weight_decay": 0.01,
        "optim.grad_clip": 0.5,
        "optim.schedule": "linear",
        "optim.warmup": "log",
        "optim.warmup_steps": 10,
        "optim.warmup_lr": 0.0,
        "optim.min_lr": 0.0,
        "optim.decay_steps": 500,
        "optim.lag": [2, 2],
        "log.every": 7,
    }
    assert not {"scheduler", "optimizer", CHECKPOINTING} & set(ds_settings(loaded.config)), (
        "the run does these"
    )
    with pytest.raises(ConfigError, match="^config error: engine.config: gradient_clipping: .* is not valid"):
        load(str(path), ["engine.kind=deepspeed", 'engine.config={"gradient_clipping": "much"}'], 4)


def test_steps_per_print_is_no_contradiction(tmp_path: Path) -> None:
    """Hugging Face's ZeRO configs state 2000, and how often something is printed changes no training."""
    settings = zero(2) | {"steps_per_print": 2000}
    silent, stating = tmp_path / "silent.json", tmp_path / "stating.json"
    sections: dict[str, Any] = {"model": {"num_layers": 2}, "data": {"train": "unused"}}
    silent.write_text(json.dumps(sections))
    stating.write_text(json.dumps(sections | {"log": {"every": 5}}))

    def note(path: Path, given: dict[str, Any], *overrides: str) -> tuple[int, str | None]:
        engine = ["engine.kind=deepspeed", f"engine.config={json.dumps(given)}"]
        config = run_of(path, *engine, *overrides, world=4)
        assert ds_settings(config).get("steps_per_print") == given.get("steps_per_print")
        return config.log.every, print_note(config)

    every, line = note(silent, settings)
    assert every == 2000 and line is not None and "log.every=2000" in line
    for every, line in (note(stating, settings), note(silent, settings, "log.every=5")):
        assert every == 5 and line is not None and "its config states log.every=5" in line
    assert note(silent, zero(2)) == (10, None) and note(stating, zero(2)) == (5, None)
    assert print_note(run_of(silent, world=4)) is None


@pytest.mark.parametrize(
    "nothing",
    [
        *({name: {"enabled": False}} for name, (switch, _) in SWITCHES.items() if switch == "enabled"),
        {"hybrid_engine": {"enabled": False, "max_out_tokens": 512}},
        {"hybrid_engine": None},
        {"compile": {}},
        {"compile": {"deepcompile": False}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"checkpoint": {}},
        {"dataloader_drop_last": False},
        {"sequence_parallel_size": 1},
        {"managed_gradient_accumulation": True},
        {"gradient_allreduce_op": "mean"},
        zero(2, compute_grad_norm=True),
        zero(2, legacy_stage1=False),
        zero(2, zero_quantized_weights="auto"),
        zero(2, offload_optimizer={"device": "cpu", "ratio": 1.0}),
    ],
    ids=json.dumps,
)
def test_what_asks_for_nothing_passes_and_is_dropped(configure: Configure, nothing: dict[str, Any]) -> None:
    """A file may state that it does without something. DeepSpeed raises for some of these statements, so it
    gets none of them.
    """
    settings = ds_settings(configure(zero(2) | nothing))
    assert not REFUSED.keys() & {path for path, _ in walk(settings)}


def test_off_values_are_of_refused_keys() -> None:
    """An entry under another name would be without effect."""
    assert {*OFF, *SWITCHES} <= REFUSED.keys() and not OFF.keys() & SWITCHES.keys()


def test_auto_states_nothing(tmp_path: Path) -> None:
    """Hugging Face's templates say "auto" in every place: DeepSpeed's own default there would
    be another rate than the run's.
    """
    path = tmp_path / "silent.json"
    path.write_text(
        json.dumps({"model": {"num_layers": 2}, "data": {"train": "unused"}, "optim": {"warmup_steps": 100}})
    )
    for kind, names in from_ds_config.SCHEDULERS.items():
        scheduler = {
            "type": kind,
            "params": dict.fromkeys(names, "auto")
            | ({"cycle_momentum": False} if kind == "OneCycle" else {}),
        }
        loaded = load(
            str(path),
            ["engine.kind=deepspeed", f"engine.config={json.dumps({'scheduler': scheduler} | zero(2))}"],
            4,
        )
        taken = {key for key, origin in loaded.origins.items() if origin == "ds_config"}
        assert taken <= {"optim.schedule", "optim.lag", "optim.warmup"}, kind
        assert (
            loaded.config.optim.warmup_steps == 100
            and loaded.config.optim.decay_steps == loaded.config.train.steps
        )
        assert "scheduler" not in ds_settings(loaded.config)


def test_the_schedulers_peak_is_the_runs(tmp_path: Path) -> None:
    """DeepSpeed's scheduler overwrites the optimizer's rate; and steps may be written as 1e3."""
    path = tmp_path / "silent.json"
    path.write_text(json.dumps({"model": {"num_layers": 2}, "data": {"train": "unused"}}))
    decay = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1e2, "total_num_steps": 1e3}}
    given = zero(2) | {
        "scheduler": decay,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
        "train_batch_size": 8.0,
    }
    config = run_of(path, "engine.kind=deepspeed", f"engine.config={json.dumps(given)}", world=4)
    assert (config.optim.lr, config.optim.warmup_steps, config.train.global_batch_size) == (1e-3, 100, 8)
    ds_settings(config)


def test_a_supervisor_knows_the_flag() -> None:
    """Else it would plan the layouts of another engine for the hosts that are left."""
    for flag in (["--deepspeed", "ds.json"], ["--deepspeed_config=ds.json"]):
        found = config_in(["torchrun", "launch/pretrain.py", "--config", "c.json", *flag, "train.steps=3"])
        assert found == ("c.json", ["engine.kind=deepspeed", 'engine.config="ds.json"', "train.steps=3"])


def test_the_flag_that_people_type() -> None:
    """`--deepspeed FILE`, as scripts of DeepSpeed's users have it; what stands behind it still overrides."""
    args = pretrain.parse(["--deepspeed", "zero 2.json", "--config", "c.json", "train.steps=3"])
    assert args.overrides == ["engine.kind=deepspeed", 'engine.config="zero 2.json"', "train.steps=3"]
    assert parse_override(args.overrides[1]) == ("engine.config", "zero 2.json")


SCHEDULES: list[dict[str, Any]] = [
    {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3}},
    {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_type": "linear"}},
    {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 6, "total_num_steps": 15, "warmup_min_lr": 1e-5},
    },
    {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_num_steps": 5,
            "total_num_steps": 40,
            "warmup_type": "linear",
            "warmup_max_lr": 1e-4,
        },
    },
    {
        "type": "WarmupCosineLR",
        "params": {
            "warmup_num_steps": 6,
            "total_num_steps": 15,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
        },
    },
    {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 4, "total_num_steps": 30, "warmup_type": "linear"},
    },
    {
        "type": "OneCycle",
        "params": CYCLE["params"]
        | {"cycle_first_step_size": 5, "cycle_second_step_size": 9, "cycle_momentum": False},
    },
    {"type": "OneCycle", "params": CYCLE["params"] | {"cycle_first_step_size": 7, "cycle_momentum": False}},
]


@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: its rates cannot be asked"
)
def test_rates_of_a_ds_config_are_deepspeeds_own() -> None:
    """Its warmup is logarithmic by default, and its steps count from 0: a rate a step
    late would train something else.
    """
    program = """
import json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from deepspeed.runtime import lr_schedules
for scheduler in json.load(sys.stdin):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    own = getattr(lr_schedules, scheduler["type"])(optimizer, **scheduler["params"])
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        own.step()
    print("RATES", json.dumps(rates))
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(SCHEDULES),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = [
        json.loads(line.removeprefix("RATES "))
        for line in run.stdout.splitlines()
        if line.startswith("RATES")
    ]
    for scheduler, rates in zip(SCHEDULES, theirs, strict=True):
        if scheduler["type"] == "WarmupCosineLR":
            # it begins with a step of rate 0, wherever its warmup begins; the run does not
            rates[0] = rates[1]
        found = {"lr": 3e-3, "decay_steps": 100} | from_ds_config.rates(scheduler, 3e-3)
        optim = OptimConfig.model_validate_json(json.dumps(found))
        assert [learning_rate(optim, step, 100) for step in range(1, 21)] == pytest.approx(
            rates, rel=1e-12
        ), scheduler
        assert [rate(optim, step, 100) for step in range(1, 21)] == pytest.approx(rates, rel=1e-12), scheduler
        late = optim.model_copy(update={"lag": (optim.lag[0] + 1, optim.lag[1] + 1)})
        assert [learning_rate(late, step, 100) for step in range(1, 21)] != pytest.approx(rates, rel=1e-12), (
            "a step late is seen"
        )


def test_an_equal_repetition_is_no_contradiction(configure: Configure) -> None:
    given = zero(2) | {
        "optimizer": ADAMW,
        "gradient_clipping": 0.5,
        "train_batch_size": 8,
        "fp16": {"enabled": False},
    }
    assert "optimizer" not in ds_settings(configure(given, "optim.lr=0.003"))


def test_refusal_of_the_script_is_one_line(tmp_path: Path) -> None:
    """One of two ranks alone is enough: nothing waits for the other."""
    path = write_config(tmp_path, "unused")
    overrides = [
        "engine.kind=deepspeed",
        'engine.config={"zero_optimization":{"stage":3}}',
        "parallel.pipeline=2",
    ]
    command = [sys.executable, str(ROOT / "launch/pretrain.py"), "--config", path, *overrides]
    environment = {"PATH": "", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1 and "deadlocks" in run.stderr, run.stderr


@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: its own keys cannot be read"
)
def test_every_key_that_deepspeed_reads_has_its_reason() -> None:
    """A key that a new DeepSpeed has dropped would stop every rank with a traceback. And no error may say
    that DeepSpeed has no such key if it reads it.
    """
    program = """
import inspect, json, os
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.profiling import constants as profiling
from deepspeed.runtime import config, lr_schedules
from deepspeed.runtime.activation_checkpointing import config as checkpointing
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor import constants as swapping
from deepspeed.runtime.zero import offload_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

class Asked(dict):
    # A ds_config that notes which of its keys are asked for.
    def __init__(self):
        super().__init__(train_batch_size=1)
        self.names = set()
    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)
    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)
    def keys(self):
        names, keys = self.names, super().keys()
        class Keys:
            def __contains__(self, name):
                names.add(name)
                return name in keys
        return Keys()
    def __copy__(self):
        return self

asked = Asked()
config.DeepSpeedConfig(asked)
models = {"zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config, "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig, "csv_monitor": CSVConfig, "comet": CometConfig, "comms_logger": CommsLoggerConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig}
read = {name: [field.alias or key for key, field in model.model_fields.items()]
    for name, model in models.items()}
read[""] = sorted(asked.names)

def constants(module, prefix):
    return [value for name, value in vars(module).items() if name.startswith(prefix)
        and not name.endswith(("_DEFAULT", "_FORMAT")) and isinstance(value, str)]

read["flops_profiler"] = constants(profiling, "FLOPS_PROFILER_")
read["aio"] = constants(swapping, "AIO_")
read["activation_checkpointing"] = constants(checkpointing, "ACT_CHKPT_")
read["data_types"] = [config.GRAD_ACCUM_DTYPE, config.PARAM_DTYPE, config.BUFFER_DTYPE,
    config.KEEP_IN_FP32_MODULES]
read["optimizer"] = [config.TYPE, config.OPTIMIZER_PARAMS, config.LEGACY_FUSION]
names = lambda function: [name for name in inspect.signature(function).parameters
    if name not in ("self", "params", "model_params", "optimizer")]
kinds = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle")
schedulers = [getattr(lr_schedules, kind).__init__ for kind in kinds]
read["scheduler.params"] = sorted({name for scheduler in schedulers for name in names(scheduler)})
read["optimizer.params"] = sorted({name for kind in (torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam)
    for name in names(kind.__init__)} - {"adamw_mode"})
removed = [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS]
removed += ["zero_optimization." + name for name in config._REMOVED_ZERO_CONFIG_KEYS]
print(json.dumps([read, removed]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    read, removed = json.loads(run.stdout.splitlines()[-1])
    assert sorted(removed) == sorted(REMOVED)
    assert {"train_batch_size", "hybrid_engine", "expert_parallel"} <= set(read[""])
    ours = {section: set(names.split()) for section, names in (KNOWN | MONITORS).items()}
    for section, theirs in read.items():
        refused = {path.rpartition(".")[2] for path in REFUSED if path.rpartition(".")[0] == section}
        missing = set(theirs) - ours[section] - refused - set(REMOVED)
        assert not missing, f"{section}: DeepSpeed reads {missing}"
        if section in MONITORS or section.startswith("zero") or section in ("bf16", "fp16", "aio"):
            assert ours[section] <= set(theirs), f"{section}: {ours[section] - set(theirs)} is gone"
