"""Inputs for the operations of kernels/, and the sizes at which a rank of a model runs them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacore.config import Config
from megacore.kernels.permute import slots_of

Inputs = dict[str, Any]  # tensors, lists of tensors, and numbers, by name
FEATURES = 2048  # of linear cross entropy's rows
TENSORS = 16  # of a list
EXPERTS, CHOSEN = 8, 2  # of a mixture, and those of a token
VOCABULARY = 50304  # of an embedding


@dataclass(frozen=True)
class Size:
    """`rows` of `width` elements; where a row is made of heads, each has `head` of them, and
    `group` query heads share a key.
    """

    rows: int
    width: int
    head: int = 128
    group: int = 2

    def __str__(self) -> str:
        return f"{self.rows} × {self.width}"


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Normal numbers, the same for every dtype up to its rounding."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def integers(high: int, count: int, device: torch.device) -> Tensor:
    """`count` numbers below `high`."""
    if device.type == "meta":
        return torch.empty(count, dtype=torch.int64, device=device)
    return torch.randint(high, (count,), generator=torch.Generator(device).manual_seed(0), device=device)


def uniform(vocabulary: int) -> Tensor:
    """Equal probabilities ``[vocabulary]`` of all tokens."""
    return torch.full((vocabulary,), 1 / vocabulary, dtype=torch.float64)


def zipf(vocabulary: int) -> Tensor:
    """Probabilities ``[vocabulary]`` of tokens as text has them: the k-th occurs 1 / k times as often as
    the first.
    """
    frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    return frequencies / frequencies.sum()


def zipf_tokens(vocabulary: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Token ids drawn with the probabilities of `zipf`; the most frequent one is 0."""
    cumulative = zipf(vocabulary).cumsum(0)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.searchsorted(cumulative, drawn).clamp_(max=vocabulary - 1)


def embedded_tokens(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Gradients ``[rows, width]`` of uniformly random tokens, and the table's gradient, in fp32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "total": normal((VOCABULARY, size.width), wide, device),
        "grad": normal((size.rows, size.width), dtype, device, 1),
        "ids": integers(VOCABULARY, size.rows, device),
    }


