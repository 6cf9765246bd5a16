"""Maps our tensors to the names and layouts of peers: one `Mapped` for each of ours.

H query heads, k key/value heads, g = H / k, d head size, f feed-forward, h hidden:

| ours                     | shape              | GPT-2, `[in, out]`        | Llama, `[out,
    in]`                             |
|--------------------------|--------------------|---------------------------|------------------------------------------------|
| attention.qkv            | `[k, g + 2, d, h]` | attn.c_attn `[h, 3·H·d]`  | self_attn.q_proj `[H·d, h]`,
    k_proj, v_proj    |
| attention.query_norm     | `[d]`              |                           | self_attn.q_norm; key_norm is
    k_norm           |
| attention.output         | `[h, H·d]`         | attn.c_proj `[H·d, h]`    | self_attn.o_proj `[h,
    H·d]`                    |
| feed_forward.up          | `[f, h]`           | mlp.c_fc `[h,
    f]`         |                                                |
| feed_forward.up (swiglu) | `[2, f, h]`        |                           | mlp.gate_proj, mlp.up_proj `[f,
    h]`            |
| feed_forward.down        | `[h, f]`           | mlp.c_proj `[f, h]`       | mlp.down_proj `[h,
    f]`                         |
| norm1, norm2             | `[h]`              | ln_1, ln_2                | input_layernorm,
    post_attention_layernorm      |

Query head i uses key/value head i // g in both, and both turn feature j of a head together with feature j +
d/2, as we do.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from megacore.checkpoint.weights import WEIGHTS
from megacore.config import Config
from megacore.config.schema import resolved
from megacore.distributed.buffers import BUFFERS

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Mapped:
    """One logical tensor of ours, and the tensors that a peer stores for it.

    `join` and `split` are inverse, and keep the dtype.

    `peers` are the names that are written, with their prefix ("transformer.", "model."); files of old miss
    it: `stored_name`.
    """

    name: str  # in the model: "blocks.0.attention.qkv.weight"
    shape: Shape
    peers: dict[str, Shape]
    join: Callable[[dict[str, Tensor]], Tensor]  # theirs, by the names in `peers` → ours
    split: Callable[[Tensor], dict[str, Tensor]]  # ours → theirs, contiguous
    buffer: bool = False  # no parameter: in fp64 here, and in fp32 there, whatever weights are

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return f"{BUFFERS if self.buffer else WEIGHTS}{self.name}"

    def own(self, dtype: torch.dtype) -> torch.dtype:
        """Its dtype here, given that of weights."""
        return torch.float64 if self.buffer else dtype

    def theirs(self, dtype: torch.dtype) -> torch.dtype:
        """Its dtype in the peer's files."""
        return torch.float32 if self.buffer else dtype


def stored_name(peer: str, stored: Container[str]) -> str | None:
    """The name of `Mapped.peers` as `stored` has it, with or without the prefix; None
    where it has neither.
    """
    bare = peer.removeprefix("transformer.").removeprefix("model.")
    return next((name for name in (peer, bare) if name in stored), None)


def renamed(name: str, shape: Shape, peer: str) -> Mapped:
    """The same tensor under another name."""
    return Mapped(
        name, shape, {peer: shape}, lambda theirs: theirs[peer], lambda ours: {peer: ours.contiguous()}
    )


