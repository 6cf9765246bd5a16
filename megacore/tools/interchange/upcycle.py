"""Makes a mixture of experts from a dense run's checkpoint (Komatsuzaki et al. 2022, "Sparse Upcycling")."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint import Layout, Reader, locate
from megacore.checkpoint.read import FREE_MODEL_KEYS
from megacore.checkpoint.weights import (
    DOCUMENTS_BOS,
    SPECIAL_TOKENS,
    WEIGHTS,
    check_weights,
    recorded_sections,
    weights_of,
)
from megacore.config import Config
from megacore.config.experts import ExpertSettings
from megacore.distributed.shard import Shard, shard_of
from megacore.errors import CheckpointError, ConfigError
from megacore.model.initial import initialise
from megacore.model.stage import whole_model
from megacore.rng import normal_runs
from megacore.tools.checkpoint_weights import choose_weights
from megacore.tools.interchange.check_conversion import (
    TOLERANCE,
    check_layers,
    compared,
    own_logits,
    sample_of,
)
from megacore.tools.interchange.export_hf import config_of
from megacore.tools.interchange.folder import CONFIG, aside, write_json
from megacore.tools.interchange.import_model import FILE_BYTES, GENTLE
from megacore.tools.interchange.stream import first_buffers, save_stream
from megacore.tools.settings.load import parse_override, resolve, set_value

# of the section `train`
KEPT = ("steps", "seq_len", "micro_batch_size", "global_batch_size", "precision", "seed")
ROUTER, EXPERTS, DENSE = ".feed_forward.router.", ".feed_forward.experts.", ".feed_forward."


def upcycle(
    path: Path,
    output: Path,
    overrides: list[str],
    noise: float,
    weights: str | None,
    compare_layers: int | None,
    say: Callable[[str], None],
) -> None:
    """Write the dense checkpoint at `path` (see `checkpoint.locate`) as the new run `output`, whose
    feed-forward layers are mixtures.

    Each expert is a copy of the layer that was there, and the router is drawn with `train.seed`. As long as
    the copies are equal and a token's weights add up to 1, the model computes what the dense one does. Only
    one logical tensor is in memory at a time, until the comparison of the logits, which holds one whole model
    (cut to `compare_layers`).

    Args:
        overrides: `section.key=value`, of the new run's config; `model.num_experts` is one of them.
        noise: deviation of what is added to each expert's weights, as a part of the deviation of those that
            were copied.
        weights: see `choose_weights`.
        say: takes a line for the user.

    Raises:
        UserError: whatever is wrong; `output` is then as it was.
    """
    reader = Reader(locate(path))
    choose_weights(reader, weights)
    dense = config_of(reader)
    if dense.model.num_experts is not None:
        raise CheckpointError(str(reader.path), "its model has experts already", "a dense model's checkpoint")
    check_weights(reader, dense)
    recorded = recorded_sections(reader)
    sections: dict[str, Any] = {
        "model": recorded["model"],
        "train": {key: recorded["train"][key] for key in KEPT if key in recorded["train"]},
        "data": recorded["data"],
        "optim": dict(GENTLE),
        "checkpoint": {"weights": str(output)},
        "log": {"dir": f"{output}_trained"},
    }
    sections = deepcopy(sections)
    for override in overrides:
        set_value(sections, *parse_override(override))
    config = resolve(deepcopy(sections), [], output.name, 1).config
    check_alike(dense, config)
    check_layers(compare_layers, config)
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    shards = {name: shard_of(parameter) for name, parameter in whole_model(config, "meta").named_parameters()}
    buffers = first_buffers(config)
    with aside(output) as partial:
        settings = config.model_dump(mode="json", by_alias=True)
        write_json(partial / CONFIG, sections | {"model": settings["model"]})
        layout: Layout = {f"{WEIGHTS}{name}": (dtype, shard.global_shape) for name, shard in shards.items()}
        layout |= {name: (value.dtype, tuple(value.shape)) for name, value in buffers.items()}
        origin = {"path": str(reader.path), "architecture": "megacore, dense"}
        state = {
            "samples": 0,
            "seed": config.train.seed,
            "model": settings["model"],
            "config": settings,
            "weights_of": origin,
        }
        for key in (SPECIAL_TOKENS, DOCUMENTS_BOS):
            if key in reader.state:
                state[key] = reader.state[key]

        def tensors() -> Iterator[Tensor]:
            for name, shard in shards.items():
                yield tensor_of(reader, name, shard, config.train.seed, noise, dtype)
            yield from buffers.values()

        written = Reader(save_stream(partial / "checkpoints", 0, layout, tensors(), state, FILE_BYTES))
        mixtures = sum(name.endswith(f"{ROUTER}weight") for name in shards)
        say(f"{reader.path}: {mixtures} feed-forward layers, {config.model.num_experts} copies of each")
        say(compare(dense, reader, config, written, noise, compare_layers))
    say(f"wrote {output}, whose {CONFIG} trains it on")


def check_alike(dense: Config, config: Config) -> None:
    """Raises `ConfigError` unless the two models differ in experts alone, each of them as large as
    the layer of which it is a copy.
    """
    model = config.model
    if model.num_experts is None:
        raise ConfigError(
            "model.num_experts",
            "how many experts there are to be is not said",
            "model.num_experts=8 behind the options",
        )
    before, after = (of.model_dump() for of in (dense.model, model))
    free = FREE_MODEL_KEYS - {"source", "max_positions"} | ExpertSettings.model_fields.keys()
    for key, value in after.items():
        if key not in free and value != before[key]:
            wrong = f"is {value}, and {before[key]} in the dense model, whose weights are taken"
            raise ConfigError(f"model.{key}", wrong, f"{before[key]}: the two differ in experts alone")
    if model.expert_ffn_size != dense.model.ffn_size:
        wrong = f"an expert is a copy of the layer of {dense.model.ffn_size} features"
        raise ConfigError("model.expert_ffn_size", wrong, str(dense.model.ffn_size))
    if model.shared_experts:
        raise ConfigError(
            "model.shared_experts", "what all tokens go through would be added to what the copies make", "0"
        )


def tensor_of(reader: Reader, name: str, shard: Shard, seed: int, noise: float, dtype: torch.dtype) -> Tensor:
    """A logical weight of the mixture: a new one, copies of the dense model's, or that one."""
    out = torch.empty(shard.global_shape, dtype=dtype)
    if ROUTER in name:
        initialise({name: (out, shard)}, {name: shard}, seed, dtype)
        return out
    block, copied, own = name.partition(EXPERTS)
    if not copied:
        return reader.read(weights_of(reader, name), Shard(shard.global_shape)).to(dtype)
    shape = shard.global_shape[1:]
    own, _, bias = own.partition("_")
    dense = reader.read(weights_of(reader, f"{block}{DENSE}{own}.{bias or 'weight'}"), Shard(shape))
    out.copy_(dense)
    if noise:
        flat, std = out.view(-1), noise * float(dense.std())
        for first, values in normal_runs((seed, name, "noise"), flat.numel(), std, flat.numel()):
            flat[first : first + values.numel()] += values
    return out


def compare(
    dense: Config, reader: Reader, config: Config, written: Reader, noise: float, layers: int | None
) -> str:
    """Compares the logits of the two models on a few random tokens, and returns the finding.

    Raises:
        CheckpointError: they differ, where the copies are equal and their weights add up to 1.
    """
    whole = dense.model.num_layers
    dense, rows = sample_of(dense, layers)
    config, _ = sample_of(config, layers, dense.train.precision)
    before, after = own_logits(dense, reader, None, rows), own_logits(config, written, None, rows)
    difference, most = (
        float((after - before).abs().max() / before.abs().max()),
        TOLERANCE[dense.train.precision],
    )
    finding = f"{compared(rows, layers, whole, dense.train.precision)}, differ by {difference:.1e}"
    if noise or not config.model.router_normalised or config.model.router_scale != 1.0:
        return (
            f"{finding} of the largest from the dense model's, by the noise or by weights that do not "
            "add up to 1"
        )
    if not difference <= most:  # nor NaN
        raise CheckpointError(str(written.path), finding, f"at most {most:g}; nothing was kept")
    return f"{finding} of the largest from the dense model's (at most {most:g})"
