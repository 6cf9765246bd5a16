"""A tree of files of which some are none, and the bodies of scripts: what tests of bad inputs share.

A row is a script, its arguments, in which `@name` is a path in the tree, and part of the one line that must
be said.
"""

import json
import os
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file

from configs.forks import speculate
from launch import (
    checkpoint,
    coordinates,
    drill,
    evaluate,
    generate,
    plan,
    preflight,
    prepare,
    pretrain,
    samples,
    supervise,
    sweep,
    verify,
)
from launch.kubernetes import render
from megacore.checkpoint.manifest import sealed, unsealed
from megacore.distributed.rank_info import RankInfo
from tests.conversion import random_run
from tests.pool import PATIENCE

Row = tuple[str, tuple[str, ...], str]
SECONDS, BYTES = int(PATIENCE), 4 << 30  # of a row, and of memory beyond what this process has
SCRIPTS: dict[str, Callable[[list[str]], Any]] = {
    "checkpoint": checkpoint.run,
    "coordinates": coordinates.main,
    "drill": drill.run,
    "plan": plan.run,
    "prepare": prepare.run,
    "samples": samples.run,
    "speculate": speculate.main,
    "supervise": supervise.run,
    "sweep": sweep.run,
    "try": import_module("launch.try").run,
    "verify": verify.main,
    "render": render.run,
    "evaluate": lambda argv: evaluate.run(argv, RankInfo()),
    "generate": lambda argv: generate.run(argv, RankInfo()),
    "preflight": lambda argv: preflight.run(argv, RankInfo()),
    "pretrain": lambda argv: pretrain.run(argv, RankInfo()),
}

MODEL = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "vocab_size": 256}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
NANOGPT = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "vocab_size": 16, "bias": False}
LEVEL = {"link": "x", "ranks": None, "bytes_per_second": 1.0}
ZERO = [
    "engine.kind=deepspeed",
    f"engine.config={Path(__file__).parents[1] / 'configs/deepspeed/zero2.json'}",
]
MMIDIDX = struct.Struct("<9sQBQQ")


def write_tree(tree: Path) -> None:
    """A run, a corpus and its config, and beside them what is none."""
    text = tree / "text.txt"
    text.write_text("To be, or not to be: that is the question.\n" * 100)
    prepare.run(
        ["--input", str(text), "--output", str(tree / "data"), "--tokenizer", "bytes", "--workers", "1"]
    )
    train = {"steps": 2, "seq_len": 16, "global_batch_size": 4, "precision": "fp32"}
    data = {"train": str(tree / "data"), "tokenizer": "bytes"}
    (tree / "config.json").write_text(
        json.dumps({"model": MODEL, "train": train, "data": data, "log": {"dir": str(tree / "new")}})
    )
    random_run(tree / "run", data | {"valid": str(tree / "data")}, **MODEL)
    write_paths(tree)
    write_texts(tree)
    write_corpora(tree)
    write_models(tree)


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
    (tree / "twice.json").write_text('{"train": {"steps": 3, "steps": 4}}')
    (tree / "twice_section.json").write_text('{"train": {"steps": 3}, "train": {"seq_len": 4}}')
    (tree / "deep.jsonl").write_text('{"text": "a"}\n' + '{"text": ' * 100_000 + "\n")
    (tree / "digits.jsonl").write_text('{"text": ' + "1" * 5000 + "}\n")
    answer = {"role": "assistant", "content": "b"}
    for name, messages in (
        ("role", [{"role": "bot", "content": "a"}, answer]),
        ("empty", [answer | {"content": ""}]),
        ("none", []),
        ("unanswered", [{"role": "user", "content": "a"}]),
        ("right", [answer]),
    ):
        (tree / f"chat_{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    right = (tree / "chat_right.jsonl").read_bytes()
    (tree / "chat_broken.jsonl").write_bytes(right + b'{"messages": [\n' + right)
    (tree / "plain.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    (tree / "broken.jinja").write_text("{% for m in messages %}")
    (tree / "fails.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    for name, latency in (("null", None), ("text", "x"), ("negative", -1.0), ("nan", float("nan"))):
        (tree / f"links_{name}.json").write_text(
            json.dumps({"name": "x", "levels": [LEVEL | {"latency_seconds": latency}]})
        )
    (tree / "links_call.json").write_text(
        json.dumps({"name": "x", "call_seconds": -1, "levels": [LEVEL | {"latency_seconds": 0.0}]})
    )
    hosts = {
        "two": "localhost slots=1\nlocalhost slots=2\n",
        "none": "# none\n",
        "silent": "a.invalid slots=2\nb.invalid slots=2\n",
    }
    hosts |= {
        "zero": "localhost slots=0\n",
        "digits": f"localhost slots={'9' * 5000}\n",
        "one": "localhost slots=1\n",
    }
    hosts |= {
        "some_zero": "localhost slots=1\nb.invalid slots=0\n",
        "garbage": "localhost slots=1\nb.invalid 4\n",
    }
    for name, lines in hosts.items():
        (tree / f"hosts_{name}").write_text(lines)


def write_corpora(tree: Path) -> None:
    """Token files that are none."""
    for name in (
        "pipe_bin",
        "pipe_idx",
        "side_folder",
        "side_pipe",
        "side_deep",
        "mask_short",
        "mask_pipe",
        "mask_long",
        "mask_other",
        "ends_negative",
        "ends_beyond",
    ):
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
        content = json.loads(unsealed(manifest.read_bytes()))
        edit(content["state"])
        manifest.write_bytes(sealed(content))
        return manifest

    for name, sizes in (
        ("layers", {"num_layers": 10**8}),
        ("more_layers", {"num_layers": 10**4}),
        ("wide", {"hidden_size": 2**62, "head_size": 2**60}),
        ("positions", {"max_positions": 2**31}),
    ):
        run_with(
            f"run_{name}",
            lambda state, sizes=sizes: (state["model"].update(sizes), state["config"]["model"].update(sizes)),
        )
    run_with("run_bare", lambda state: state["config"].pop("data"))
    run_with("run_text", lambda state: state["config"].update(model="x"))
    run_with("run_nul", lambda state: state["config"]["data"].update(tokenizer="a\0b"))
    for name in ("folder", "link", "pipe"):
        manifest = run_with(f"run_{name}", lambda state: None)
        manifest.unlink()
        manifest.mkdir() if name == "folder" else manifest.symlink_to(
            "nowhere"
        ) if name == "link" else os.mkfifo(manifest)
    for name, change in (
        ("layers", {"num_hidden_layers": 10**4}),
        ("kinds", {"layer_types": 3}),
        ("kinds2", {"layer_types": [[1]]}),
        ("wide", {"hidden_size": 10**23}),
        ("nan", {"rms_norm_eps": float("nan")}),
        ("theta", {"rope_theta": 10**400}),
    ):
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


def words_of(row: Row) -> str:
    return f"{row[0]} {' '.join(row[1])}"[:100]


def rows(*tables: list[Row]) -> list[Any]:
    """Rows as parameters of a test."""
    return [pytest.param(*row, id=words_of(row)) for table in tables for row in table]
