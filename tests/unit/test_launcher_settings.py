"""What `accelerate launch` tells its ranks about training: a run that ignored it would train something else
than the user's accelerate config says, without a word.
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools.deepspeed.engine import check_machine
from megacore.tools.machine.device import pick_device
from megacore.tools.settings.launcher_settings import check_launcher
from tests.build import run_of
from tests.commands import run_script
from tests.training import write_config

# What `accelerate launch` sets without a config file, besides OMP_NUM_THREADS.
PLAIN = {
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}
INDUCTOR = PLAIN | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
COMPILED = "train.compile=true"
# What it sets for a config file with FSDP 2 and no more.
FSDP = PLAIN | {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
DEEPSPEED = PLAIN | {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
}
MEGATRON = PLAIN | {
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "MEGATRON_LM_TP_DEGREE": "1",
    "MEGATRON_LM_PP_DEGREE": "1",
    "MEGATRON_LM_GRADIENT_CLIPPING": "1.0",
    "MEGATRON_LM_NO_LOAD_OPTIM": "False",
}
MESH = FSDP | {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
}
SHIPPED = Path(__file__).resolve().parents[2] / "configs/deepspeed"
ZERO_2 = 'engine.config={"zero_optimization":{"stage":2}}'
Check = Callable[..., None]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """`check(env, overrides)`: the tests' small config (fp32, global batch 8, microbatches of 2), 4 ranks."""
    path = write_config(tmp_path, "unused")
    return lambda env, overrides="": check_launcher(run_of(path, *overrides.split(), world=4), env)


