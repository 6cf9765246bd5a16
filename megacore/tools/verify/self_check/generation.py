"""Checks that text generation computes what a whole pass computes."""

import torch
from torch import Tensor, nn

from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.tools.text.cache import KeyValueCache
from megacore.tools.verify.self_check.case import Case
from megacore.tools.verify.self_check.finding import Finding
from megacore.tools.verify.self_check.layer_outputs import LayerOutputs, difference

# Of the largest logit. A pass over one token adds in another order than a pass over a text, which costs some
# 1e-15 a layer; a key too few or a position off by one costs 1e-4 or more.
BOUND = 1e-10
CHUNK = 3  # tokens of a longer pass through the cache: it begins within a text and has a causal mask


def check_cache(case: Case) -> list[Finding]:
    """Compare the logits of a text that is read in pieces through the KV cache with those of one whole pass.

    The pieces have one token, as in generation, or `CHUNK` tokens, as a prompt has several.
    """
    case = case.without_drops  # as it evaluates
    if case.rounds_to is not None:
        return [Finding("cache", "not checked", f"a layer rounds to {case.rounds_to}, and logits with it")]
    model = case.build().eval()
    tokens = case.microbatches[0].tokens[:1]
    try:
        expected, whole = read_text(model, tokens, tokens.shape[1])
    except ConfigError as error:
        return [Finding("cache", "not checked", f"{error.wrong}")]
    except Exception as error:  # a layer that needs more of a batch than its tokens
        return [Finding("cache", "not checked", f"it generates no text: {reason(error)}")]

    for size, pieces in ((1, "token by token"), (CHUNK, f"{CHUNK} tokens at a time")):
        cache = UsedCache(1, tokens.shape[1])
        try:
            logits, outputs = read_text(model, tokens, size, cache)
        except Exception as error:
            failed = f"it reads no text {pieces}: {reason(error)}"
            # no layer has kept anything, so perhaps none is made to
            return [Finding("cache", "wrong" if cache.users else "not checked", failed)]
        if difference(logits, expected) <= BOUND:
            continue

        layer = outputs.first_apart(whole, BOUND) or "head"
        if not cache.users:
            wrong = f"{layer} needs earlier tokens, and no layer keeps them: no text can be generated"
            return [Finding("cache", "not checked", wrong)]
        same = (logits - expected).abs().amax(1) <= BOUND * expected.abs().max()
        wrong = (
            f"{layer} is the first layer that computes otherwise {pieces} than in one pass; logits are "
            f"{difference(logits, expected):.1e} off, from token {int(same.logical_not().nonzero()[0])} on"
        )
        keeps = any(module in cache.users for module in model.get_submodule(layer).modules())
        details = () if keeps else (f"{layer} keeps nothing in the cache, and other layers do",)
        return [Finding("cache", "wrong", wrong, details)]
    return [Finding("cache", "right", "cache")]


class UsedCache(KeyValueCache):
    """A cache that knows which modules have kept something in it."""

    def __init__(self, batch_size: int, capacity: int) -> None:
        super().__init__(batch_size, capacity)
        self.users = set[nn.Module]()

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        """See `KeyValueCache`."""
        self.users.add(layer)
        return super().attend(layer, q, k, v)  # type: ignore[arg-type]

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `KeyValueCache`."""
        self.users.add(layer)
        return super().extend(layer, k, v)

    def keep(self, layer: nn.Module, new: int, *state: Tensor) -> None:
        """See `KeyValueCache`."""
        self.users.add(layer)
        super().keep(layer, new, *state)


@torch.no_grad()
def read_text(
    model: Stage, tokens: Tensor, size: int, cache: KeyValueCache | None = None
) -> tuple[Tensor, LayerOutputs]:
    """Read tokens ``[1, seq]`` in pieces of `size`; return all logits ``[seq, vocabulary]`` and outputs."""
    with LayerOutputs(model) as outputs:
        hidden = [model({}, Microbatch(piece), cache)[0]["hidden"] for piece in tokens.split(size, 1)]
    return torch.cat([model.logits(x) for x in hidden]), outputs


def reason(error: Exception) -> str:
    """Return an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
