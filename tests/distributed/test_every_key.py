"""Nothing configured is ignored: every key of the schema, with another value, changes what a run computes,
what it tells its listeners, what it writes, what the planner says of it, how the process is set up, or is
refused by name. A new key without a case fails.
"""

import ctypes
import json
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import Config
from megacore.distributed.events import Listener, Operation
from megacore.distributed.init import joined
from megacore.distributed.mesh import Mesh
from megacore.errors import ConfigError
from megacore.pipeline.schedule import Action
from megacore.tools.choices.run import trainer_of
from megacore.tools.diagnosis.guardians import Guardians
from megacore.tools.inputs import Inputs
from megacore.tools.launchers import place_from_environment
from megacore.tools.machine import cpu
from megacore.tools.machine.device import take_device
from megacore.tools.monitoring.attach import callbacks_of
from megacore.tools.planner.memory import rank_memory
from megacore.tools.settings.load import flatten
from tests.build import run_of
from tests.pool import Pool
from tests.training import lines, write_config, write_corpus

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = flatten(Config().model_dump(by_alias=True))


@dataclass(frozen=True)
class Case:
    """A value of a key, beside a run that is equal but for it."""

    kind: str  # what must be another: numbers, told, written, plan, process, refused
    value: str
    base: str = ""  # overrides of both runs
    first: str = ""  # overrides of a run in the same folder before them, if any
    ranks: int = 1


def numbers(value: object, base: str = "", **more: Any) -> Case:
    return Case("numbers", str(value), base, **more)


ROPE = "model.position=rope model.tie_embeddings=false"
EVALUATED = "data.valid={corpus} train.eval_every=1 train.eval_batches=1"
SAVES = "train.steps=4 checkpoint.every=1"
MUP = "model.parametrization=mup"
TENSOR, PIPELINE, DATA, CONTEXT = (
    "parallel.tensor=2",
    "parallel.pipeline=2",
    "parallel.data=2",
    "parallel.context=2",
)
FSDP = f"{DATA} engine.kind=fsdp"
LATENT = "model.bias=false model.position=rope model.kv_rank=8 model.plain_size=8 model.value_size=8"
EXPERTS = "model.bias=false model.num_experts=4"
MUON = "optim.kind=muon train.precision=fp64"

