"""InstructLab's recipes become configs, and none of their keys is passed over in silence."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import instructlab as script
from megacore.data.indexed import IndexedTokens
from megacore.data.packing import WholeDocuments
from megacore.errors import UserError
from megacore.tools.interchange.instructlab import READ, TOLD, converted, resolve_converted
from megacore.tools.prepare.indexed_writer import IndexedWriter
from tests.build import run_of

# What a profile for 8 GPUs states, as InstructLab's configuration 1.0.0 names it, with shorter sequences.
CURRENT = """
version: 1.0.0
general: {log_level: INFO}
train:
  additional_args: {learning_rate: 2e-5, lora_alpha: 32, lora_dropout: 0.1, warmup_steps: 25}
  device: cpu
  ckpt_output_dir: ~/.local/share/instructlab/checkpoints
  data_output_dir: ~/.local/share/instructlab/internal
  data_path: ~/.local/share/instructlab/datasets
  deepspeed_cpu_offload_optimizer: true
  effective_batch_size: 128
  is_padding_free: true
  lora_quantize_dtype: null
  lora_rank: 0
  max_batch_len: 600
  max_seq_len: 128
  model_path: ~/.cache/instructlab/models/instructlab/granite-7b-lab
  nproc_per_node: 2
  num_epochs: 8
  phased_mt_bench_judge: ~/.cache/instructlab/models/prometheus-eval/prometheus-8x7b-v2.0
  checkpoint_at_epoch: true
  save_samples: 1000
