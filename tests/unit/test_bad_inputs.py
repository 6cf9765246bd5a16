"""What a clumsy or hostile user may give a script: one line that names it, at once, and nothing written.

Scripts end with status 2 and the line of a `UserError`; here their bodies are called, and must raise one. What hangs, takes memory
without end or raises anything else fails. A row is a script, its arguments, in which `@name` is a path in `tree`, and part of the line.
"""

import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file

from launch import checkpoint, drill, evaluate, generate, plan, preflight, prepare, pretrain, samples, supervise, verify
from launch.kubernetes import render
from megacore.checkpoint.manifest import MANIFEST, sealed, unsealed
from megacore.distributed.place import Place
from megacore.errors import UserError
from tests.conversion import random_run

SECONDS, BYTES = 60, 4 << 30  # of a row, and of memory beyond what this process has
SCRIPTS: dict[str, Callable[[list[str]], Any]] = {
    "checkpoint": checkpoint.run, "drill": drill.run, "plan": plan.run, "prepare": prepare.run, "samples": samples.run,
    "supervise": supervise.run, "verify": verify.main, "render": render.run,
    "evaluate": lambda argv: evaluate.run(argv, Place()), "generate": lambda argv: generate.run(argv, Place()),
    "preflight": lambda argv: preflight.run(argv, Place()), "pretrain": lambda argv: pretrain.run(argv, Place()),
}  # fmt: skip

NOBODY = 65534  # a user id