CASES: dict[str, Case] = {
    "model.block": Case("refused", "other"),
    "model.num_layers": numbers(3),
    "model.hidden_size": numbers(64),
    "model.num_heads": numbers(2),
    "model.num_kv_heads": numbers(2),
    "model.head_size": numbers(16),
    "model.ffn_size": numbers(64),
    "model.vocab_size": numbers(66),
    "model.norm": numbers("rmsnorm"),
    "model.norm_offset": numbers("true", "model.bias=false"),
    "model.norm_place": numbers("both"),
    "model.branches": numbers("parallel"),
    "model.embedding_norm": numbers("true"),
    "model.zero_init": numbers("true"),
    "model.activation": numbers("gelu_erf"),
    "model.position": numbers("rope"),
    "model.max_positions": Case("plan", "32"),
    "model.rope_theta": numbers(500, ROPE),
    "model.rope_scaling": numbers('{"type":"linear","factor":2}', ROPE),
    "model.window_rope_theta": numbers(500, f"{ROPE} model.window=3"),
    "model.rotary_share": numbers(0.5, ROPE),
    "model.nope_every": numbers(2, ROPE),
    "model.norm_eps": numbers(1e-2),
    "model.bias": numbers("false"),
    "model.qkv_bias": numbers("false"),
    "model.output_bias": numbers("false"),
    "model.qk_norm": numbers("true"),
    "model.qk_norm_heads": numbers("all", "model.qk_norm=true"),
    "model.attention_scale": numbers(0.1),
    "model.window": numbers(3),
    "model.global_every": numbers(2, "model.window=3"),
    "model.window_schedule": numbers("[[1,2]]", "model.window=3"),
    "model.attention_cap": numbers(0.01),
    "model.attention_sinks": numbers("true"),
    "model.attention_gate": numbers("headwise"),
    "model.logit_cap": numbers(0.1),
    "model.embedding_scale": numbers(2),
    "model.residual_scale": numbers(2),
    "model.logit_scale": numbers(2),
    "model.tie_embeddings": numbers("false"),
    "model.head_bias": numbers("true"),
    "model.dropout": numbers(0.1),
    "model.attention": numbers("sdpa", "model.attention=eager"),
    "model.kernels": Case("refused", "triton"),
    "model.chunked_loss": numbers("true"),
    "model.z_loss": numbers(0.01),
    "model.init_std": numbers(0.1),
    "model.parametrization": Case("refused", "up"),
    "model.base_width": numbers(64, f"{MUP} model.base_width=16"),
    "model.base_head_size": numbers(16, f"{MUP} model.base_width=16"),
    "model.base_layers": numbers(4, f"{MUP} model.base_width=16"),
    "model.kv_rank": numbers(12, LATENT),
    "model.q_rank": numbers(8, LATENT),
    "model.plain_size": numbers(12, LATENT),
    "model.value_size": numbers(12, LATENT),
    "model.num_experts": numbers(4, "model.bias=false"),
    "model.experts_per_token": numbers(1, EXPERTS),
    "model.expert_ffn_size": numbers(8, EXPERTS),
    "model.shared_experts": numbers(1, EXPERTS),
    "model.first_dense": numbers(1, EXPERTS),
    "model.experts_every": numbers(2, EXPERTS),
    "model.router_scores": numbers("sigmoid", EXPERTS),
    "model.router_normalised": numbers("false", EXPERTS),
    "model.router_scale": numbers(2, EXPERTS),
    "model.expert_groups": numbers(2, f"{EXPERTS} model.groups_per_token=1"),
    "model.groups_per_token": numbers(2, f"{EXPERTS} model.expert_groups=2"),
    "model.capacity_factor": numbers(0.5, EXPERTS),
    "model.router_balance": numbers("sequence", EXPERTS),
    "model.balance_coefficient": numbers(1, f"{EXPERTS} model.router_balance=global"),
    "model.router_z_loss": numbers(1, EXPERTS),
    "model.router_bias": Case("refused", "false", f"{EXPERTS} model.router_bias_rate=1"),
    "model.router_bias_rate": numbers(1, EXPERTS),
    "parallel.expert": Case("told", "2", f"{EXPERTS} {DATA}", ranks=2),
    "parallel.expert_tensor": Case("told", "1", f"{EXPERTS} {TENSOR}", ranks=2),
    "parallel.expert_halves": Case("told", "true", f"{EXPERTS} {DATA} parallel.expert=2", ranks=2),
    "parallel.tensor": Case("told", "2", ranks=2),
    "parallel.pipeline": Case("told", "2", ranks=2),
    "parallel.data": Case("refused", "2"),
    "parallel.context": Case("told", "2", ranks=2),
    "parallel.context_method": Case("told", "ring", f"{CONTEXT} parallel.context_method=gather", ranks=2),
    "parallel.sequence": Case("told", "true", TENSOR, ranks=2),
    "parallel.schedule": Case("told", "gpipe", PIPELINE, ranks=2),
    "parallel.chunks": Case(
        "told", "3", f"{PIPELINE} model.num_layers=6 parallel.schedule=interleaved", ranks=2
    ),
    "parallel.backend": Case("refused", "nccl"),
    "parallel.shared_memory": Case("process", "false", TENSOR, ranks=2),
    "parallel.timeout_seconds": Case("process", "77", DATA, ranks=2),
    "parallel.hang_seconds": Case("process", "10", DATA, ranks=2),
    "parallel.heartbeat_seconds": Case("process", "10", DATA, ranks=2),
    "train.steps": numbers(2),
    "train.seq_len": numbers(8),
    "train.micro_batch_size": Case("told", "1"),
    "train.global_batch_size": numbers(4),
    "train.batch_ramp": numbers("[[2,4]]"),
    "train.precision": numbers("fp64"),
    "train.recompute": Case("plan", "full"),
    "train.offload_activations": Case("plan", "true"),
    "train.seed": numbers(1),
    "train.device": Case("refused", "cuda"),
    "train.deterministic": Case("process", "true"),
    "train.eval_every": Case("written", "1", "data.valid={corpus}"),
    "train.eval_batches": Case("told", "2", EVALUATED),
    "optim.kind": numbers("sgd"),
    "optim.lr": numbers(1e-3),
    "optim.min_lr": numbers(1e-3, "optim.warmup_steps=0 optim.decay_steps=2"),
    "optim.warmup_steps": numbers(1),
    "optim.warmup": numbers("log"),
    "optim.warmup_lr": numbers(1e-3),
    "optim.decay_steps": numbers(9, "optim.warmup_steps=0"),
    "optim.schedule": numbers("constant", "optim.warmup_steps=0"),
    "optim.lag": numbers("[1,1]"),
    "optim.weight_decay": numbers(0.5),
    "optim.groups": numbers('[{"match":["*"],"lr":1e-3}]'),
    "optim.grad_clip": numbers(0.1),
    "optim.beta1": numbers(0.5),
    "optim.beta2": numbers(0.5),
    "optim.eps": numbers(1e-3),
    "optim.momentum": numbers(0.5, "optim.kind=sgd"),
    "optim.muon_momentum": numbers(0.5, MUON),
    "optim.muon_nesterov": numbers("false", MUON),
    "optim.muon_steps": numbers(3, MUON),
    "optim.muon_scale": numbers("original", MUON),
    "optim.muon_precision": numbers("bf16", MUON),
    "optim.muon_heads": numbers("apart", MUON),
    "optim.muon_adamw_lr": numbers(1e-3, MUON),
    "optim.lion_beta1": numbers(0.5, "optim.kind=lion"),
    "optim.lion_beta2": numbers(0.5, "optim.kind=lion"),
    "optim.slow_beta": numbers(0.5, "optim.kind=ademamix optim.slow_warmup=2"),
    "optim.slow_alpha": numbers(2, "optim.kind=ademamix"),
    "optim.slow_warmup": numbers(0, "optim.kind=ademamix"),
    "optim.free_beta1": numbers(0.5, "optim.kind=schedule_free"),
    "optim.free_beta2": numbers(0.5, "optim.kind=schedule_free"),
    "optim.free_eps": numbers(1e-3, "optim.kind=schedule_free"),
    "optim.soap_beta1": numbers(0.5, "optim.kind=soap"),
    "optim.soap_beta2": numbers(0.5, "optim.kind=soap"),
    "optim.soap_eps": numbers(1e-3, "optim.kind=soap"),
    "optim.soap_adamw_lr": numbers(1e-3, "optim.kind=soap"),
    "optim.ema": Case("plan", "0.9"),
    "data.document_mask": numbers("true", "model.attention=sdpa"),
    "data.packing": numbers("best_fit", "data.document_mask=true"),
    "data.train": numbers("{other}"),
    "data.valid": Case("written", "{corpus}", "train.eval_batches=1"),
    "data.tokenizer": Case("refused", "nowhere.model"),
    "checkpoint.every": Case("written", "1"),
    "checkpoint.last": Case("written", "false"),
    "checkpoint.keep": Case("written", "3", SAVES),
    "checkpoint.keep_every": Case("written", "1", SAVES),
    "checkpoint.best": Case("refused", "true"),
    "checkpoint.resume": numbers("{first}/run/checkpoints/step_00000001", "checkpoint.resume=never"),
    "checkpoint.weights": numbers("{first}/run/checkpoints/step_00000001"),
    "engine.kind": Case("told", "fsdp", DATA, ranks=2),
    "engine.config": Case("refused", "{}"),
    "engine.shard_optimizer": Case("told", "true", DATA, ranks=2),
    "engine.shard_size": Case("plan", "2", "parallel.data=4 engine.kind=fsdp", ranks=4),
    "engine.reshard": Case("plan", "false", FSDP, ranks=2),
    "engine.cpu_offload": Case("plan", "true", FSDP, ranks=2),
    "engine.bucket_mib": Case("told", "0.01", DATA, ranks=2),
    "engine.reduce_dtype": Case("told", "bf16", DATA, ranks=2),
    "engine.compression": Case("told", '{"kind":"int8"}', DATA, ranks=2),
    "cpu.keep_memory": Case("process", "false"),
    "cpu.onednn": Case("process", "false"),
    "cpu.widen": Case("process", "false"),
    "log.dir": Case("written", "{other}"),
    "log.every": Case("written", "2"),
    "log.price_per_device_hour": Case("written", "2"),
    "log.tensorboard": Case("written", "true"),
    "log.statistics": Case("written", '{"every":1}'),
    "log.profile": Case("written", '{"steps":[1,2]}'),
}

