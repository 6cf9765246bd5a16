"""The state of each optimizer, by `optim.kind`. Their updates are in `engine/rules.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """The kinds of tensors that an optimizer keeps for each parameter, in the parameter's shape.

    `whole_matrices`: it updates whole matrices, so an engine may not divide a matrix among ranks.
    """

    states: tuple[str, ...]
    whole_matrices: bool = False


RULES = {"adamw": Rule(("adam_m", "adam_v")), "sgd": Rule(("momentum",))}
