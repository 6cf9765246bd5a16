"""What an engine keeps for each parameter, for those who count it and need no torch. The updates are in `engine/optimizers.py`."""

# The state that an optimizer (`optim.kind`) keeps beside the master weights: tensors of these kinds, each of its parameter's shape.
STATES: dict[str, tuple[str, ...]] = {"adamw": ("adam_m", "adam_v"), "sgd": ("momentum",)}

ALIGNMENT = 64  # elements: every parameter starts on a boundary that vector loads and matrix units like