# Where a short run cannot tell: why, and the test that can.
BATCHES = "tests/distributed/test_bad_batches.py"
SAVING = "tests/distributed/test_checkpoint_training.py"
ELSEWHERE = {
    "model.hf": (
        "a module of transformers in place of megacore's layers",
        "tests/distributed/test_plain_training.py::test_five_steps_are_those_of_the_loop_of_transformers",
    ),
    "model.hf_config": (
        "a module of transformers has another architecture",
        "tests/unit/test_hf_folder.py::test_a_checkpoint_is_of_one_architecture",
    ),
    "model.hf_revision": (
        "recorded when the hub is read",
        "tests/unit/test_hf_folder.py::test_a_hub_model_is_recorded_with_its_commit",
    ),
    "model.hf_version": (
        "the same numbers: it records which transformers built the module",
        "tests/unit/test_hf_folder.py::test_a_checkpoint_is_of_one_architecture",
    ),
    "model.source": (
        "a file of one's own",
        "tests/distributed/test_source.py::test_a_setting_changes_what_is_computed",
    ),
    "model.source_digest": (
        "of that file",
        "tests/distributed/test_source.py::test_an_edited_file_does_not_go_on",
    ),
    "train.compile": (
        "the same numbers",
        "tests/distributed/test_compile.py::test_blocks_are_one_graph_in_training_and_one_in_validation",
    ),
    "optim.spike_threshold": (
        "a spike needs many steps before it",
        f"{BATCHES}::test_a_spike_is_skipped_and_its_threshold_decides",
    ),
    "optim.max_skips": ("only bad batches show it", f"{BATCHES}::test_too_many_in_a_row_are_gone_around"),
    "optim.max_rollbacks": ("only bad batches show it", f"{BATCHES}::test_too_many_in_a_row_are_gone_around"),
    "checkpoint.async": (
        "the same files, later",
        f"{SAVING}::test_an_update_waits_until_what_it_changes_is_copied",
    ),
    "checkpoint.mirror": (
        "whoever starts a run attaches it",
        "tests/distributed/test_mirror.py::test_the_second_copy_is_used",
    ),
    "checkpoint.on_failure": (
        "only a full disk shows it",
        f"{SAVING}::test_one_ranks_full_disk_ends_or_spares_the_run_on_all",
    ),
    "engine.reduce_levels": (
        "needs two machines",
        "tests/distributed/test_links.py::test_sums_are_right_and_alike",
    ),
    "log.figures": (
        "TensorBoard's files are not opened here",
        "tests/unit/test_logs.py::test_tensorboard_forgets_what_is_done_again_and_no_more",
    ),
    "log.wandb": (
        "a library that need not be installed",
        "tests/unit/test_wandb.py::test_wandb_has_the_figures_of_metrics_jsonl",
    ),
    "log.prometheus_port": (
        "only who asks the port sees it",
        "tests/unit/test_prometheus.py::test_a_run_is_served",
    ),
}


