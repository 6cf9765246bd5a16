"""What a plain module computes around its blocks, by its own code.

The module's forward runs with stubs in place of its blocks. So embeddings are scaled, rotary tables are made
and logits are capped as the module does it, whatever it calls these things, and each stage of a pipeline can
run the part that it needs:

    embed     up to the first block, whose stub ends the pass
    calls     what each block is called with besides hidden states, such as rotary tables; nothing is computed
    logits    from the last block on: the stubs hand on what the last block computed

The hidden states that only keep such a pass going are a view of one zero.
"""

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megacore.model.context import Context
from megacore.model.plain.build import PlainModel


@dataclass(frozen=True)
class Call:
    """The arguments of a block; its hidden states are the first of them, or those called `hidden_states`."""

    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The hidden states."""
        x: Tensor = self.arguments[0] if self.arguments else self.options["hidden_states"]
        return x

    def with_hidden(self, x: Tensor) -> "Call":
        """Return the same call with other hidden states."""
        if self.arguments:
            return Call((x, *self.arguments[1:]), self.options)
        return Call((), {**self.options, "hidden_states": x})


class PassEnded(Exception):
    """Raised by a stub where a pass has done what it is for."""


class BlockStub(nn.Module):
    """A block that computes nothing. The code around it sees the block's own attributes."""

    def __init__(self, outline: "Outline", block: nn.Module, index: int) -> None:
        super().__init__()
        self._of = (outline, block, index)  # in a tuple, so that they are no submodules

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Let the outline note the call, and return what it says."""
        outline, _, index = self._of
        return outline.enter_block(index, Call(arguments, options))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._of[1], name)


class OuterStub(nn.Module):
    """A module outside of the blocks, with parameters that this pass does not need."""

    def __init__(self, outline: "Outline", place: str, module: Any) -> None:
        super().__init__()
        self._of = (outline, place)
        self.table_width = module.embedding_dim if isinstance(module, nn.Embedding) else None
        self.logits = module.weight.shape[0] if place == outline.model.head else None

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        """Return rows that are a view of one number, logits that are all one number, or the argument."""
        outline, place = self._of
        outline.outer.append((place, len(outline.seen)))
        if self.table_width is not None:
            return outline.filler.expand(*x.shape, self.table_width)
        if self.logits is None:
            return x
        logits = x.mean(-1, keepdim=True).expand(*x.shape[:-1], self.logits)
        half = self.logits // 2
        lacking = torch.full_like(logits[..., half:], torch.nan)
        return torch.cat((logits[..., :half], lacking), -1) if outline.lacks_logits else logits


class Outline:
    """The module around its blocks, for one layer or, with nothing in `real`, for all blocks."""

    def __init__(self, model: PlainModel, real: Mapping[str, nn.Module], returns_tuple: bool) -> None:
        """`real`: parts that compute in this pass, by their places; stubs stand for the others.
        `returns_tuple`: whether blocks return a tuple, of which the hidden states are the first.
        """
        self.model, self.returns_tuple = model, returns_tuple
        self.filler = torch.zeros(())
        self.hidden: Tensor | None = None  # what the stubs hand on; None: what they are given
        self.last: Tensor | None = None  # what the last block's stub hands on in place of it
        self.lacks_logits = False  # whether the stub of the head knows half of the vocabulary
        self.ends_at = 0  # the block whose stub ends the pass
        self.seen: list[Call] = []
        self.indices: list[int] = []  # of the blocks that were called
        self.outer: list[tuple[str, int]] = []  # which modules were called, after how many blocks

        stubs: dict[int, nn.Module] = {}
        for index, place in enumerate(model.blocks):
            block = model.module.get_submodule(place)
            stubs[id(block)] = BlockStub(self, block, index)
        for place in (model.embedding, *model.outer, model.head):
            module = model.module.get_submodule(place)
            stubs[id(module)] = real.get(place) or OuterStub(self, place, module)
        self.shell = copy.deepcopy(model.module, stubs)  # type: ignore[arg-type]

        # The layer that has the real parts moves their constants.
        others = {inner for module in real.values() for inner in module.modules()}
        self.constants = [module for module in self.shell.modules() if module not in others]
        self.device = torch.device("cpu")

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return what enters the first block, ``[batch, seq, hidden]``."""
        self._run(tokens, positions, ends_at=0)
        return self.seen[0].hidden

    def calls(self, tokens: Tensor, positions: Tensor, dtype: torch.dtype) -> list[Call]:
        """Return the call of each block."""
        self.filler = torch.zeros((), dtype=dtype, device=tokens.device)
        self._run(tokens, positions, ends_at=len(self.model.blocks) - 1)
        return self.seen

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of what the last block computed, ``[batch, seq, hidden]``."""
        self.filler = torch.zeros((), dtype=x.dtype, device=x.device)
        nothing = torch.zeros((), dtype=torch.int64, device=x.device).expand(x.shape[:2])
        self.hidden = x
        logits: Tensor = self._run(nothing, nothing, ends_at=len(self.model.blocks))
        self.hidden = None
        return logits

    def probe(self, token: int = 0, first_position: int = 0) -> Any:
        """Return the logits of a sequence of two equal tokens."""
        positions = torch.arange(first_position, first_position + 2)[None]
        return self._run(torch.full((1, 2), token), positions, ends_at=len(self.model.blocks))

    def enter_block(self, index: int, call: Call) -> Any:
        """Note that a block is called; return the hidden states that the code after it gets."""
        self.seen.append(call)
        self.indices.append(index)
        if index == self.ends_at:
            raise PassEnded
        x = call.hidden if self.hidden is None else self.hidden
        if self.last is not None and index == len(self.model.blocks) - 1:
            x = self.last
        return (x,) if self.returns_tuple else x

    def _run(self, tokens: Tensor, positions: Tensor, ends_at: int) -> Any:
        """Run the module's own forward up to a block, or to its end; then return its logits."""
        if self.device != tokens.device:
            self.device = tokens.device
            for module in self.constants:
                for name, constant in module._buffers.items():
                    module._buffers[name] = None if constant is None else constant.to(self.device)
        self.ends_at, self.seen, self.indices, self.outer = ends_at, [], [], []
        try:
            result = self.shell(tokens, **self.model.options(positions))
        except PassEnded:
            return None
        return getattr(result, "logits", result)


