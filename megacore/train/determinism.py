"""`train.deterministic`: the same command, on the same machines and software, gives the same bits."""

import os

import torch

from megacore.errors import ConfigError

# What each must be before CUDA's libraries start, the first where it is not set. cuBLAS sums in an order that varies when
# streams share a workspace of another size; NVLink switches (NVLS) sum in the order in which data arrives.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NCCL_NVLS_ENABLE": ("0",)}


def compute_deterministically() -> None:
    """Makes every operation of this process deterministic, or fail; to be called before the first group and the first product.

    PyTorch's switch takes deterministic kernels (sorted sums in embedding's backward, one split of the keys in that of
    attention) instead of atomic additions, refuses what has none, and keeps torch.compile from choosing kernels by timing. Random
    numbers need nothing: none comes from a generator with a state (`rng.py`).

    Raises:
        ConfigError: the environment asks a library for the contrary.
    """
    for name, allowed in ENVIRONMENT.items():
        value = os.environ.setdefault(name, allowed[0])
        if value not in allowed:
            wrong = f"{value} lets sums come in an order that varies, which train.deterministic excludes"
            raise ConfigError(name, wrong, f"{' or '.join(allowed)}, or not set")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(torch.get_num_threads())  # the same number: MKL takes fewer at times unless it was set
