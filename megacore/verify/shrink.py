"""Makes a config small enough to prove on two cores, and keeps what could break: ratios, remainders, ties, features."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from megacore.config import Config, load
from megacore.config.load import flatten, resolve
from megacore.config.schema import resolved
from megacore.data.indexed import IndexedWriter
from megacore.verify.layouts import Layout

HEAD_SIZE = 4
SEQ_LEN = 16
LAYERS = 4  # where the model has as many: blocks may differ by their index
MICROBATCHES = 8  # of the global batch, at least: a pipeline of four stages fills up and empties


def load_whole(path: str, overrides: list[str]) -> Config:
    """The user's config, resolved for one process. Raises `ConfigError` for what is wrong with it."""
    return load(path, [*overrides, *Layout("one").overrides(), "parallel.backend=auto", "train.device=cpu"]).config


def shrink(user: Config, layouts: list[Layout], steps: int, precision: str) -> dict[str, dict[str, Any]]:
    """The small config's sections, of which only what differs from the defaults.

    `layouts` are those that the user's config allows. Kept: every kind and flag of the model, grouping of heads, whether
    sizes divide by the tensor ranks and layers by the stages, ties, biases, dropout, schedule, recomputation, the
    optimizer's settings. Changed: sizes, and what would hide a difference: clipping is always active, the learning rate is
    there from the first step, and weights are as large as gives activations of the user's size.
    """
    model, train = user.model, user.train
    assert model.ffn_size is not None
    # What every layout divides.
    tensor = math.lcm(*(layout.tensor for layout in layouts))
    tokens = math.lcm(*(layout.tensor for layout in layouts if layout.sequence))
    rounds = 2 * math.lcm(*(layout.data for layout in layouts))  # two microbatches a rank: accumulation is seen everywhere
    stages = max(layout.pipeline for layout in layouts)

    # Two key/value heads a rank, if there are: with one, a rank's number is as good as that of its first head.
    kv_heads = tensor * min(user.kv_heads // tensor, 2)
    heads = kv_heads * min(model.num_heads // user.kv_heads, 4)
    head_size = min(user.head_size, HEAD_SIZE)
    width = model.num_heads * user.head_size
    hidden = heads * head_size if model.hidden_size == width else max(8, round(model.hidden_size / width * heads * head_size))
    ffn = max(tensor, -(-round(model.ffn_size / model.hidden_size * hidden) // tensor) * tensor)
    micro_batch = min(train.micro_batch_size, 2)
    seq_len = min(train.seq_len, SEQ_LEN)
    while micro_batch * seq_len % tokens:
        seq_len += 1
    # Rows enough for each of t ranks to have some: ceil(vocab / t) may leave none below t (t − 1).
    rows = tensor * max(tensor, -(-64 // tensor))
    small: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": min(model.num_layers, max(stages + (model.num_layers % stages > 0), LAYERS)),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_size": head_size,
            "hidden_size": hidden,
            "ffn_size": ffn,
            "vocab_size": min(model.vocab_size, rows + model.vocab_size % tensor),
            "max_positions": seq_len + (8 if user.max_positions > train.seq_len else 0),
            "attention_scale": resolved(model.attention_scale) * (user.head_size / head_size) ** 0.5,
            "init_std": model.init_std * (model.hidden_size / hidden) ** 0.5,
            "attention": "eager" if model.attention == "fused" and precision == "fp64" else model.attention,
            "kernels": "auto" if precision == "fp64" else model.kernels,
        },
        "train": {
            "steps": steps,
            "seq_len": seq_len,
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch * rounds * -(-MICROBATCHES // rounds),
            "precision": precision,
            "device": "cpu",
            "compile": False,
            "eval_every": 0,
            "eval_batches": 0,
        },
        "optim": {
            "warmup_steps": 0,
            "lr": user.optim.lr or 1e-3,
            "min_lr": user.optim.min_lr,
            "decay_steps": steps - 1 if user.optim.schedule == "wsd" else 2 * steps,
            "grad_clip": 0.1 if user.optim.grad_clip else 0.0,
        },
        "data": {"train": None, "valid": None, "tokenizer": None},
        "checkpoint": {"every": 0, "last": False, "resume": "never", "weights": None},
        "engine": {"bucket_mib": 0.01},  # several buckets, so that their order matters
        "parallel": {"timeout_seconds": 60.0, "tensor": 1, "pipeline": 1, "data": "auto", "sequence": False, "backend": "auto"},
        "log": {"dir": None, "every": 1, "tensorboard": False, "prometheus_port": None},
    }
    defaults = flatten(Config().model_dump(mode="json", by_alias=True))
    values = flatten(user.model_dump(mode="json", by_alias=True)) | flatten(small)
    # Only what differs, and not what would be derived: another version of the code, which may not know every key, can then
    # read it too.
    written = {key: value for key, value in values.items() if key in defaults and value != defaults[key]}
    for key in [key for key in written if defaults[key] is None]:
        rest = {k: v for k, v in written.items() if k != key}
        if flatten(resolve(sections_of(rest), [], "verify", 1).config.model_dump(mode="json", by_alias=True))[key] == written[key]:
            written = rest
    return sections_of(written)


def sections_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{"model.num_layers": 2} to {"model": {"num_layers": 2}}."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return sections


def write_case(folder: Path, sections: dict[str, dict[str, Any]]) -> Path:
    """Writes the small config and its corpora into `folder`; returns the config's path.

    The tokens are uniform, so that every row of the vocabulary is met; the validation set ends within a sample, and
    within a batch.
    """
    path = folder / "verify.json"
    path.write_text(json.dumps(sections), encoding="utf-8")
    config = load(str(path)).config
    batch, seq_len = config.train.global_batch_size, config.train.seq_len
    rng = np.random.default_rng(0)
    lengths = {"train": (config.train.steps + 1) * batch * seq_len + 1, "valid": (batch + 3) * seq_len + 1 + seq_len // 3}
    for name, length in lengths.items():
        with IndexedWriter(str(folder / name), np.uint16) as writer:
            for document in np.array_split(rng.integers(0, config.model.vocab_size, length), 5):
                writer.write(document.astype(np.uint16))
                writer.end_document()
    data = {name: str(folder / name) for name in lengths}
    path.write_text(json.dumps(sections | {"data": sections.get("data", {}) | data}), encoding="utf-8")
    return path