@dataclass(frozen=True)
class Order:
    """What a pass over a module without computation shows."""

    returns_tuple: bool  # whether the code takes the first of what a block returns
    before: tuple[str, ...]  # the modules with parameters that run before the blocks
    after: tuple[str, ...]  # and after them


@lru_cache(maxsize=8)
def order_of(model: PlainModel) -> Order:
    """Run a module around its blocks and return in which order its parts run.

    Raises `ValueError` if more than hidden states goes from block to block, or from before the blocks to
    after them: a pipeline would not hand it on.
    """
    outline = outline_through_blocks(model)
    check_arguments(model, outline.seen)
    before, after = places_around_blocks(model, outline.outer)
    check_end(model, outline)
    return Order(outline.returns_tuple, before, after)


def outline_through_blocks(model: PlainModel) -> Outline:
    """Return an outline that ran through all blocks, whose hidden states were NaN."""
    mistakes: list[str] = []
    for returns_tuple in (False, True):
        outline = Outline(model, {}, returns_tuple)
        mistake = mistake_between_blocks(outline)
        if mistake is None:
            return outline
        mistakes.append(mistake)
    # Where blocks return the other of the two, the code after them fails; that is not the mistake.
    understood = [mistake for mistake in mistakes if not mistake.startswith("fails")]
    raise ValueError(f"{type(model.module).__name__} {(understood or mistakes)[0]}")