@pytest.mark.parametrize(
    ("env", "overrides"),
    [
        ({}, ""),
        (PLAIN, ""),
        (PLAIN, "train.precision=bf16"),
        (PLAIN | {"ACCELERATE_MIXED_PRECISION": "bf16"}, "train.precision=bf16"),
        (PLAIN | {"ACCELERATE_USE_CPU": "True"}, ""),
        (PLAIN | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "train.compile=true"),
        # How to compile states nothing where nothing is compiled.
        (PLAIN | {"ACCELERATE_DYNAMO_MODE": "max-autotune"}, ""),
        (INDUCTOR, COMPILED),
        (MEGATRON | {"MEGATRON_LM_RECOMPUTE_METHOD": "None"}, ""),
        (MEGATRON | {"MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS": "False"}, ""),
        (FSDP, "engine.kind=fsdp"),
        (FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, "engine.kind=fsdp engine.reshard=false"),
        (FSDP | {"FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "engine.kind=fsdp"),
        (DEEPSPEED, f"engine.kind=deepspeed {ZERO_2}"),
        (DEEPSPEED | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, f"engine.kind=deepspeed {ZERO_2}"),
        (DEEPSPEED | {"ACCELERATE_GRADIENT_CLIPPING": "auto"}, f"engine.kind=deepspeed {ZERO_2}"),
        (MEGATRON, ""),
        (MEGATRON | {"MEGATRON_LM_TP_DEGREE": "2"}, "parallel.tensor=2"),
        (MEGATRON | {"MEGATRON_LM_NUM_MICRO_BATCHES": "2"}, "parallel.tensor=2"),
        (MESH, "engine.kind=fsdp"),
        (MESH | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}, "engine.kind=fsdp"),
        (
            MESH | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"},
            "engine.kind=fsdp engine.shard_size=2",
        ),
        # Without its switch accelerate reads none of them either.
        (
            {"MEGATRON_LM_TP_DEGREE": "8", "PARALLELISM_CONFIG_TP_SIZE": "8", "FSDP_OFFLOAD_PARAMS": "true"},
            "",
        ),
    ],
)
def test_what_agrees_or_states_nothing_passes(check: Check, env: dict[str, str], overrides: str) -> None:
    """accelerate sets most variables in every launch, to defaults that the user has not chosen."""
    check(env, overrides)


CONTRADICTIONS = [
    (FSDP, "", "ACCELERATE_USE_FSDP=true contradicts the run's engine.kind=native (engine.kind=fsdp, or"),
    (
        FSDP | {"ACCELERATE_MIXED_PRECISION": "bf16"},
        "",
        "run's engine.kind=native, train.precision=fp32 (engine.kind=fsdp train.precision=bf16, or",
    ),
    (PLAIN | {"ACCELERATE_MIXED_PRECISION": "fp16"}, "train.precision=bf16", "(train.precision=fp16, or"),
    (PLAIN | {"ACCELERATE_MIXED_PRECISION": "fp8"}, "", "=fp8 has no equal in megacore (bf16 or fp16;"),
    (PLAIN | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "", "(train.compile=true, or"),
    (PLAIN | {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}, "", "=AOT_EAGER has no equal in megacore"),
    (PLAIN | {"ACCELERATE_USE_CPU": "1"}, "train.device=cuda", "(train.device=cpu, or"),
    (PLAIN | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "", "(train.global_batch_size=32, or"),
    (PLAIN | {"ACCELERATE_GRADIENT_CLIPPING": "0.25"}, "", "(optim.grad_clip=0.25, or"),
    (PLAIN | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "x"}, "", "STEPS=x is not valid (a whole number, 1"),
    (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, "engine.kind=fsdp", "(engine.cpu_offload=true, or"),
    (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "engine.kind=fsdp", "(train.recompute=full, or"),
    (FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, "engine.kind=fsdp", "(engine.reshard=false, or"),
    (
        FSDP | {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
        "engine.kind=fsdp",
        "(engine.reshard=false, or",
    ),
    (
        FSDP | {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "LOCAL_WORLD_SIZE": "2"},
        "engine.kind=fsdp",
        "(engine.shard_size=2, or",
    ),
    (
        FSDP | {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "NO_SHARD"},
        "engine.kind=fsdp",
        "FSDP_SHARDING_STRATEGY=NO_SHARD has no equal in megacore",
    ),
    (DEEPSPEED, "", 'engine.kind=deepspeed \'engine.config={"zero_optimization": {"stage": 2}}\', or'),
    (
        DEEPSPEED | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
        f"engine.kind=deepspeed {ZERO_2}",
        '"offload_optimizer": {"device": "cpu"}',
    ),
    (
        DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": f"{SHIPPED}/zero2.json"},
        "",
        f"engine.config={SHIPPED}/zero2.json, or",
    ),
    (
        MEGATRON | {"MEGATRON_LM_TP_DEGREE": "2", "MEGATRON_LM_PP_DEGREE": "2"},
        "",
        "(parallel.tensor=2 parallel.pipeline=2, or",
    ),
    (
        MEGATRON | {"MEGATRON_LM_SEQUENCE_PARALLELISM": "True"},
        "parallel.tensor=2",
        "(parallel.sequence=true, or",
    ),
    (MEGATRON | {"MEGATRON_LM_NO_LOAD_OPTIM": "True"}, "", "NO_LOAD_OPTIM=True has no equal in megacore"),
    (INDUCTOR | {"ACCELERATE_DYNAMO_MODE": "max-autotune"}, COMPILED, "MODE=max-autotune has no equal"),
    (INDUCTOR | {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "True"}, COMPILED, "USE_FULLGRAPH=True has no equal"),
    (INDUCTOR | {"ACCELERATE_DYNAMO_USE_DYNAMIC": "True"}, COMPILED, "(false; the run's own key is train"),
    (
        INDUCTOR | {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "True"},
        COMPILED,
        "REGIONAL_COMPILATION=True",
    ),
    (
        MEGATRON | {"MEGATRON_LM_RECOMPUTE_METHOD": "block"},
        "",
        "(leave it unset; the run's own key is train.r",
    ),
    (MEGATRON | {"MEGATRON_LM_RECOMPUTE_NUM_LAYERS": "2"}, "", "RECOMPUTE_NUM_LAYERS=2 has no equal"),
    (MEGATRON | {"MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS": "2"}, "", "in megacore (leave it unset)"),
    (
        MEGATRON | {"MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32": "True"},
        "",
        "=True has no equal in megacore (false)",
    ),
    (
        MEGATRON | {"MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS": "True"},
        "",
        "=True has no equal in megacore (false)",
    ),
    (MEGATRON | {"MEGATRON_LM_EOD_MASK_LOSS": "true"}, "", "has no equal in megacore (false)"),
    (MESH | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "engine.kind=fsdp", "(parallel.tensor=2, or"),
    (MESH | {"PARALLELISM_CONFIG_SP_SIZE": "2"}, "engine.kind=fsdp", "(parallel.context=2, or"),
    (MESH | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "engine.kind=fsdp", "(engine.shard_size=2, or"),
    (MESH | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "engine.kind=fsdp", "(parallel.data=2, or"),
]


@pytest.mark.parametrize(("env", "overrides", "says"), CONTRADICTIONS)
def test_a_contradiction_names_the_key(check: Check, env: dict[str, str], overrides: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(env, overrides)
    message = str(error.value)
    assert message.startswith("config error: environment: ") and says in message and "\n" not in message


IMPOSSIBLE = [
    (PLAIN | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1.5"}, "STEPS=1.5 is not valid (a whole number, 1"),
    (PLAIN | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "0"}, "STEPS=0 is not valid (a whole number, 1"),
    (PLAIN | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "9" * 400}, "9 is not valid (a whole number, 1"),
    (PLAIN | {"ACCELERATE_GRADIENT_CLIPPING": "nan"}, "CLIPPING=nan is not valid (a number, 0 or more)"),
    (PLAIN | {"ACCELERATE_GRADIENT_CLIPPING": "inf"}, "CLIPPING=inf is not valid (a number, 0 or more)"),
    (MEGATRON | {"MEGATRON_LM_HIDDEN_DROPOUT": "1"}, "DROPOUT=1 is not valid (a number, 0 or more and below"),
    (MESH | {"PARALLELISM_CONFIG_TP_SIZE": "-1"}, "TP_SIZE=-1 is not valid (a whole number, 1 or more)"),
    (
        MESH | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "x", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"},
        "DP_SHARD_SIZE=x is not valid (a whole number, 1 or more)",
    ),
    (
        FSDP | {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "LOCAL_WORLD_SIZE": "two"},
        "LOCAL_WORLD_SIZE=two is not valid (a whole number, 1 or more)",
    ),
    (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "4"}, "STAGE=4 is not valid (0, 1, 2 or 3)"),
    (DEEPSPEED | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "disk"}, "(none or cpu or nvme;"),
    (DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "no.json"}, "no.json: cannot read no.json: No such"),
]


