"""Which layers each pipeline stage holds, chosen by cost.

The embedding stands on the first stage, the final norm, LM head and loss on the last. In a small model the head costs as
much as several layers, so an even split would leave every stage waiting for the last one.
"""

from itertools import pairwise

from megacore.config.schema import Config
from megacore.plan.flops import Cost, embedding_cost, head_cost, layer_cost


def split_layers(num_layers: int, stages: int, layer_cost: float, first_cost: float, last_cost: float) -> list[range]:
    """Cuts the layers into `stages` contiguous ranges of at least one that minimise the most expensive stage.

    `first_cost` and `last_cost` are what the ends carry besides layers. Of equally good splits the most even one is
    taken, then the one with the fewest layers on the ends. Every rank finds the same answer.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{stages} stages cannot each have one of {num_layers} layers")
    if stages == 1:
        return [range(num_layers)]
    # Layers are equal, so only the two ends differ, and the stages between them are best split evenly: trying every
    # pair of ends is exact. Where the middle is not even, its later stages take the larger share: they hold fewer
    # activations under 1F1B.
    middle = stages - 2

    def sizes(first: int, last: int) -> list[int]:
        rest = num_layers - first - last
        return [first, *(rest // middle + (i >= middle - rest % middle) for i in range(middle)), last]

    def badness(split: list[int]) -> tuple[float, int, int]:
        costs = [n * layer_cost for n in split]
        costs[0] += first_cost
        costs[-1] += last_cost
        return max(costs), sum(n * n for n in split), split[0] + split[-1]

    ends = [(f, last) for f in range(1, num_layers) for last in range(1, num_layers - f + 1)]
    fitting = [(f, last) for f, last in ends if (num_layers - f - last >= middle if middle else f + last == num_layers)]
    best = min((sizes(f, last) for f, last in fitting), key=badness)
    bounds = [sum(best[:i]) for i in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def stage_layers(config: Config) -> list[range]:
    """The layers of every virtual stage (``chunk * pipeline + stage``) of a resolved config."""
    virtual_stages = config.parallel.pipeline * config.parallel.chunks
    layer, first, last = layer_cost(config).total, embedding_cost(config).total, head_cost(config).total
    return split_layers(config.model.num_layers, virtual_stages, layer, first, last)


def stage_costs(config: Config) -> list[Cost]:
    """Work of every virtual stage in FLOPs a token, recomputation included."""
    costs = [layer_cost(config) * len(layers) for layers in stage_layers(config)]
    costs[0] += embedding_cost(config)
    costs[-1] += head_cost(config)
    return costs
