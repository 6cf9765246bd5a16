"""What is known of each optimizer without a device: `optim.kind` by name. How they update is in `engine/rules.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """The state that an optimizer keeps beside the master weights: tensors of these kinds, each of its parameter's shape.

    `whole_matrices`: it updates matrices as wholes, so that an engine may not cut one among ranks.
    """

    states: tuple[str, ...]
    whole_matrices: bool = False


RULES = {"adamw": Rule(("adam_m", "adam_v")), "sgd": Rule(("momentum",))}