def transposed(name: str, shape: Shape, peer: str) -> Mapped:
    """A linear layer's weight ``[out, in]`` that the peer keeps as ``[in, out]``; a bias as it is."""

    def turn(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous()

    return Mapped(
        name, shape, {peer: shape[::-1]}, lambda theirs: turn(theirs[peer]), lambda ours: {peer: turn(ours)}
    )


def stacked(name: str, shape: Shape, peers: list[str]) -> Mapped:
    """``[n, …]`` of which the peer keeps each row under its own name."""
    shapes = dict.fromkeys(peers, shape[1:])

    def split(ours: Tensor) -> dict[str, Tensor]:
        return {peer: row.contiguous() for peer, row in zip(peers, ours, strict=True)}

    return Mapped(name, shape, shapes, lambda theirs: torch.stack([theirs[peer] for peer in peers]), split)


def grouped_qkv(name: str, shape: Shape, peers: list[str]) -> Mapped:
    """``[kv heads, group + 2, head, …]`` that the peer keeps as queries, keys and
    values, each ``[heads · head, …]``.
    """
    kv_heads, members, head, *rest = shape
    counts = dict(zip(peers, (members - 2, 1, 1), strict=True))
    shapes = {peer: (kv_heads * n * head, *rest) for peer, n in counts.items()}

    def join(theirs: dict[str, Tensor]) -> Tensor:
        rows = "(kv_heads n head) ... -> kv_heads n head ..."
        return torch.cat([rearrange(theirs[peer], rows, n=n, head=head) for peer, n in counts.items()], 1)

    def split(ours: Tensor) -> dict[str, Tensor]:
        parts = ours.split(list(counts.values()), 1)
        rows = "kv_heads n head ... -> (kv_heads n head) ..."
        return {peer: rearrange(part, rows).contiguous() for peer, part in zip(peers, parts, strict=True)}

    return Mapped(name, shape, shapes, join, split)


def fused_qkv(name: str, shape: Shape, peer: str, theirs: str = "... (three heads head)") -> Mapped:
    """``[heads, 3, head, …]`` that the peer keeps as ``[…, 3 · heads · head]``, or as
    the einops pattern `theirs` says.
    """
    heads, three, head, *rest = shape
    features = three * heads * head

    def join(stored: dict[str, Tensor]) -> Tensor:
        return rearrange(
            stored[peer], f"{theirs} -> heads three head ...", three=three, heads=heads
        ).contiguous()

    def split(ours: Tensor) -> dict[str, Tensor]:
        return {peer: rearrange(ours, f"heads three head ... -> {theirs}").contiguous()}

    return Mapped(
        name, shape, {peer: (features, *rest) if theirs.endswith("...") else (*rest, features)}, join, split
    )


def qkv_shape(config: Config) -> Shape:
    """Of the logical query-key-value bias; the weight has `hidden_size` behind it."""
    return (config.kv_heads, config.model.num_heads // config.kv_heads + 2, config.head_size)


def inputs_of(kind: str, size: int) -> Shape:
    """The last dim of a linear layer's weight, which its bias has not."""
    return (size,) if kind == "weight" else ()


def gpt2_tensors(config: Config) -> list[Mapped]:
    """A model with GPT-2's names and ``[in, out]`` weights."""
    return gpt2_like(config, transposed, fused_qkv)


def gpt2_like(
    config: Config, linear: Callable[[str, Shape, str], Mapped], qkv: Callable[[str, Shape, str], Mapped]
) -> list[Mapped]:
    """A model with GPT-2's names, whose linear layers, and of them that of queries, keys and
    values, are stored as the peer does.
    """
    model = config.model
    h, f, a = model.hidden_size, resolved(model.ffn_size), model.num_heads * config.head_size
    kinds = ("weight", "bias") if model.bias else ("weight",)
    tensors = [
        renamed("embedding.weight", (model.vocab_size, h), "transformer.wte.weight"),
        renamed("position", (config.max_positions, h), "transformer.wpe.weight"),
    ]
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for kind in kinds:
            tensors += [
                renamed(f"{ours}.norm1.{kind}", (h,), f"{theirs}.ln_1.{kind}"),
                qkv(
                    f"{ours}.attention.qkv.{kind}",
                    (*qkv_shape(config), *inputs_of(kind, h)),
                    f"{theirs}.attn.c_attn.{kind}",
                ),
                linear(
                    f"{ours}.attention.output.{kind}",
                    (h, *inputs_of(kind, a)),
                    f"{theirs}.attn.c_proj.{kind}",
                ),
                renamed(f"{ours}.norm2.{kind}", (h,), f"{theirs}.ln_2.{kind}"),
                linear(
                    f"{ours}.feed_forward.up.{kind}", (f, *inputs_of(kind, h)), f"{theirs}.mlp.c_fc.{kind}"
                ),
                linear(
                    f"{ours}.feed_forward.down.{kind}",
                    (h, *inputs_of(kind, f)),
                    f"{theirs}.mlp.c_proj.{kind}",
                ),
            ]
    tensors += [renamed(f"norm.{kind}", (h,), f"transformer.ln_f.{kind}") for kind in kinds]
    return tensors + lm_head(config)


def llama_tensors(config: Config) -> list[Mapped]:
    """A model with Llama's names: RMS norms, swiglu, rotary positions."""
    model = config.model
    h, f, a = model.hidden_size, resolved(model.ffn_size), model.num_heads * config.head_size
    tensors = [renamed("embedding.weight", (model.vocab_size, h), "model.embed_tokens.weight")]
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        tensors += [
            renamed(f"{ours}.norm1.weight", (h,), f"{theirs}.input_layernorm.weight"),
            renamed(f"{ours}.norm2.weight", (h,), f"{theirs}.post_attention_layernorm.weight"),
        ]
        for kind in ("weight", "bias"):
            if kind == "weight" or model.qkv_bias:
                qkv = [f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
                tensors.append(
                    grouped_qkv(
                        f"{ours}.attention.qkv.{kind}", (*qkv_shape(config), *inputs_of(kind, h)), qkv
                    )
                )
            if kind == "weight" or model.output_bias:
                tensors.append(
                    renamed(
                        f"{ours}.attention.output.{kind}",
                        (h, *inputs_of(kind, a)),
                        f"{theirs}.self_attn.o_proj.{kind}",
                    )
                )
            if kind == "weight" or model.bias:
                gated = [f"{theirs}.mlp.{part}_proj.{kind}" for part in ("gate", "up")]
                tensors += [
                    stacked(f"{ours}.feed_forward.up.{kind}", (2, f, *inputs_of(kind, h)), gated),
                    renamed(
                        f"{ours}.feed_forward.down.{kind}",
                        (h, *inputs_of(kind, f)),
                        f"{theirs}.mlp.down_proj.{kind}",
                    ),
                ]
        if model.qk_norm and model.qk_norm_heads == "all":
            sizes = zip(("query", "key"), config.attention_sizes, strict=True)
            norms = (
                renamed(f"{ours}.attention.heads_norm.{n}", (size,), f"{theirs}.self_attn.{n[0]}_norm.weight")
                for n, size in sizes
            )
            tensors += norms
        elif model.qk_norm:
            tensors += [
                renamed(
                    f"{ours}.attention.query_norm.weight",
                    (config.head_size,),
                    f"{theirs}.self_attn.q_norm.weight",
                ),
                renamed(
                    f"{ours}.attention.key_norm.weight",
                    (config.head_size,),
                    f"{theirs}.self_attn.k_norm.weight",
                ),
            ]
    tensors.append(renamed("norm.weight", (h,), "model.norm.weight"))
    return tensors + lm_head(config)


def lm_head(config: Config, peer: str = "lm_head.weight") -> list[Mapped]:
    """The LM head. There is none if it is the embedding, as in peers' files."""
    model = config.model
    weight = (
        [] if model.tie_embeddings else [renamed("head.weight", (model.vocab_size, model.hidden_size), peer)]
    )
    return weight + [renamed("head.bias", (model.vocab_size,), "lm_head.bias")] * model.head_bias