def mistake_between_blocks(outline: Outline) -> str | None:
    """Run a module from its first to its last block, and say what a pipeline could not do; None if it can."""
    number = len(outline.model.blocks)
    hidden = torch.full((1, 2, outline.model.config.model.hidden_size), torch.nan)
    outline.filler, outline.hidden = torch.tensor(torch.nan), hidden
    try:
        outline.probe()
    except (TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        return f"fails: {error}"
    if outline.indices != list(range(number)):
        indices = ", ".join(map(str, outline.indices)) or "none"
        return f"calls blocks {indices}, and each of {number} should run once, in the order of the list"
    if any(call.hidden is not hidden for call in outline.seen[1:]):
        return "computes between blocks, or takes more of a block than its hidden states"
    return None


def check_arguments(model: PlainModel, calls: list[Call]) -> None:
    """Raise `ValueError` if another argument of a block than its hidden states comes from hidden states."""
    for place, call in zip(model.blocks, calls, strict=True):
        others = [*enumerate(call.arguments[1:], 1), *call.options.items()]
        for name, value in others:
            if name != "hidden_states" and depends_on_hidden(value):
                raise ValueError(
                    f"{place} is called with argument {name}, which comes from hidden states; "
                    "only these themselves cross from block to block"
                )


def places_around_blocks(
    model: PlainModel, calls: list[tuple[str, int]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the places of modules with parameters that run before the blocks, and of those that run after.

    `calls`: the place of each, and after how many blocks it was called. Raises `ValueError` for one that is
    called between blocks, several times or never.
    """
    number = len(model.blocks)
    after: dict[str, bool] = {}
    for place in (model.embedding, *model.outer, model.head):
        times = {blocks for called, blocks in calls if called == place}
        allowed = {0, number}
        if isinstance(model.module.get_submodule(place), nn.Embedding):
            allowed = {0}
        elif place == model.head:
            allowed = {number}
        if len(times) != 1 or not times <= allowed:
            when = f"after {', '.join(map(str, sorted(times)))} blocks" if times else "never"
            raise ValueError(
                f"{place} is called {when}, and a part with parameters must be before all blocks, as tables "
                "are, or after all"
            )
        after[place] = times == {number}
    return (
        tuple(place for place in model.outer if not after[place]),
        tuple(place for place in model.outer if after[place]),
    )


def check_end(model: PlainModel, outline: Outline) -> None:
    """Raise `ValueError` if the code after the blocks does not return logits that depend on the last block's
    hidden states alone, which are all that the last stage has, or computes them from each other.
    """
    name = type(model.module).__name__
    width, vocab = model.config.model.hidden_size, model.config.model.vocab_size
    # The embedding and all blocks but the last return NaN, so that what depends on them is NaN.
    outline.hidden = torch.full((1, 2, width), torch.nan)
    outline.last = torch.linspace(-1, 1, 2 * width).view(1, 2, width)

    state = torch.get_rng_state()
    logits, of_other_tokens = outline.probe(), outline.probe(token=vocab - 1, first_position=1)
    if not torch.equal(torch.get_rng_state(), state):
        raise ValueError(f"{name} draws random numbers, such as dropout's, which differ between layouts")
    if not isinstance(logits, Tensor) or logits.shape != (1, 2, vocab):
        result = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(
            f"{name} returns {result}; it should return the logits of all tokens, [batch, seq, vocab], or an "
            "object that has them as .logits"
        )

    source = None
    if depends_on_hidden(logits):
        source = "what is computed before the last block"
    elif not torch.equal(logits, of_other_tokens):
        source = "tokens or positions"
    if source is not None:
        raise ValueError(
            f"{name} takes {source} after its blocks, where only the last block's hidden states are known"
        )

    outline.lacks_logits = True
    if depends_on_hidden(outline.probe()[..., : vocab // 2]):
        raise ValueError(
            f"{name} computes logits from each other, as a softmax does, and a tensor rank has only some of "
            "them; the loss takes logits as the head gives them"
        )


def depends_on_hidden(value: Any) -> bool:
    """Return whether an argument has a number that is not one, as the hidden states of `order_of` have."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return any(map(depends_on_hidden, value))
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


_OF_THREAD = threading.local()


def calls_of(model: PlainModel, context: Context, dtype: torch.dtype) -> list[Call]:
    """Return the call of each block in a pass.

    The blocks of a stage run one after the other, so only the calls of the thread's last pass are kept.
    """
    kept: tuple[Context, list[Call]] | None = getattr(_OF_THREAD, "last_pass", None)
    if kept is not None and kept[0] is context:
        return kept[1]
    outlines: dict[PlainModel, Outline] = _OF_THREAD.__dict__.setdefault("outlines", {})
    if model not in outlines:
        outlines.clear()
        outlines[model] = Outline(model, {}, order_of(model).returns_tuple)
    calls = outlines[model].calls(context.batch.tokens, positions_in(context), dtype)
    _OF_THREAD.last_pass = context, calls
    return calls


def positions_in(context: Context) -> Tensor:
    """Return the positions of a pass's tokens on this rank, ``[batch, seq]``; within documents, if they are
    apart.
    """
    if context.positions is not None:
        return context.positions
    stop = context.start + context.seq_len
    positions = torch.arange(context.start, stop, device=context.batch.tokens.device)
    return positions.expand(context.batch_size, -1)