@dataclass
class Told(Listener):
    """All that a run tells its listeners."""

    heard: list[str] = field(default_factory=list)

    def on_action_begin(self, action: Action) -> None:
        self.heard.append(str(action))

    def on_collective(self, operation: Operation) -> None:
        group = operation.group
        sizes = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in operation.tensors]
        self.heard.append(f"{operation.name} {sizes} over {group.name} ")


class MallocInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    NAMES = (
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
        "keepcost",
    )
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


class Guard(Guardians):
    """Those of every run, but for a failure, which would end the worker."""

    def failed(self, error: BaseException, mesh: Mesh | None) -> None:
        self.close()

    @property
    def seconds(self) -> str:
        """How long a host or a rank may be silent."""
        return str([watcher and watcher.seconds for watcher in (self.heartbeats, self.watchdog)])


def process() -> list[str]:
    """How this process is set up: products, formats, freed memory, determinism."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    before = mallinfo().hblks
    block = torch.empty(64 << 20, dtype=torch.uint8)
    mapped = f"{mallinfo().hblks - before} blocks mapped for {block.nbytes} bytes"
    onednn = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return [
        mapped,
        onednn,
        str(sorted(map(str, cpu.WIDENED))),
        str(torch.are_deterministic_algorithms_enabled()),
    ]


def run_of_its_own(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """A run in a process of its own, as on a processor on which oneDNN's products stay exact."""
    cpu.EXACT = inf  # with AMX they round to bf16, and the setting would be taken back
    return run(config_path, overrides)