"""
OLDER: dict[str, Any] = {
    "max_seq_len": 64,
    "num_gpus": 2,
    "num_epochs": 3,
    "learning_rate": "1e-4",
    "gradient_accumulation_steps": 4,
    "mixed_precision": "no",
    "distributed": "deepspeed",
    "deepspeed": {"zero_stage": 3},
    "gradient_checkpointing": False,
    "save_samples": 0,
}


@pytest.fixture
def at(tmp_path: Path) -> tuple[str, str]:
    """The folder of an imported model, and 1,000 conversations of about 30 tokens."""
    (tmp_path / "run/tokenizer").mkdir(parents=True)
    model = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "vocab_size": 100,
        "max_positions": 256,
        "position": "rope",
    }
    (tmp_path / "run/config.json").write_text(json.dumps({"model": model, "train": {"steps": 9}}))
    (tmp_path / "run/tokenizer/tokenizer.json").write_text("{}")
    with IndexedWriter(str(tmp_path / "chat"), np.uint8) as writer:
        for length in np.random.default_rng(0).integers(10, 50, size=1000):
            writer.write(np.arange(length, dtype=np.uint8))
            writer.end_document()
    return str(tmp_path / "run"), str(tmp_path / "chat")


def test_a_current_recipe(at: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -e '.[datasets]'")
    (tmp_path / "config.yaml").write_text(CURRENT)
    script.run(
        [
            str(tmp_path / "config.yaml"),
            "--run",
            at[0],
            "--data",
            at[1],
            "--output",
            str(tmp_path / "mine.json"),
        ]
    )
    found, said = json.loads((tmp_path / "mine.json").read_text()), capsys.readouterr().out
    # 128 conversations in sequences of at most 128 tokens, each of which holds about 4
    sequences, seq_len = found["train"]["global_batch_size"], found["train"]["seq_len"]
    held = 1000 / WholeDocuments(IndexedTokens(at[1]), seq_len).count
    assert sequences == 32 and 112 < seq_len <= 128 and abs(sequences * held - 128) < 10
    epoch = math.ceil(1000 / held / sequences)
    assert found["train"] == {
        "steps": 8 * epoch,
        "seq_len": seq_len,
        "micro_batch_size": 4,
        "global_batch_size": sequences,
        "precision": "bf16",
        "recompute": "full",
        "seed": 42,
        "device": "cpu",
    }
    assert found["optim"] == {
        "kind": "adamw",
        "lr": 2e-5,
        "warmup_steps": 25,
        "schedule": "cosine",
        "min_lr": 0.0,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip": 1.0,
    }
    assert (
        found["data"]["tokenizer"] == f"{at[0]}/tokenizer/tokenizer.json"
        and found["data"]["packing"] == "best_fit"
    )
    assert found["checkpoint"] == {"weights": at[0], "every": round(1000 / (sequences * held))}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    assert found["engine"] == {"kind": "deepspeed", "config": {"zero_optimization": zero}}
    for key in (
        "model_path",
        "lora_alpha",
        "phased_mt_bench_judge",
        "checkpoint_at_epoch",
        "effective_batch_size",
        "nproc_per_node",
    ):
        assert f"train.{key}: " in said
    assert f"torchrun --nproc-per-node 2 launch/pretrain.py --config {tmp_path}/mine.json" in said
    assert run_of(tmp_path / "mine.json", world=2).num_microbatches == sequences // 8


# What InstructLab's profile for 8 H100 states of the batch, and the values that its configuration has where
# a profile states none.
H100 = {"max_batch_len": 60000, "max_seq_len": 4096, "effective_batch_size": 128, "nproc_per_node": 8}
DEFAULT = {
    "max_batch_len": 5000,
    "max_seq_len": 4096,
    "effective_batch_size": 64,
    "nproc_per_node": 1,
    "distributed_backend": "fsdp",
    "fsdp_cpu_offload_optimizer": False,
    "num_epochs": 10,
    "device": "cpu",
}


def write_conversations(prefix: Path, lengths: list[int]) -> str:
    """Write a prepared corpus with one conversation of each length."""
    with IndexedWriter(str(prefix), np.uint8) as writer:
        for length in lengths:
            writer.write(np.zeros(length, dtype=np.uint8))
            writer.end_document()
    return str(prefix)


MIXED = np.random.default_rng(1).integers(20, 800, size=1500).tolist()


@pytest.mark.parametrize(
    ("recipe", "lengths", "conversations"),
    [
        pytest.param(H100, [409] * 1500, 128, id="H100 profile"),
        pytest.param(H100, MIXED, 128, id="H100 profile, lengths that differ"),
        pytest.param(H100 | {"nproc_per_node": 2, "effective_batch_size": 96}, [409] * 1500, 96, id="2 H100"),
        pytest.param(H100 | {"effective_batch_size": 3840}, [50] * 9000, 3840, id="large batch"),
        pytest.param(H100 | {"effective_batch_size": 3840}, [409] * 1500, 1500, id="fewer than a batch"),
        pytest.param(DEFAULT, [409] * 1500, 64, id="default"),
        pytest.param(DEFAULT | {"effective_batch_size": 1}, [4000] * 20, 1, id="one conversation"),
    ],
)
def test_the_batch_is_the_effective_batch_size(
    recipe: dict[str, Any], lengths: list[int], conversations: int, at: tuple[str, str], tmp_path: Path
) -> None:
    """A step holds the stated conversations within 10 percent, and a microbatch at most `max_batch_len`."""
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_positions": 4096, "position": "rope"}
    (tmp_path / "run/config.json").write_text(json.dumps({"model": model}))
    data = write_conversations(tmp_path / "data", lengths)
    sections, _, processes = converted(recipe, at[0], data)
    config = run_of(sections, world=processes)
    held = len(lengths) / WholeDocuments(IndexedTokens(data), config.train.seq_len).count
    assert config.train.global_batch_size * held == pytest.approx(conversations, rel=0.1)
    assert config.train.micro_batch_size * config.train.seq_len <= recipe["max_batch_len"]
    assert config.train.seq_len >= max(lengths) - 1


def test_a_conversation_of_full_length_keeps_sequences_long(at: tuple[str, str], tmp_path: Path) -> None:
    """No conversation is cut for the sake of the batch; the distance from the wish is printed."""
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_positions": 4096, "position": "rope"}
    (tmp_path / "run/config.json").write_text(json.dumps({"model": model}))
    data = write_conversations(tmp_path / "data", [4097] + [409] * 1500)
    sections, notes, _ = converted(H100, at[0], data)
    assert (sections["train"]["seq_len"], sections["train"]["global_batch_size"]) == (4096, 16)
    assert any("128 conversations are about 159, in 16 sequences of 4096 tokens" in note for note in notes)


def test_one_process_needs_no_sharding(at: tuple[str, str]) -> None:
    """FSDP, InstructLab's default, has nothing to shard on one process."""
    sections, notes, processes = converted({"max_seq_len": 64, "distributed_backend": "fsdp"}, *at)
    assert run_of(sections, world=processes).engine.kind == "native"
    assert any(note.startswith("train.distributed_backend: one process") for note in notes)


