"""The state of each optimizer, by `optim.kind`. Their updates are in `engine/rules.py`."""

# The state that an optimizer keeps beside the master weights: tensors of these kinds, each of its parameter's shape.
STATES: dict[str, tuple[str, ...]] = {"adamw": ("adam_m", "adam_v"), "sgd": ("momentum",)}
