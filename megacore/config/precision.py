"""What `train.precision` means in bytes."""

# of parameters and activations, by `train.precision`
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
# of gradients, master weights and the optimizer's state
GRADIENT_BYTES = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
