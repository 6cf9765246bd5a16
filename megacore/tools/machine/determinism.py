"""`train.deterministic`: the same command, on the same machines and software, gives the same bits."""

import os

import torch

from megacore.errors import ConfigError

# Values that each variable may have before CUDA's libraries start; the first is set if there is none. With
# another workspace size cuBLAS sums in an order that varies between streams. NVLink switches (NVLS) sum in
# the order in which data arrives.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NCCL_NVLS_ENABLE": ("0",)}


def compute_deterministically() -> None:
    """Makes every operation of this process deterministic, or fail.

    Call it before the first group and the first product.

    PyTorch's switch selects deterministic kernels instead of atomic additions (sorted sums in the embedding's
    backward, one split of the keys in attention's). It refuses operations that have none, and keeps
    torch.compile from choosing kernels by timing. Random
    numbers need no switch: they come from keys and not from a generator with a state (`rng.py`).

    Raises:
        ConfigError: an environment variable asks for the contrary.
    """
    for name, allowed in ENVIRONMENT.items():
        value = os.environ.setdefault(name, allowed[0])
        if value not in allowed:
            wrong = f"{value} lets sums come in an order that varies, which train.deterministic excludes"
            raise ConfigError(name, wrong, f"{' or '.join(allowed)}, or not set")
    torch.use_deterministic_algorithms(True)
    # The switch would also fill all new memory, a pass over each tensor; nothing here reads what it has not
    # written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # sets the same number: else MKL sometimes uses fewer threads
    torch.set_num_threads(torch.get_num_threads())
