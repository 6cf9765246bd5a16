"""What values that a config leaves open are, where others decide."""

import json
from math import prod
from typing import Any

from megacore.config.parallel import CHUNKS
from megacore.config.schema import Config
from megacore.distributed.axes import AXES
from megacore.files import read_text
from megacore.optimizers.ademamix import AdEMAMix

BUCKET_MIB, PART_MIB = 25.0, 4.0  # of a gradient bucket, and at least of each data rank's part of it


def derive(config: Config, name: str, world_size: int) -> dict[str, Any]:
    """Derives values from others, by dotted key. `name` is the config file's name without its ending."""
    model, parallel = config.model, config.parallel
    derived: dict[str, Any] = {}
    if model.num_kv_heads is None:
        derived["model.num_kv_heads"] = model.num_heads
    if model.head_size is None and model.hidden_size % model.num_heads == 0:
        derived["model.head_size"] = model.hidden_size // model.num_heads
    if model.attention_scale is None and (head_size := model.head_size or derived.get("model.head_size")):
        head_size += 0 if model.kv_rank is None else model.plain_size
        derived["model.attention_scale"] = (
            head_size**-0.5 * ((model.base_head_size or head_size) / head_size) ** 0.5
        )
    if model.qkv_bias is None:
        derived["model.qkv_bias"] = model.bias
    if model.output_bias is None:
        derived["model.output_bias"] = model.bias
    if model.max_positions is None:
        derived["model.max_positions"] = config.train.seq_len
    if model.ffn_size is None:
        gated = -(-8 * model.hidden_size // 3)
        derived["model.ffn_size"] = -(-gated // 64) * 64 if model.gated else 4 * model.hidden_size
    if model.num_experts is not None and model.expert_ffn_size is None:
        derived["model.expert_ffn_size"] = model.ffn_size or derived["model.ffn_size"]
    if model.num_experts is not None and model.router_bias is None:
        derived["model.router_bias"] = model.router_bias_rate > 0
    if parallel.chunks is None and parallel.schedule != "auto":
        derived["parallel.chunks"] = chunks_of(config)
    if parallel.data == "auto":
        derived["parallel.data"] = max(1, world_size // parallel.ranks_besides_data)
    if config.engine.bucket_mib is None:
        # A ring sends a data rank's part of a bucket at a time: of a fixed size it would shrink with more
        # ranks until latency rules.
        others = prod(getattr(parallel, axis.title) for axis in AXES if axis.tokens and axis.title != "data")
        ranks = derived.get("parallel.data", parallel.data) * others
        derived["engine.bucket_mib"] = max(BUCKET_MIB, PART_MIB * ranks)
    if config.optim.decay_steps is None:
        # A run cut short (train.steps=20) may end within its warmup.
        steps, warmup = config.train.steps, config.optim.warmup_steps
        derived["optim.decay_steps"] = (
            max(1, min(steps // 10, steps - warmup)) if config.optim.schedule == "wsd" else max(steps, warmup)
        )
    kinds = {config.optim.kind, *(entry.kind for entry in config.optim.groups)}
    if AdEMAMix.name in kinds and config.optim.model_dump()["slow_warmup"] is None:
        derived["optim.slow_warmup"] = config.train.steps
    if config.log.dir is None:
        derived["log.dir"] = f"runs/{name}"
    return derived


def chunks_of(config: Config) -> int:
    """How many chunks a rank has if the config leaves it open."""
    schedule = config.parallel.schedule
    if schedule.startswith("file:"):
        try:
            return max(1, len(json.loads(read_text(schedule.removeprefix("file:")))["placement"][0]))
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            return 1  # whoever reads the plan says what is wrong with it
    return CHUNKS[schedule]
