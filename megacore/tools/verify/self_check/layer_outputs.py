"""What every layer of a model computes in one pass or several, to name the first layer that differs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megacore.model.stage import Stage


class LayerOutputs:
    """A context that keeps the tensors that each layer returns, by the layer's name.

    Of several passes it keeps all, one after the other: passes over parts of a text give what one pass over
    the whole text gives, if layers compute the same.
    """

    def __init__(self, model: Stage) -> None:
        self.model = model
        self.tensors: dict[str, list[Tensor]] = defaultdict(list)  # by layer and place among its outputs

    def __enter__(self) -> "LayerOutputs":
        names = {module: name for name, module in self.model.named_modules()}

        def keep(layer: nn.Module, inputs: object, outputs: Tensor | tuple[Tensor, ...]) -> None:
            for place, tensor in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
                self.tensors[f"{names[layer]}|{place}"].append(torch.atleast_1d(tensor.detach()))

        self.handles = [layer.register_forward_hook(keep) for layer in self.model.layers]
        return self

    def __exit__(self, *raised: object) -> None:
        for handle in self.handles:
            handle.remove()

    def first_apart(self, other: "LayerOutputs", bound: float, rows: Tensor | None = None) -> str:
        """Return the name of the first layer whose outputs differ by more than `bound`; "" if none does.

        Outputs whose shapes differ are not compared: they do not belong to tokens. `rows`: a mask of the
        tokens to compare; outputs with another number of rows are then left out.
        """
        for name, parts in self.tensors.items():
            one, two = torch.cat(parts), torch.cat(other.tensors[name])
            if rows is not None:
                if len(one) != len(rows) or len(two) != len(rows):
                    continue
                one, two = one[rows], two[rows]
            if one.shape == two.shape and not difference(one, two) <= bound:
                return name.partition("|")[0]
        return ""


def difference(value: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value, 0 for equal tensors.

    NaN where one is not finite and the other is not the same, so compare with `not difference <= bound`.
    """
    if torch.equal(value, expected):
        return 0.0
    return float((value - expected).abs().max() / expected.abs().max())


def worst(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    """Return the name of the pair of tensors that differ most, and by how much."""
    differences: Iterable[tuple[str, float]] = (
        (name, difference(values[name], tensor)) for name, tensor in expected.items()
    )
    return max(differences, key=lambda named: (named[1] != named[1], named[1]))