@pytest.mark.parametrize(("env", "says"), IMPOSSIBLE)
def test_an_impossible_value_is_not_advised(check: Check, env: dict[str, str], says: str) -> None:
    """An override with it would be rejected, and a traceback on every rank is no message."""
    with pytest.raises(ConfigError) as error:
        check(env, "engine.kind=fsdp")
    message = str(error.value)
    assert message.startswith("config error: environment: the launcher's ") and "\n" not in message
    assert says in message


def test_an_unstated_size_is_one(check: Check) -> None:
    """accelerate writes None for an option that was not given."""
    sizes = {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "None", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4"}
    check(MESH | sizes, "engine.kind=fsdp")


def test_a_ds_config_of_accelerate_is_the_runs(check: Check, tmp_path: Path) -> None:
    """The same file by another path agrees, and another file does not."""
    file, other = tmp_path / "ds.json", tmp_path / "other.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    other.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    env = DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    check(env, f"engine.kind=deepspeed engine.config={file.parent / '.' / file.name}")
    with pytest.raises(ConfigError, match="contradicts the run's engine.config="):
        check(env, f"engine.kind=deepspeed engine.config={other}")


def test_auto_does_not_take_a_gpu_where_the_launcher_says_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --cpu` on a machine with a GPU, which only PyTorch can see."""
    config = run_of(write_config(tmp_path, "unused"), "train.device=auto")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="train.device=cpu, or a launch without --cpu"):
        pick_device(config, RankInfo())


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stated", ["cuda", "xpu"])
def test_deepspeeds_accelerator_is_the_runs_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: str
) -> None:
    """DeepSpeed would take another device than the model is on."""
    config = run_of(write_config(tmp_path, "unused"), "engine.kind=deepspeed", ZERO_2)
    monkeypatch.setenv("DS_ACCELERATOR", stated)
    with pytest.raises(ConfigError, match=f"^config error: environment: DS_ACCELERATOR={stated} contradicts"):
        check_machine(config, torch.device("cpu"))


def test_one_line_and_status_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FSDP.items():
        monkeypatch.setenv(name, value)
    done = run_script("launch/pretrain.py", "--config", write_config(tmp_path, "unused"))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "(engine.kind=fsdp, or " in done.stderr
