"""What a setting's `auto` stands for, by device, precision and sizes.

A run asks once, before its first step (`resolved_auto`).

The rule for attention is measured (benchmarks/results/performance_attention.md).
"""

from typing import Any

from megacore.config.implied import attends_in_parts, attention_of, compiles
from megacore.config.precision import ELEMENT_BYTES
from megacore.config.schema import Config
from megacore.tools.choices.context_method import DEVICE, METHODS, Divided, Method, fastest, rates
from megacore.tools.settings.model import unexchanged

# tokens of a chunked loss, as `kernels.linear_cross_entropy` divides them
SHORTEST_CHUNK, CHUNK_ON_CPU, TILE = 1024, 128, 64


def context_method_of(config: Config, device: str | None = None) -> Method:
    """How context ranks attend: `parallel.context_method`, or what its `auto` chooses: the
    fastest by an estimate for a device.

    The device is `cpu` or a GPU's name; without one it is that of `attention_of`.
    """
    method, t, train = config.parallel.context_method, config.parallel.tensor, config.train
    if method != "auto":
        return method
    heads, kv_heads, element = (
        config.model.num_heads // t,
        config.kv_heads // t,
        ELEMENT_BYTES[train.precision],
    )
    sizes = train.seq_len, heads, kv_heads, config.attended_size
    own = Divided(config.parallel.context, t, config.rank_tokens, *sizes, element)
    found = rates(device or ("cpu" if train.device == "cpu" else DEVICE), train.precision)
    return fastest(own, found, again=train.recompute == "full", exchanges=unexchanged(config) is None)


def resolved_auto(
    config: Config, device: str, name: str, before: dict[str, Any] | None = None
) -> dict[str, str]:
    """What a run's `auto` stands for on a device, its type and its name, by dotted key: for
    attention, and how context ranks attend.

    `before`: the recorded sections of the run that goes on; what it chose is kept where the other settings
    allow it.
    """
    found = dict[str, str]()
    if config.model.attention == "auto":
        kept = _recorded(before, "model", "attention")
        possible = ("sdpa",) if attends_in_parts(config) else ("sdpa", "eager")
        found["model.attention"] = kept if kept in possible else attention_of(config, device)
    if config.parallel.context_method == "auto" and config.parallel.context > 1:
        kept = _recorded(before, "parallel", "context_method")
        methods = [method for method in METHODS if method != "ulysses" or unexchanged(config) is None]
        found["parallel.context_method"] = (
            kept if kept in methods else context_method_of(config, "cpu" if device == "cpu" else name)
        )
    return found


def _recorded(sections: dict[str, Any] | None, section: str, key: str) -> Any:
    """A value of recorded sections, which may be any JSON; None without one."""
    own = (sections or {}).get(section)
    return own.get(key) if isinstance(own, dict) else None


def loss_chunk(config: Config) -> int:
    """Tokens whose logits a chunked loss makes at a time: a quarter of a microbatch's, though no
    fewer than make long products.
    """
    quarter = -(-config.rank_tokens // (4 * TILE)) * TILE
    return max(quarter, CHUNK_ON_CPU if config.train.device == "cpu" else SHORTEST_CHUNK)


def fuses(config: Config) -> bool:
    """Whether the model runs its own fused kernels on the device that a prediction is for:
    `model.kernels`, or what its `auto` chooses.
    """
    kernels, train = config.model.kernels, config.train
    return kernels == "triton" or (
        kernels == "auto" and train.device != "cpu" and train.precision != "fp64" and not compiles(config)
    )


def one_chunk(config: Config) -> bool:
    """Whether a rank can hold one chunk of the model only: DeepSpeed wraps one module."""
    return config.engine.kind == "deepspeed"