def run(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """A rank's run, and what can be seen of it but for what it writes."""
    told, place = Told(), place_from_environment()
    seen: dict[str, Any] = {"told": told.heard, "refused": ""}
    cpu.emulated_formats = lambda: {torch.bfloat16}  # type: ignore[assignment]  (as on a processor that has none of its own)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            config = run_of(config_path, *overrides, world=place.world_size)
            seen["plan"] = str(rank_memory(config))
            inputs, device = Inputs(config, place.rank), take_device(config, place)
            guard = Guard(config, place, device)
            with joined(config, place, device, guard) as mesh:
                mesh.listeners.add(told, *callbacks_of(config, place, device))
                trainer_of(config, mesh, inputs).run()
                seen["process"] = [*process(), guard.seconds, str(mesh.timeout), mesh.describe()]
        except Exception as error:
            seen["refused"] = f"{type(error).__name__} {error}"
    return seen


def written(folder: Path) -> list[str]:
    """The files of a folder, without their times, and which figures of which steps the
    run has logged there.
    """
    files = [
        re.sub(r"tfevents.*", "tfevents", str(path.relative_to(folder)))
        for path in folder.rglob("*")
        if path.is_file()
    ]
    logs = [line for path in folder.rglob("metrics.jsonl") for line in lines(path.parent)]
    return sorted(files) + [f"{line.get('step')} {sorted(line)} {line.get('skipped')}" for line in logs]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config and two corpora, and the run of which `checkpoint.resume` and
    `checkpoint.weights` may speak.
    """
    folder = tmp_path_factory.mktemp("keys")
    write_corpus(folder, "other", seed=1)
    train = {"steps": 3, "precision": "fp32", "deterministic": False, "compile": False}
    write_config(
        folder,
        write_corpus(folder, tokens=200),
        model={"num_layers": 2},
        train=train,
        log={"every": 1, "tensorboard": False},
    )
    return folder


@pytest.fixture(scope="module")
def seen(corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, Any]]]:
    """What can be seen of a run with these overrides; each is made once."""
    pool = Pool()

    @cache
    def see(overrides: str, ranks: int, apart: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        names = {"corpus": corpora / "corpus", "other": corpora / "other", "first": corpora}
        texts = [
            f"log.dir={folder}/run",
            *re.sub(r"\{(corpus|other|first)\}", lambda name: str(names[name[1]]), overrides).split(),
        ]
        if apart:  # settings of a process outlive a run
            own = Pool()
            found = own.run(ranks, run_of_its_own, str(corpora / "config.json"), texts)[0]
            own.close()
        else:
            found = pool.run(ranks, run, str(corpora / "config.json"), texts)[0]
        logged = lines(folder / "run") if (folder / "run/metrics.jsonl").exists() else []
        found["numbers"] = json.dumps(
            [[line["loss"], line["grad_norm"]] for line in logged if "loss" in line]
        )
        found["written"] = written(folder)
        return found

    pool.run(1, run, str(corpora / "config.json"), [f"log.dir={corpora}/run", "train.steps=1"])
    yield see
    pool.close()


@pytest.mark.parametrize("key", CASES)
def test_a_key_changes_something(key: str, seen: Callable[..., dict[str, Any]]) -> None:
    """A key that nothing reads promises what does not happen."""
    case = CASES[key]
    apart = case.kind == "process"
    before, after = (
        seen(case.base, case.ranks, apart),
        seen(f"{case.base} {key}={case.value}", case.ranks, apart),
    )
    assert before[case.kind] != after[case.kind]
    if case.kind != "refused":
        assert (before["refused"], after["refused"]) == ("", "")
    elif after["refused"].startswith(ConfigError.__name__):
        assert key in after["refused"] or key.split(".")[1] in after["refused"]


@pytest.mark.parametrize("kind", ["numbers", "told", "written", "plan", "process", "refused"])
def test_a_run_that_is_repeated_changes_nothing(kind: str, seen: Callable[..., dict[str, Any]]) -> None:
    """Else every key would seem to change something."""
    apart = kind == "process"
    for ranks, overrides in ((1, ""), (2, DATA)):
        assert seen(overrides, ranks, apart)[kind] == seen(f"{overrides} train.steps=3", ranks, apart)[kind]


def test_every_key_has_its_case() -> None:
    """A new key comes with what it changes, or with a reason and the test that shows
    what a short run cannot.
    """
    assert sorted([*CASES, *ELSEWHERE]) == sorted(DEFAULTS)
    for key, (_, test) in ELSEWHERE.items():
        path, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(), key
