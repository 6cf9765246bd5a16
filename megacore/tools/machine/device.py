"""The device that a rank computes on, and how its process is set up for it."""

import os
from importlib.util import find_spec

import torch
import torch.nn.attention

from megacore.config import Config
from megacore.distributed.rank_info import RankInfo
from megacore.distributed.rendezvous import use_device
from megacore.errors import ConfigError
from megacore.tools.machine.cpu import set_up_cpu
from megacore.tools.machine.determinism import compute_deterministically
from megacore.tools.machine.gpu import set_up_environment
from megacore.tools.settings.launcher_settings import check_device


def take_device(config: Config, place: RankInfo) -> torch.device:
    """Picks the device that this rank computes on, and sets up the process for it.

    Raises `ConfigError` as `pick_device`, and if the environment excludes what the config asks for.
    """
    device = pick_device(config, place)
    set_up_device(config, place, device)
    return device


def pick_device(config: Config, place: RankInfo) -> torch.device:
    """The device that this rank computes on. Raises `ConfigError` if `train.device` is not available."""
    wanted = config.train.device
    if wanted != "cpu" and torch.backends.cuda.is_built():
        set_up_environment(config)
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        if config.model.kernels == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                "model.kernels",
                "triton needs a GPU, and this rank computes on the CPU",
                "auto, or TRITON_INTERPRET=1",
            )
        if config.parallel.backend == "nccl":
            raise ConfigError(
                "parallel.backend", "nccl needs GPUs, and this rank computes on the CPU", "auto or gloo"
            )
        return torch.device("cpu")
    if wanted == "auto":
        check_device()
    if config.parallel.backend == "gloo":
        raise ConfigError(
            "parallel.backend",
            "gloo moves no GPU tensors between stages",
            "auto or nccl; or train.device=cpu",
        )
    if not torch.cuda.is_available():
        raise ConfigError("train.device", "cuda was asked for and PyTorch sees no GPU", "auto or cpu")
    visible = torch.cuda.device_count()
    if place.local_rank >= visible > 1:
        wrong = f"local rank {place.local_rank} has no GPU of its own: this machine has {visible}"
        raise ConfigError("train.device", wrong, "at most one rank a GPU, or cpu")
    # A launcher may show each rank only its own GPU, as Slurm does with --gpus-per-task=1. `claim` tells that
    # from one GPU for all.
    device = torch.device("cuda", place.local_rank if place.local_rank < visible else 0)
    use_device(device)
    return device


def set_up_device(config: Config, place: RankInfo, device: torch.device) -> None:
    """Sets up this process to compute on `device`; to be called before the first group
    and the first product.
    """
    if device.type == "cpu":
        set_up_cpu(config, place.local_world_size)
    else:
        # By default cuBLAS may round the parts of a long sum to the inputs' 16 bits before it adds them up.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if config.train.deterministic:
        compute_deterministically()
    elif device.type == "cuda":
        take_flash_attention_3(device)


def take_flash_attention_3(device: torch.device) -> bool:
    """Replaces PyTorch's FlashAttention 2 with version 3 on a Hopper GPU where the package
    `flash_attn_interface` is installed; returns whether it was replaced.

    Only PyTorch's flash operations change. On Hopper `scaled_dot_product_attention` takes cuDNN's kernel
    first, so version 3 computes what cuDNN does not take, and the calls of many documents (`varlen.py`),
    which are flash operations themselves.
    """
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if (
        activate is None
        or find_spec("flash_attn_interface") is None
        or torch.cuda.get_device_capability(device)[0] != 9
    ):
        return False
    activate("FA3")
    return True