def embedded_text(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The same with tokens as frequent as in text."""
    ids = zipf_tokens(VOCABULARY, (size.rows,), torch.Generator().manual_seed(0))
    return embedded_tokens(size, dtype, device) | {"ids": ids.to(device)}


def rows_of(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x, and for norms and biases a row each of weight and bias."""
    x = normal((size.rows, size.width), dtype, device)
    return {
        "x": x,
        "weight": normal((size.width,), dtype, device, 1),
        "bias": normal((size.width,), dtype, device, 2),
    }


def rows_and_residual(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The same with a residual."""
    return rows_of(size, dtype, device) | {"residual": normal((size.rows, size.width), dtype, device, 3)}


def gate_and_up(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """``[rows, 2 · width]``."""
    return {"x": normal((size.rows, 2 * size.width), dtype, device)}


def routed(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Tokens ``[rows / CHOSEN, width]``, where each goes among `rows` rows, and how much of each it takes."""
    tokens = size.rows // CHOSEN
    order = integers(EXPERTS, tokens * CHOSEN, device).argsort(stable=True)
    weights = normal((tokens, CHOSEN), torch.float32, device, 1)
    return {
        "x": normal((tokens, size.width), dtype, device),
        "slots": slots_of(order, CHOSEN),
        "weights": weights,
    }


def rows_of_experts(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Rows ``[rows, width]`` of experts that are chosen by chance, a product's gradient and the
    weights, FEATURES outputs each.
    """
    count = torch.arange(EXPERTS, device=device)
    ends = torch.searchsorted(integers(EXPERTS, size.rows, device).sort()[0], count, right=True)
    weight = normal((EXPERTS, FEATURES, size.width), dtype, device, 1)
    grad = normal((size.rows, FEATURES), dtype, device, 2)
    return {"x": normal((size.rows, size.width), dtype, device), "weight": weight, "grad": grad, "ends": ends}


def score_shape(size: Size) -> tuple[int, int, int, int]:
    """[1, heads, queries, keys]: as many queries as keys, or fewer where that many rows are not wanted."""
    queries = min(size.width, size.rows)
    return 1, size.rows // queries, queries, size.width


def scores(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Attention scores, and a mask with a quarter of the keys hidden from all queries."""
    mask = torch.ones(1, 1, 1, size.width, dtype=torch.bool, device=device)
    mask[..., -size.width // 4 :] = False
    return {"scores": normal(score_shape(size), dtype, device), "mask": mask}


def logits(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """A row of logits a token, and its target."""
    return {
        "logits": normal((size.rows, size.width), dtype, device),
        "targets": integers(size.width, size.rows, device),
    }


def hidden_and_vocabulary(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Rows of `FEATURES` and a vocabulary of `width`: logits of the size's rows and width."""
    weight = normal((size.width, FEATURES), dtype, device, 1) / FEATURES**0.5
    return {
        "hidden": normal((size.rows, FEATURES), dtype, device),
        "weight": weight,
        "targets": integers(size.width, size.rows, device),
    }


def tables(seq: int, head: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """cos and sin ``[seq, head]``."""
    angles = torch.outer(
        torch.arange(seq, device=device), 1e4 ** (-torch.arange(0, head, 2, device=device) / head)
    ).repeat(1, 2)
    wide = torch.promote_types(dtype, torch.float32)
    return {"cos": angles.cos().to(wide), "sin": angles.sin().to(wide)}


def sequences(size: Size) -> tuple[int, int]:
    """(batch, seq) of as many tokens as there are rows, in sequences of 4096 at most."""
    seq = min(size.rows, 4096)
    return size.rows // seq, seq


def heads(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x ``[batch, heads, seq, head]``, token by token in memory."""
    batch, seq = sequences(size)
    x = normal((batch, seq, size.width // size.head, size.head), dtype, device).transpose(1, 2)
    return {"x": x} | tables(seq, size.head, dtype, device)


def grouped_heads(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """qkv ``[batch, seq, kv heads, group + 2, head]`` whose rows have the size's width."""
    batch, seq = sequences(size)
    kv_heads, rest = divmod(size.width, size.head * (size.group + 2))
    assert not rest, f"rows of {size.width} are no whole groups of {size.group + 2} heads of {size.head}"
    return {"qkv": normal((batch, seq, kv_heads, size.group + 2, size.head), dtype, device)} | tables(
        seq, size.head, dtype, device
    )


def grouped_heads_and_bias(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """qkv likewise, and the bias ``[kv heads, group + 2, head]`` of the layer that made it."""
    qkv = grouped_heads(size, dtype, device)["qkv"]
    return {"qkv": qkv, "bias": normal(qkv.shape[2:], dtype, device, 1)}


def grouped_heads_and_norms(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The same, with the weights ``[head]`` of the norms of queries and keys."""
    weights = {
        f"{name}_weight": normal((size.head,), dtype, device, i + 1) for i, name in enumerate(("q", "k"))
    }
    return grouped_heads(size, dtype, device) | weights


def tensors(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """A list of them, with the size's elements altogether."""
    return {"tensors": [normal((size.rows // TENSORS, size.width), dtype, device, i) for i in range(TENSORS)]}


def optimizer_state(size: Size, dtype: torch.dtype, device: torch.device) -> Inputs:
    """fp32 lists, and where the model computes in 16 bits its copies."""
    wide = torch.promote_types(dtype, torch.float32)
    state = {
        name: tensors(size, wide, device)["tensors"]
        for name in ("masters", "gradients", "first_moments", "second_moments")
    }
    state["second_moments"] = [t.abs() for t in state["second_moments"]]
    return state | {"copies": [t.to(dtype) for t in state["masters"]] if dtype.itemsize == 2 else None}


def tokens(config: Config) -> int:
    """Of a microbatch."""
    return config.train.micro_batch_size * config.train.seq_len


def hidden(config: Config) -> Size:
    """Activations between blocks."""
    return Size(tokens(config), config.model.hidden_size)


def expert_rows(config: Config) -> Size:
    """As if the model's feed-forward layers were experts: no config here has experts of such a size."""
    return Size(tokens(config) * CHOSEN, config.model.hidden_size)


def feed_forward(config: Config) -> Size:
    """This rank's inner features."""
    assert config.model.ffn_size is not None
    return Size(tokens(config), config.model.ffn_size // config.parallel.tensor)


def attention_scores(config: Config) -> Size:
    """This rank's heads, of a microbatch."""
    heads = config.model.num_heads // config.parallel.tensor
    return Size(config.train.micro_batch_size * heads * config.train.seq_len, config.train.seq_len)


def vocabulary(config: Config) -> Size:
    """This rank's logits."""
    return Size(tokens(config), config.model.vocab_size // config.parallel.tensor)


def queries(config: Config) -> Size:
    """This rank's query heads."""
    return Size(
        tokens(config), config.model.num_heads * config.head_size // config.parallel.tensor, config.head_size
    )


def queries_keys_values(config: Config) -> Size:
    """This rank's part of the projection that has all three."""
    group = config.model.num_heads // config.kv_heads
    return Size(
        tokens(config),
        (group + 2) * config.kv_heads * config.head_size // config.parallel.tensor,
        config.head_size,
        group,
    )


def parameters(config: Config) -> Size:
    """About as many elements as a rank has in the blocks' weights."""
    parallel, model = config.parallel, config.model
    rows = 12 * model.num_layers * model.hidden_size // (parallel.tensor * parallel.pipeline)
    return Size(rows // TENSORS * TENSORS, model.hidden_size)
