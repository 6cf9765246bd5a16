"""Counts the floating-point operations of a model from its config, and knows the peaks of devices.

Notation: h hidden size, f feed-forward size, s sequence length, V vocabulary, L layers, a = query heads × head size (usually h),
k = key/value heads × head size.
A product of [m, k] by [k, n] is 2·m·n·k operations. All counts are per token unless they say otherwise.
"""

import re
from dataclasses import dataclass

from megacore.config.schema import Config, resolved
from megacore.plan.choices import attention_of

# Elementwise operations of embedding and loss. They matter only for splitting layers over stages.
EMBEDDING_OPS_PER_FEATURE = 2  # gather, add the position
LOSS_OPS_PER_LOGIT = 3  # subtract the maximum, exponentiate, sum


def attention_sizes(config: Config) -> tuple[int, int]:
    """The features of all query heads, and those of all key or value heads."""
    return config.model.num_heads * config.head_size, config.kv_heads * config.head_size


def attention_flops(config: Config, causal: bool) -> float:
    """Forward operations of scores and weighted values: 2·s·a each; half of both if only the causal triangle is counted.

    Grouping key/value heads changes neither, because every query head still meets s keys.
    """
    return 4 * config.train.seq_len * attention_sizes(config)[0] * (0.5 if causal else 1.0)


def block_flops(config: Config, causal: bool) -> float:
    """Forward operations of one transformer block.

    2·h·(a + 2k) for query, key and value, 2·a·h for the output projection, 2·h·f for each of the two (gelu) or three (swiglu)
    feed-forward products, and `attention_flops`. Norms, activations and residuals are not products, and not counted.
    """
    h, f, (a, k) = config.model.hidden_size, resolved(config.model.ffn_size), attention_sizes(config)
    ffn_products = 3 if config.model.activation == "swiglu" else 2
    return 2 * h * (a + 2 * k) + 2 * a * h + ffn_products * 2 * h * f + attention_flops(config, causal)


def head_flops(config: Config) -> float:
    """Forward operations of the LM head: 2·h·V, tied or not. (The embedding is a lookup and has none.)"""
    return 2 * config.model.hidden_size * config.model.vocab_size


def flops_per_token(config: Config, causal: bool) -> float:
    """Model FLOPs of training on one token: 3 × (L blocks + LM head).

    Three, because the backward of a product is two products of the same size: one for the input's gradient, one for the
    weight's. Attention counts the whole s × s square, or with `causal` the half that a causal model needs. Recomputation
    and the optimizer are not counted (this is the numerator of MFU, not of HFU). With full recomputation
    and `causal=False` the blocks run 4 times instead of 3, and a batch of B sequences costs the published
    96·B·s·L·h²·(1 + s/6h + V/16Lh) (Narayanan et al. 2021).
    """
    return 3 * (config.model.num_layers * block_flops(config, causal) + head_flops(config))