MODEL = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "vocab_size": 256}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 16,
}  # fmt: skip
NANOGPT = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "vocab_size": 16, "bias": False}
LEVEL = {"link": "x", "ranks": None, "bytes_per_second": 1.0}
ZERO = ["engine.kind=deepspeed", f"engine.config={Path(__file__).parents[2] / 'configs/deepspeed/zero2.json'}"]
MMIDIDX = struct.Struct("<9sQBQQ")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a corpus and its config, and beside them what is none."""
    tree = tmp_path_factory.mktemp("tree")
    text = tree / "text.txt"
    text.write_text("To be, or not to be: that is the question.\n" * 100)
    prepare.run(["--input", str(text), "--output", str(tree / "data"), "--tokenizer", "bytes", "--workers", "1"])
    train = {"steps": 2, "seq_len": 16, "global_batch_size": 4, "precision": "fp32"}
    data = {"train": str(tree / "data"), "tokenizer": "bytes"}
    (tree / "config.json").write_text(json.dumps({"model": MODEL, "train": train, "data": data, "log": {"dir": str(tree / "new")}}))
    random_run(tree / "run", data | {"valid": str(tree / "data")}, **MODEL)
    write_paths(tree)
    write_texts(tree)
    write_corpora(tree)
    write_models(tree)
    return tree


def write_paths(tree: Path) -> None:
    """What stands where a plain file or a folder should."""
    (tree / "folder.png").mkdir()
    (tree / "file").write_text("x")
    (tree / "binary").write_bytes(random.Random(0).randbytes(3000))
    os.mkfifo(tree / "pipe")
    (tree / "zero").symlink_to("/dev/zero")
    (tree / "loop").symlink_to("loop")
    (tree / "broken").symlink_to("nowhere")


def write_texts(tree: Path) -> None:
    """JSON that is none, or says what it should not; and hostfiles."""
    (tree / "deep.json").write_text("[" * 200_000)
    (tree / "latin.json").write_bytes(b'{"model": "\xe9"}')
    (tree / "deep.jsonl").write_text('{"text": "a"}\n' + '{"text": ' * 100_000 + "\n")
    (tree / "digits.jsonl").write_text('{"text": ' + "1" * 5000 + "}\n")
    answer = {"role": "assistant", "content": "b"}
    for name, messages in (("role", [{"role": "bot", "content": "a"}, answer]), ("empty", [answer | {"content": ""}]), ("none", []),
                           ("unanswered", [{"role": "user", "content": "a"}]), ("right", [answer])):  # fmt: skip
        (tree / f"chat_{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    right = (tree / "chat_right.jsonl").read_bytes()
    (tree / "chat_broken.jsonl").write_bytes(right + b'{"messages": [\n' + right)
    (tree / "chat_mark.jsonl").write_bytes(b"\xef\xbb\xbf" + right)
    (tree / "plain.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    (tree / "broken.jinja").write_text("{% for m in messages %}")
    (tree / "fails.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    for name, latency in (("null", None), ("text", "x"), ("negative", -1.0), ("nan", float("nan"))):
        (tree / f"links_{name}.json").write_text(json.dumps({"name": "x", "levels": [LEVEL | {"latency_seconds": latency}]}))
    (tree / "links_call.json").write_text(json.dumps({"name": "x", "call_seconds": -1, "levels": [LEVEL | {"latency_seconds": 0.0}]}))
    hosts = {"two": "localhost slots=1\nlocalhost slots=2\n", "none": "# none\n", "silent": "a.invalid slots=2\nb.invalid slots=2\n"}
    hosts |= {"zero": "localhost slots=0\n", "digits": f"localhost slots={'9' * 5000}\n", "one": "localhost slots=1\n"}
    hosts |= {"some_zero": "localhost slots=1\nb.invalid slots=0\n", "garbage": "localhost slots=1\nb.invalid 4\n"}
    for name, lines in hosts.items():
        (tree / f"hosts_{name}").write_text(lines)


def write_corpora(tree: Path) -> None:
    """Token files that are none."""
    for name in ("pipe_bin", "pipe_idx", "side_folder", "side_pipe", "side_deep", "mask_short", "mask_pipe", "mask_long", "mask_other",
                 "ends_negative", "ends_beyond"):  # fmt: skip
        for suffix in (".bin", ".idx"):
            shutil.copy(tree / f"data{suffix}", tree / f"{name}{suffix}")
    for file in ("pipe_bin.bin", "pipe_idx.idx", "side_pipe.json"):
        (tree / file).unlink(missing_ok=True)
        os.mkfifo(tree / file)
    (tree / "mask_short.mask.bin").write_bytes(b"\1\0\1")
    (tree / "mask_long.mask.bin").write_bytes(bytes((tree / "data.bin").stat().st_size + 1))
    (tree / "mask_other.mask.bin").write_bytes(b"\1\7" * ((tree / "data.bin").stat().st_size // 2))
    for name, last in (("ends_negative", -5), ("ends_beyond", 10**12)):  # the last document's end
        (tree / f"{name}.idx").write_bytes((tree / "data.idx").read_bytes()[:-8] + struct.pack("<q", last))
    os.mkfifo(tree / "mask_pipe.mask.bin")
    (tree / "side_folder.json").mkdir()
    (tree / "side_deep.json").write_text("[" * 100_000)
    (tree / "endless.bin").write_bytes(b"\1\2")
    (tree / "endless.idx").write_bytes(MMIDIDX.pack(b"MMIDIDX\0\0", 1, 1, 2**63, 2**63))


def write_models(tree: Path) -> None:
    """Checkpoints, Hugging Face folders and nanoGPT files, each with something wrong."""

    def run_with(name: str, edit: Callable[[dict[str, Any]], object]) -> Path:
        shutil.copytree(tree / "run", tree / name)
        manifest = tree / name / "checkpoints/step_00000003/manifest.json"
        content = json.loads(unsealed(manifest.read_bytes())[1])
        edit(content["state"])
        manifest.write_bytes(sealed(content))
        return manifest

    for name, sizes in (
        ("layers", {"num_layers": 10**8}), ("more_layers", {"num_layers": 10**4}), ("wide", {"hidden_size": 2**62, "head_size": 2**60}),
    ):  # fmt: skip
        run_with(f"run_{name}", lambda state, sizes=sizes: (state["model"].update(sizes), state["config"]["model"].update(sizes)))
    run_with("run_bare", lambda state: state["config"].pop("data"))
    run_with("run_text", lambda state: state["config"].update(model="x"))
    run_with("run_nul", lambda state: state["config"]["data"].update(tokenizer="a\0b"))
    for name in ("folder", "link", "pipe"):
        manifest = run_with(f"run_{name}", lambda state: None)
        manifest.unlink()
        manifest.mkdir() if name == "folder" else manifest.symlink_to("nowhere") if name == "link" else os.mkfifo(manifest)
    for name, change in (
        ("layers", {"num_hidden_layers": 10**4}), ("kinds", {"layer_types": 3}), ("kinds2", {"layer_types": [[1]]}),
        ("wide", {"hidden_size": 10**23}), ("nan", {"rms_norm_eps": float("nan")}), ("theta", {"rope_theta": 10**400}),
    ):  # fmt: skip
        (tree / f"hf_{name}").mkdir()
        (tree / f"hf_{name}/config.json").write_text(json.dumps(LLAMA | change))
        save_file({"model.embed_tokens.weight": torch.zeros(31, 8)}, tree / f"hf_{name}/model.safetensors")
    shutil.copytree(tree / "hf_layers", tree / "hf_names")
    (tree / "hf_names/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    weights = {"transformer.wte.weight": torch.zeros(16, 8)}
    torch.save({"model": weights, "model_args": NANOGPT | {"n_layer": 10**4}}, tree / "nano_layers.pt")
    torch.save({"model": weights, "model_args": NANOGPT | {"n_embd": 10**23}}, tree / "nano_wide.pt")


class Late(BaseException):
    """No `OSError`, as `TimeoutError` is, which a script would take for a file that cannot be read."""


@contextmanager
def bounded() -> Iterator[None]:
    """Within, too much time or memory is an exception."""

    def late(number: int, frame: object) -> NoReturn:
        raise Late(f"not refused within {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, limits[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, previous)


def files_in(tree: Path) -> set[Path]:
    return {path for path in tree.rglob("*") if path.is_symlink() or not path.is_dir()}


def config(*words: str) -> tuple[str, ...]:
    return ("--config", "@config.json", *words)


EXPORT = ("export", "@run", "--format", "hf", "--output", "@out")
PLAIN = ("--template", "@plain.jinja")
TEXT = ("--input", "@text.txt", "--output", "@out/x", "--workers", "1", "--tokenizer")
SUPERVISED = ("launch/pretrain.py", "--config", "@config.json")
HUGE = "1" + "0" * 30

# Configs, which every script reads alike.
CONFIGS: list[tuple[str, tuple[str, ...], str]] = [
    *((script, (*before, "--config", f"@{name}", *after), f"config error: --config: cannot read @{name}: Not a plain file")
      for name in ("pipe", "zero") for script, before, after in (
          ("plan", (), ()), ("pretrain", (), ()), ("verify", (), ()), ("samples", (), ("--step", "1")), ("supervise", ("torchrun",), ()),
          ("drill", (), ("--fault", "kill:step=2")))),
    ("plan", ("--config", "@folder.png"), "cannot read @folder.png: Is a directory"),
    ("plan", ("--config", "@loop"), "cannot read @loop: Too many levels of symbolic links"),
    ("plan", ("--config", ""), "config error: --config: cannot read : No such file"),
    ("plan", ("--config", "@latin.json"), "@latin.json is not UTF-8 text"),
    ("plan", ("--config", "@deep.json"), "config error: --config: @deep.json cannot be read"),
    ("pretrain", config("train.steps=1" + "0" * 23), "config error: train.steps: 24 digits are more than any run needs"),
    ("pretrain", config(f"train.steps={2**53}", "train.global_batch_size=1024"), "samples cannot be counted in 64 bits (at most"),
    ("pretrain", config(f"model.hidden_size={HUGE}"), "config error: model.hidden_size: 31 digits"),
    ("pretrain", config("model.num_layers=1" + "0" * 400), "config error: model.num_layers: 401 digits"),
    ("plan", config(f"model.hidden_size={4 * 10**9}"), "tensor of 1.28e+20 elements (tensors of at most 2.81e+14)"),
    ("plan", config("train.seq_len=10000000000", "model.max_positions=10000000000"), "is 10,000,000,000 tokens (at most 2,147,483,648)"),
    ("plan", config("pipeline.schedule=gpipe"), "config error: pipeline.schedule: unknown key (did you mean parallel.schedule or"),
    ("plan", config("parallel.schedule=zb_h9"), "(1f1b or gpipe or interleaved or zb_h1 or"),
    ("plan", config("--world", "7", "parallel.tensor=2"), "= 6 ranks, but there are 7 (a multiple of tensor × pipeline = 2 ranks)"),
    ("pretrain", config("data.packing=best"), '"best" is not valid: input should be \'none\' or \'best_fit\' (none or best_fit)'),
    *((script, config(*words), f"config error: {line}") for script in ("plan", "pretrain") for words, line in (
        (("parallel.context=3",), "train.seq_len: 16 is not a multiple of 2 × parallel.context 6 (12 or 18 would be)"),
        (("parallel.context=two",), 'parallel.context: "two" is not valid: input should be a valid integer'),
        (("parallel.context=8", "parallel.context_method=ulysses"), "parallel.context_method: ulysses cannot deal 4 heads of a tensor ra"),
        (("parallel.context=2", "parallel.context_method=rings"), 'parallel.context_method: "rings" is not valid'),
        (("parallel.context=2", "engine.kind=deepspeed"), "parallel.context: the deepspeed engine counts a batch by its data ranks"),
        (("data.document_mask=maybe",), 'data.document_mask: "maybe" is not valid: input should be a valid boolean (true or false)'),
    )),
    ("pretrain", config('data.train=[[0,"@data"]]'), "config error: data.train: weight 0 is not valid: input should be greater than"),
    ("pretrain", config('data.train=[[1,"@data"],[1,3]]'), "config error: data.train: prefix 3 is not valid: input should be a valid str"),
    ("pretrain", config('data.train=[[1e-320,"@data"],[1,"@data"]]'), "config error: data.train: weight 1e-320 is not valid"),
    ("pretrain", config('data.train="a\\u0000b"'), "config error: data.train: holds a NUL"),
    ("pretrain", config('data.train=[[1,"a\\u0000b"]]'), "config error: data.train: holds a NUL"),
]  # fmt: skip

PATHS: list[tuple[str, tuple[str, ...], str]] = [
    ("pretrain", config('log.dir="a\\u0000b"'), "config error: log.dir: holds a NUL"),
    ("pretrain", config("log.dir=@" + "x" * 300), "config error: log.dir: cannot write in @xxx"),
    ("pretrain", config("log.dir=@file"), "config error: log.dir: cannot write in @file"),
    ("pretrain", config("log.dir=@loop/x"), "Too many levels of symbolic links"),
    ("pretrain", config("checkpoint.resume=@" + "x" * 300), "cannot be read: File name too long"),
    ("pretrain", config("checkpoint.weights=@" + "x" * 300), "cannot be read: File name too long"),
    ("pretrain", config("checkpoint.resume=@run_pipe"), "step_00000003: has no manifest.json, and no checkpoint before it is whole"),
    ("supervise", ("nosuch", *SUPERVISED, "log.dir=@file"), "config error: log.dir: cannot write in @file"),
    ("supervise", ("nosuch", *SUPERVISED, "log.dir=@" + "x" * 300), "File name too long"),
    ("plan", config("--plot", "@folder.png"), "config error: --plot: cannot write @folder.png: Not a plain file"),
    ("plan", config("--plot", "@folder.png/a.gantt"), "its ending names no image format"),
    ("plan", config("--plot", ""), "config error: --plot: cannot write"),
    ("plan", config("--dry-run", "0", "--plot", "@new.png", "--compare-schedules"), "--compare-schedules, --plot would have no effect"),
    ("plan", config("--search", "--world", "2", "--dry-run", "0"), "config error: --search: --dry-run would have no effect beside it"),
    ("plan", config("--search", "--world", "2", "--price", "2"), "config error: --price: money is that of a whole run (also --tokens"),
    ("plan", config("--tokens", "1e9"), "config error: --tokens: only a search reads it (also --search)"),
    ("plan", config("--dry-run", "0", "--world", "2", *ZERO), "config error: engine.kind: DeepSpeed asks for a real device"),
    ("plan", config("--dry-run", "0", "--world", "2", "engine.kind=fsdp", "engine.cpu_offload=true"), "config error: engine.cpu_offload"),
    ("plan", config("--dry-run", "9"), "config error: --dry-run: 9 is beyond the 1 ranks (ranks from 0 to 0, such as 0 or 0-0)"),
    ("plan", config("--plot", "@nowhere/a.png"), "No such file or directory"),
    ("plan", config("--plot", f"@{'x' * 252}.png"), "File name too long"),
    ("plan", config("--cluster", "@nowhere"), "config error: --cluster: @nowhere is not known, and cannot be read as a file: No such file"),
    ("plan", config("--cluster", "@pipe"), "@pipe is not known, and cannot be read as a file: Not a plain file"),
    *(("plan", config("--cluster", f"@links_{name}.json"), "is no cluster file") for name in ("null", "text", "negative", "nan", "call")),
    ("plan", config("--cluster", "@deep.json"), "@deep.json is not JSON"),
    ("plan", config("--calibrate", "@run"), "config error: --device: a step is predicted for a device (also --device"),
    ("plan", config("--device", "h100", "--cluster", "p5", "--compare-schedules"), "--compare-schedules: --cluster would have no effect"),
    ("samples", config("--step", "1", "--json", "@folder.png"), "config error: --json: cannot write @folder.png: Not a plain file"),
    ("samples", config("--step", "1", "--json", "@" + "x" * 300), "File name too long"),
    ("evaluate", ("--checkpoint", "@run", "--json", "@loop"), "Too many levels of symbolic links"),
    ("generate", ("--checkpoint", "@run", "--prompt-file", "@zero"), "data error: @zero: cannot be read: Not a plain file"),
    ("generate", ("--checkpoint", "@run", "--prompt-file", "@pipe"), "data error: @pipe: cannot be read: Not a plain file"),
    ("generate", ("--checkpoint", "@run", "--tokenizer", ""), "cannot be read: No such file"),
    ("drill", config("--fault", "kill:step=2", "--output", "@file"), "config error: --output: cannot write in @file"),
    ("drill", config("--fault", "kill:step=2", "--output", ""), "config error: --output: . is not usable"),
    ("checkpoint", ("info", "@" + "x" * 300), "cannot be read: File name too long"),
    ("checkpoint", (*EXPORT[:-1], "/"), "config error: --output: / is there already"),
    ("checkpoint", (*EXPORT[:-1], "@" + "x" * 300), "File name too long"),
    ("checkpoint", (*EXPORT, "--tokenizer", "@pipe"), "data error: @pipe: cannot be read: Not a plain file"),
]

FLEET = ("--probe", "touch @started", "deepspeed")

NUMBERS: list[tuple[str, tuple[str, ...], str]] = [
    ("plan", config("train.global_batch_size=2000000000"), "2,000,000,000 microbatches a step (at most 262,144: a larger train.micro_"),
    ("plan", config("train.global_batch_size=300000", "parallel.pipeline=2"), "300,000 microbatches a step on 2 stages (at most 131,072"),
    ("plan", config("parallel.pipeline=10000", "model.num_layers=10000"), "10000 stages are more than any run has (at most 1024)"),
    *((script, config("model.num_layers=1000000000000"), "model.num_layers: 1,000,000,000,000 layers are more than")
      for script in ("pretrain", "plan")),
    ("plan", config("train.global_batch_size=16384", "--plot", "@new.png"), "config error: --plot: 32,768 actions of a rank are more than"),
    ("samples", config("--step", "1:3000000", "train.steps=3000000"), "config error: --step: 1:3000000 has 12,000,000 samples"),
    ("samples", config("--prove", "train.global_batch_size=4000000000"), "4,000,000,000 microbatches a step"),
    *(("drill", config("--soak", value), f"config error: --soak: {float(value)} is not usable") for value in ("-1", "nan", "0", "inf")),
    *(("drill", config("--fault", "kill:step=2", "--ranks", value), f"config error: --ranks: {value} is") for value in ("0", "-1", HUGE)),
    ("drill", config("--fault", "kill:step=2", "--watch", "nan"), "config error: --watch: nan is not usable"),
    ("pretrain", config("parallel.heartbeat_seconds=0.1"), "config error: parallel.heartbeat_seconds: 0.1 is not valid"),
    ("pretrain", config("parallel.hang_seconds=1e300"), "config error: parallel.hang_seconds: 1e+300 is not valid"),
    ("drill", config(), "config error: --fault: neither a fault nor --soak is given"),
    ("drill", config("--fault", "kill:step=2", "--launcher", "torchrun '"), "config error: --launcher: `torchrun '` is no command"),
    ("drill", config("--fault", "kill:step=2", "--launcher", ""), "config error: --launcher: `` is no command: it is empty"),
    ("drill", config("--fault", "kill:step=2", "--launcher", "nosuch {ranks"), "config error: --launcher: there is no command nosuch"),
    ("drill", config("--fault", "hang:seconds=nan,step=2"), "its seconds are not usable"),
    ("drill", config("--fault", "kill:rank=0.5,step=2"), "kill:rank=0.5,step=2 is none"),
    *(("supervise", (f"--{option}", value, "nosuch", *SUPERVISED), f"config error: --{option}: {value} is not usable")
      for option, values in (("restarts", ["-1"]), ("backoff", ["-1.0", "nan", "inf"]), ("stall", ["nan", "0.0"]), ("spares", ["-1"]))
      for value in values),
    ("supervise", ("--spares", "1", "torchrun", *SUPERVISED), "config error: --spares: the command has no --hostfile"),
    ("supervise", ("--probe", "'", "deepspeed", "--hostfile", "@hosts_one", *SUPERVISED), "config error: --probe: ' is no command"),
    ("supervise", ("--probe", "", "deepspeed", "--hostfile", "@hosts_one", *SUPERVISED), "config error: --probe:  is no command: it is"),
    *(("supervise", ("--probe", "false {host}", "deepspeed", "--hostfile", f"@{name}", *SUPERVISED), f"config error: --hostfile: {line}")
      for name, line in (
          ("hosts_two", "@hosts_two names localhost twice"), ("hosts_zero", "@hosts_zero gives localhost no slots"),
          ("hosts_garbage", "@hosts_garbage has a line `b.invalid 4`"),
          ("hosts_digits", "@hosts_digits has a line `localhost slots=999"), ("binary", "@binary is not UTF-8 text"),
          ("pipe", "cannot read @pipe: Not a plain file"), ("hosts_silent", "no host answered: a.invalid, b.invalid"),
          ("hosts_none", "@hosts_none names no host"),
      )),
    *(("supervise", (*FLEET, *filters, "--hostfile", "@hosts_one", *SUPERVISED, *more), f"config error: {line}")
      for filters, more, line in (
          (("--exclude", "node9"), (), "--exclude: the hostfile does not name `node9` (hosts such as localhost)"),
          (("-e=localhost",), (), "--exclude: leaves no host"),
          (("--include=localhost:0",), (), "--include: `localhost:0` names single slots"),
          (("-i", "localhost", "-e", "localhost"), (), "--include: stands beside --exclude"),
          ((), ("parallel.tensor=2",), "--hostfile: its hosts have 1 slots, and the config needs 2 ranks (tensor 2 × pipeline 1 × data 1)"),
      )),
    *(("preflight", ("--hostfile", f"@hosts_{name}", *config(*more), "--ssh", "touch @started"), f"config error: {line}")
      for name, more, line in (
          ("two", (), "--hostfile: @hosts_two names localhost twice"),
          ("none", (), "--hostfile: @hosts_none names no host"),
          ("some_zero", (), "--hostfile: @hosts_some_zero gives b.invalid no slots"),
          ("garbage", (), "--hostfile: @hosts_garbage has a line"),
          ("nowhere", (), "--hostfile: cannot read @hosts_nowhere: No such file"),
          ("one", ("--exclude", "node9"), "--exclude: the hostfile does not name `node9`"),
          ("one", ("--port", "0"), "--port: 0 is no port"),
          ("silent", ("parallel.tensor=2", "parallel.data=4"), "--hostfile: its hosts have 4 slots, and the config needs 8 ranks"),
          ("silent", ("train.global_batch_size=6",), "train.global_batch_size: 6"),
      )),
    ("preflight", ("--hostfile", "@hosts_one", *config(), "--ssh", "'"), "config error: --ssh: ' is no command"),
    ("render", (*config("parallel.tensor=4"), "--nodes", "2", "--gpus", "1", "--image", "a", "--volume", "v"), "config error: parallel"),
    ("render", (*config(), "--nodes", "0", "--gpus", "1", "--image", "a", "--volume", "v"), "config error: --nodes: 0 is too few"),
]  # fmt: skip

CONTENTS: list[tuple[str, tuple[str, ...], str]] = [
    *(("pretrain", config(f"data.train=@data{file}"), f"data error: @data{file}: names one file, and a corpus has two (their prefix, ")
      for file in (".bin", ".idx")),
    *(("pretrain", config(f"data.train=@{name}"), f"data error: @{name}{file}: ") for name, file in (
        ("pipe_bin", ".bin"), ("pipe_idx", ".idx"), ("side_folder", ".json"), ("side_pipe", ".json"), ("side_deep", ".json"),
        ("endless", ".idx"), ("mask_short", ".mask.bin"), ("mask_pipe", ".mask.bin"), ("mask_long", ".mask.bin"),
        ("mask_other", ".mask.bin"))),
    *(("pretrain", config(f"data.train=@{name}", "data.document_mask=true"), f"data error: @{name}.idx: its documents do not follow one a")
      for name in ("ends_negative", "ends_beyond")),
    *(("prepare", ("--input", f"@{talk}", *TEXT[2:], "bytes", "--chat", *more), line) for talk, more, line in (
        ("chat_role.jsonl", PLAIN, "data error: @chat_role.jsonl: line 1 has the unknown role 'bot' in message 1 (one of system, "),
        ("chat_empty.jsonl", PLAIN, "data error: @chat_empty.jsonl: line 1 has an empty answer, message 1"),
        ("chat_none.jsonl", PLAIN, "data error: @chat_none.jsonl: line 1 has no list of messages"),
        ("chat_unanswered.jsonl", PLAIN, "line 1 has no answer: no message is of the role assistant"),
        ("chat_right.jsonl", ("--template", "@fails.jinja"), "line 1 makes @fails.jinja fail: roles must alternate"),
        ("chat_right.jsonl", ("--template", "@broken.jinja"), "data error: @broken.jinja: is no template: Unexpected end of template"),
        ("chat_right.jsonl", ("--template", "@pipe"), "data error: @pipe: cannot be read: Not a plain file"),
        ("chat_right.jsonl", (), "config error: --template: there is no chat template beside bytes"),
        ("chat_broken.jsonl", PLAIN, "data error: @chat_broken.jsonl: line 2 is not JSON (Expecting value)"),
        ("chat_mark.jsonl", PLAIN, "data error: @chat_mark.jsonl: line 1 is not JSON (Unexpected UTF-8 BOM"),
        ("deep.jsonl", PLAIN, "data error: @deep.jsonl: line 1 has no list of messages"),
        ("text.txt", PLAIN, "data error: @text.txt: holds no conversations"))),
    ("prepare", (*TEXT, "bytes", "--template", "@plain.jinja"), "config error: --template: only conversations have a template"),
    ("prepare", ("--input", "@chat_right.jsonl", *TEXT[2:], "bytes", "--chat", *PLAIN, "--text-key", "a"), "config error: --text-key: con"),
    ("prepare", ("--input", "@chat_right.jsonl", *TEXT[2:], "sentencepiece:300", "--chat"), "config error: --tokenizer: sentencepiece:300"),
    ("prepare", ("--input", "@deep.jsonl", *TEXT[2:], "bytes"), "data error: @deep.jsonl: line 2 has brackets nested too deep"),
    ("prepare", ("--input", "@digits.jsonl", *TEXT[2:], "bytes"), "@digits.jsonl: line 1 holds a number of too many digits"),
    ("prepare", ("--input", "@pipe", *TEXT[2:], "bytes"), "data error: @pipe: cannot be read: Not a plain file"),
    ("prepare", (*TEXT, "bites"), "data error: bites: cannot be read: No such file or directory (bytes, a FILE.model or a tok"),
    ("prepare", ("--input", "@text.txt", "--output", "/proc/x", "--tokenizer", "bytes"), "data error: /proc/x: cannot be written: "),
    ("prepare", (*TEXT, "@zero"), "data error: @zero: cannot be read: Not a plain file"),
    ("prepare", ("--input", "@text.txt", "--output", "@out/x", "--tokenizer", "bytes", "--workers", HUGE), "config error: --workers: "),
    *((script, (*words, f"@run_{name}", *more), line) for name, line in (
        ("layers", "config error: model.num_layers: 100,000,000 layers are"),
        ("more_layers", "too few for model.num_layers=10000")) for script, words, more in (
            ("generate", ("--checkpoint",), ()), ("evaluate", ("--checkpoint",), ()), ("checkpoint", ("export",), EXPORT[2:]))),
    *((script, ("--checkpoint", f"@run_{name}"), line) for script in ("generate", "evaluate") for name, line in (
        ("wide", "config error: model.hidden_size: 19 digits"), ("bare", "does not hold the run's config"),
        ("text", "does not hold the run's config"), ("nul", "config error: data.tokenizer: holds a NUL"))),
    *(("checkpoint", ("info", f"@run_{name}"), "none of its 1 checkpoints is whole; in the newest, step_00000003, ") for name in (
        "folder", "link", "pipe")),
    *(("checkpoint", ("import", f"@{path}", "--format", kind, "--output", "@out"), line) for path, kind, line in (
        ("hf_layers", "hf", "has 1 tensors, too few for 10000 layers"), ("hf_kinds", "hf", "layer_types is 3"),
        ("hf_kinds2", "hf", "layer_types has other layers"), ("hf_wide", "hf", "24 digits"), ("hf_nan", "hf", "model.norm_eps"),
        ("hf_theta", "hf", "model.rope_theta"), ("hf_names", "hf", "has no weight_map from tensors to files of this folder"),
        ("nano_layers.pt", "nanogpt", "has 1 tensors, too few for 10000 layers"), ("nano_wide.pt", "nanogpt", "24 digits"),
        ("pipe", "nanogpt", "checkpoint error: @pipe: cannot be read: Not a plain file"))),
]  # fmt: skip


def words_of(row: tuple[str, tuple[str, ...], str]) -> str:
    return f"{row[0]} {' '.join(row[1])}"[:100]


ROWS = [pytest.param(*row, id=words_of(row)) for row in CONFIGS + PATHS + NUMBERS + CONTENTS]


@pytest.mark.parametrize(("script", "arguments", "line"), ROWS)
def test_bad_input_is_one_line(
    script: str, arguments: tuple[str, ...], line: str, tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A traceback, silence, or a result that is none in place of one clear line."""
    monkeypatch.chdir(tree)
    before = files_in(tree)
    with bounded(), pytest.raises(UserError) as caught:
        SCRIPTS[script]([word.replace("@", f"{tree}/") for word in arguments])
    assert line.replace("@", f"{tree}/") in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", ""), "a script says more than the line, or begins before it looks"
    assert files_in(tree) == before
    shutil.rmtree(tree / "new", ignore_errors=True)  # of a supervisor that found nobody to start


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_one_line(tree: Path, tmp_path: Path) -> None:
    """The run's folder can be made there, and nothing in it be written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        (disk / "run").mkdir()
        with pytest.raises(OSError, match="No space"):
            (disk / "fill").write_bytes(bytes(1 << 17))
        for script, words in (("pretrain", []), ("supervise", ["nosuch"])):
            for folder in ("new", "run"):
                arguments = [*words, "--config", str(tree / "config.json"), f"log.dir={disk / folder}"]
                with bounded(), pytest.raises(UserError, match=rf"config error: log\.dir: cannot write in \S+/{folder}: No space left"):
                    SCRIPTS[script](arguments)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user for a moment")
@pytest.mark.parametrize("closed", ["", "checkpoints", "checkpoints/step_00000003", f"checkpoints/step_00000003/{MANIFEST}"])
def test_a_checkpoint_without_permission_is_one_line(closed: str, tree: Path) -> None:
    """It would be taken for a run without checkpoints, and training begin anew beside it."""
    checkpoint.run(["info", str(tree / "run")])  # imports what another user may not read
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copytree(tree / "run", run)
        Path(folder).chmod(0o755)
        (run / closed).chmod(0)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(UserError, match="Permission denied") as caught:
                checkpoint.run(["info", str(run)])
        finally:
            os.seteuid(0)
        (run / closed).chmod(0o755)
    assert "\n" not in str(caught.value)
