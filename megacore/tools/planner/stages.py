"""How frameworks cut a model into the stages of a pipeline, and which ranks hold them."""

from dataclasses import dataclass
from functools import lru_cache

from megacore.tools.choices.partition import split_layers
from megacore.tools.planner.workload import Setting


@dataclass(frozen=True)
class StageWork:
    """What a stage holds: blocks, and the ends."""

    blocks: int
    embedding: bool
    head: bool


def cut(s: Setting, rule: str) -> tuple[StageWork, ...]:
    """The stages of the model, in order, by a framework's rule.

    `cost`: megacore's, the most expensive stage is cheapest. `even`: as many blocks in each, the ends on top.
    `nanotron`: each stage takes blocks until the sum passes its share, so the head and the loss may stand
    alone.
    """
    block = s.attention_weights + s.active_weights
    if rule == "nanotron":
        block = 4 * s.attention_size * s.hidden + s.ffn_weights
    return _cut(s.layers, s.pipeline * s.chunks, block, s.vocab * s.hidden, rule)


@lru_cache(maxsize=1024)
def _cut(layers: int, count: int, block: float, head: float, rule: str) -> tuple[StageWork, ...]:
    """`cut`, of blocks and a head with these costs."""
    if rule == "nanotron":
        return tuple(_nanotron(layers, count, block, head))
    if rule == "cost" and count <= layers:
        ranges = [len(own) for own in split_layers(layers, count, block, 0.0, head)]
    else:
        ranges = [layers // count + (i < layers % count) for i in range(count)]
    return tuple(StageWork(n, i == 0, i == count - 1) for i, n in enumerate(ranges))


def _nanotron(layers: int, count: int, block: float, head: float) -> list[StageWork]:
    """Each block goes to the current stage, which ends when the cost so far is above
    its share of the whole.
    """
    total, done, at = layers * block + head, 0.0, 0
    blocks, heads = [0] * count, [False] * count
    for _ in range(layers):
        blocks[at] += 1
        done += block
        at += done > total * (at + 1) / count
    heads[min(at, count - 1)] = True
    return [StageWork(n, i == 0, heads[i]) for i, n in enumerate(blocks)]


@lru_cache(maxsize=1024)
def held_by_ranks(
    stages: tuple[StageWork, ...], ranks: int, v_shaped: bool
) -> tuple[tuple[int, int, int], ...]:
    """What each rank of the pipeline holds: blocks, embeddings and heads."""
    held = [[stages[rank], stages[-1 - rank]] if v_shaped else stages[rank::ranks] for rank in range(ranks)]
    return tuple(
        (sum(st.blocks for st in own), sum(st.embedding for st in own), sum(st.head for st in own))
        for own in held
    )