def test_a_warmup_that_does_not_end_is_warned_of(at: tuple[str, str], tmp_path: Path) -> None:
    """The conversion warns already, not only the training that it prepares."""
    (tmp_path / "config.yaml").write_text(CURRENT.replace("warmup_steps: 25", "warmup_steps: 2500"))
    command = ["launch/instructlab.py", f"{tmp_path}/config.yaml", "--run", at[0], "--data", at[1]]
    command += ["--output", f"{tmp_path}/mine.json"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("WARNING: optim.warmup_steps is 2500") == 1, done.stderr


def test_an_older_recipe(at: tuple[str, str]) -> None:
    found, _, processes = converted(OLDER, *at)
    assert (
        processes == 2
        and found["train"]["global_batch_size"] == 2 * 4
        and found["train"]["recompute"] == "none"
    )
    assert (found["train"]["precision"], found["optim"]["lr"]) == ("fp32", 1e-4)
    assert found["engine"] == {"kind": "deepspeed", "config": {"zero_optimization": {"stage": 3}}}
    epoch = found["train"]["steps"] // 3
    assert found["checkpoint"] == {"weights": at[0], "every": epoch, "keep_every": epoch}


OTHER: dict[str, Any] = {  # values that are none of the defaults; the keys without one are numbers
    "device": "cpu",
    "checkpoint_at_epoch": False,
    "keep_last_checkpoint_only": True,
    "distributed_backend": "deepspeed",
    "distributed": "deepspeed",
    "deepspeed_cpu_offload_optimizer": True,
    "deepspeed_cpu_offload_optimizer_pin_memory": True,
    "deepspeed_cpu_offload_optimizer_ratio": 0.5,
    "fsdp_cpu_offload_optimizer": True,
    "use_dolomite": True,
    "mock_data": True,
    "mixed_precision": "fp16",
    "gradient_checkpointing": False,
    "adamw_betas": [0.8, 0.9],
    "lr_scheduler": "linear",
    "deepspeed.config_path": "ds.json",
    "deepspeed.zero_stage": 1,
    "learning_rate": 1e-3,
    "adamw_weight_decay": 0.5,
    "adamw_eps": 1e-6,
    "max_seq_len": 32,
    "max_batch_len": 8192,
}


@pytest.mark.parametrize("key", [*READ, *TOLD])
def test_no_key_is_passed_over(key: str, at: tuple[str, str]) -> None:
    """Each changes a setting, or is told by its name, or is refused by it.

    With a planted key that nobody reads, this fails.
    """
    plain: dict[str, Any] = {"max_seq_len": 64, "save_samples": 0}
    if key == "deepspeed_cpu_offload_optimizer_pin_memory":
        plain["deepspeed_cpu_offload_optimizer"] = True
    outer, _, inner = key.rpartition(".")
    value = OTHER.get(key, 3)
    try:
        found = converted(plain | ({outer: {inner: value}} if outer else {key: value}), *at)
    except UserError as error:
        assert str(error).startswith(f"config error: train.{key}: ") and "\n" not in str(error)
    else:
        before = converted(plain, *at)
        assert (found[0], found[2]) != (before[0], before[2]) or any(
            note.startswith(f"train.{key}: ") for note in found[1]
        )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lora_rank": 4}, "train.lora_rank: 4 has no equal"),
        ({"num_epoch": 4}, "train.num_epoch: is not known (num_epochs?)"),
        ({"max_seq_len": 4096}, "train.max_seq_len: 4096 is beyond the model's 256 positions"),
        ({"max_seq_len": 64, "max_batch_len": 20}, "train.max_batch_len: 20 is below max_seq_len 64"),
        ({"num_epochs": "many"}, "train.num_epochs: 'many' is not valid"),
        ({"num_epochs": True}, "train.num_epochs: True is not valid"),
        ({"random_seed": 10**400}, "train.random_seed: 1000"),
        ({"device": "hpu"}, "train.device: 'hpu' is not known here (cuda, cpu)"),
        ({"nproc_per_node": 2, "num_gpus": 4}, "train.num_gpus: differs from nproc_per_node 2"),
        (
            {"effective_batch_size": 8, "gradient_accumulation_steps": 2},
            "train.gradient_accumulation_steps: and effective_batch_size both",
        ),
        (
            {"deepspeed": {"config_path": "a", "zero_stage": 2}},
            "train.deepspeed.zero_stage: and deepspeed.config_path both say it",
        ),
        (
            {"distributed_backend": "fsdp", "deepspeed_cpu_offload_optimizer": True},
            "does not go with distributed_backend fsdp",
        ),
        (
            {"learning_rate": 1e-4, "additional_args": {"learning_rate": 2e-5}},
            "train.learning_rate: stands twice, as 0.0001 and as 2e-05",
        ),
        ({"additional_args": {"neftune_alpha": 5}}, "train.neftune_alpha: is not known"),
        (
            {"distributed_backend": "fsdp", "fsdp_cpu_offload_optimizer": True},
            "train.fsdp_cpu_offload_optimizer: one process shards nothing",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], complaint: str, at: tuple[str, str]) -> None:
    with pytest.raises(UserError) as caught:
        converted({"max_seq_len": 64} | change, *at)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"adamw_eps": 0}, "train.adamw_eps: as optim.eps: 0.0 is not valid"),
        ({"random_seed": 2**70}, "train.random_seed: as train.seed: "),
        ({"nproc_per_node": 10**9}, "train.nproc_per_node: as engine.shard_size: "),
        ({"deepspeed": {"config_path": "no/file"}}, "train.deepspeed.config_path: as engine.config: cannot"),
    ],
)
def test_what_training_rejects_is_reported_by_the_recipes_key(
    change: dict[str, Any], complaint: str, at: tuple[str, str]
) -> None:
    sections, _, processes = converted({"max_seq_len": 64} | change, *at)
    with pytest.raises(UserError) as caught:
        resolve_converted(sections, "test", processes)
    assert str(caught.value).startswith(f"config error: {complaint}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a: [", "is no YAML"),
        (b"\xff", "is no YAML"),
        (b"a: 2024-99-01", "is no YAML"),
        (b"a: 1", "has no section train"),
    ],
)
def test_what_is_no_recipe(content: bytes, complaint: str, at: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -e '.[datasets]'")
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(UserError, match=f"c.yaml: {complaint}"):
        script.run(
            [
                str(tmp_path / "c.yaml"),
                "--run",
                at[0],
                "--data",
                at[1],
                "--output",
                str(tmp_path / "mine.json"),
            ]
        )
    assert not (tmp_path / "mine.json").exists()


def test_a_run_whose_model_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model": 5}')
    with pytest.raises(UserError, match="--run: .*config.json is no config of a run"):
        converted({"max_seq_len": 64}, str(tmp_path), "nowhere")