@dataclass(frozen=True)
class Cost:
    """Operations a token, forward and backward (recomputation is part of the backward)."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, count: float) -> "Cost":
        return Cost(self.forward * count, self.backward * count)


def layer_cost(config: Config) -> Cost:
    """The operations that one block really executes, with recomputation. SDPA skips the masked half of attention."""
    sdpa = attention_of(config) == "sdpa"
    forward = block_flops(config, causal=sdpa)
    return Cost(forward, 2 * forward + recomputed_flops(config, causal=sdpa))


def recomputed_flops(config: Config, causal: bool) -> float:
    """Forward operations that the backward of one block executes a second time, by `train.recompute`.

    PyTorch stops when it has recomputed what backward needs, so a product whose result is not kept is not repeated: with `full` the
    last product of the block (the published formulas count it), with `selective` attention's second product. SDPA keeps no scores, so
    `selective` repeats no product for it. What SDPA's own backward recomputes is not counted, as is usual.
    """
    model = config.model
    if config.train.recompute == "full":
        return block_flops(config, causal) - 2 * model.hidden_size * resolved(model.ffn_size)
    if config.train.recompute == "selective" and attention_of(config) != "sdpa":
        return attention_flops(config, causal) / 2
    return 0.0


def embedding_cost(config: Config) -> Cost:
    """The cost of the embedding on the first stage: little elementwise work."""
    work = float(EMBEDDING_OPS_PER_FEATURE * config.model.hidden_size)
    return Cost(work, work)


def head_cost(config: Config) -> Cost:
    """The cost of LM head and loss on the last stage. They are never recomputed."""
    product, loss = head_flops(config), LOSS_OPS_PER_LOGIT * config.model.vocab_size
    return Cost(product + loss, 2 * product + loss)


# Peak operations a second of one device, dense (datasheets often print twice that, for 2:4 sparsity), fp16 and bf16 with
# fp32 accumulation, fp32 without TF32, fp64 on tensor cores where they have it. A precision that is not listed is unknown.
DEVICE_PEAKS: dict[str, dict[str, float]] = {
    # NVIDIA Tesla V100 datasheet (SXM2); no bf16
    "v100": {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12},
    # NVIDIA T4 datasheet
    "t4": {"fp16": 65e12, "fp32": 8.1e12},
    # NVIDIA A100 datasheet, the same for 40 and 80 GB, SXM and PCIe
    "a100": {"fp16": 312e12, "bf16": 312e12, "fp32": 19.5e12, "fp64": 19.5e12},
    # NVIDIA A40 datasheet
    "a40": {"fp16": 149.7e12, "bf16": 149.7e12, "fp32": 37.4e12},
    # NVIDIA L4 datasheet (242 sparse)
    "l4": {"fp16": 121e12, "bf16": 121e12, "fp32": 30.3e12},
    # NVIDIA L40 and L40S datasheets
    "l40": {"fp16": 181.05e12, "bf16": 181.05e12, "fp32": 90.5e12},
    "l40s": {"fp16": 362.05e12, "bf16": 362.05e12, "fp32": 91.6e12},
    # NVIDIA Ampere GA102 and Ada architecture whitepapers (GeForce halves the rate with fp32 accumulation)
    "rtx 3090": {"fp16": 71e12, "bf16": 71e12, "fp32": 35.6e12},
    "rtx 4090": {"fp16": 165.2e12, "bf16": 165.2e12, "fp32": 82.6e12},
    # NVIDIA H100 datasheet (SXM: 1979 sparse; PCIe: 1513 sparse; NVL: 1671 sparse), H200 and GH200 likewise
    "h100": {"fp16": 989.5e12, "bf16": 989.5e12, "fp32": 67e12, "fp64": 67e12},
    "h100 pcie": {"fp16": 756.5e12, "bf16": 756.5e12, "fp32": 51e12, "fp64": 51e12},
    "h100 nvl": {"fp16": 835.5e12, "bf16": 835.5e12, "fp32": 60e12, "fp64": 60e12},
    "h200": {"fp16": 989.5e12, "bf16": 989.5e12, "fp32": 67e12, "fp64": 67e12},
    "h200 nvl": {"fp16": 835.5e12, "bf16": 835.5e12, "fp32": 60e12, "fp64": 60e12},
    "gh200": {"fp16": 989.5e12, "bf16": 989.5e12, "fp32": 67e12, "fp64": 67e12},
    # NVIDIA HGX B200 datasheet, an eighth of the board (36 PFLOP/s sparse)
    "b200": {"fp16": 2250e12, "bf16": 2250e12, "fp32": 75e12, "fp64": 37e12},
    # AMD Instinct MI300X datasheet, matrix operations
    "mi300x": {"fp16": 1307.4e12, "bf16": 1307.4e12, "fp32": 163.4e12, "fp64": 163.4e12},
}

# Names of `torch.cuda.get_device_name()`, which must match as a whole: a laptop's "RTX 4090 Laptop GPU" or a slice
# "A100-SXM4-80GB MIG 1g.10gb" is another device, with another peak.
DEVICE_NAMES: dict[str, str] = {
    r"tesla v100-sxm2-(16|32)gb": "v100",
    r"(tesla )?t4": "t4",
    r"a100-(sxm4|pcie)-(40|80)gb|a100 80gb pcie": "a100",
    r"h100 80gb hbm3": "h100",
    r"gh200 480gb": "gh200",
    r"amd instinct mi300x( oam)?": "mi300x",
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """The dense peak in operations a second of a device, by torch's name or that of `DEVICE_PEAKS`. None if unknown: never a guess."""
    name = device_name.lower().strip().removeprefix("nvidia ").removeprefix("geforce ")
    known = next((key for pattern, key in DEVICE_NAMES.items() if re.fullmatch(pattern, name)), name)
    return DEVICE_PEAKS.get(known, {}).get(precision)
