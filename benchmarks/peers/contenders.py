"""Who takes part in `benchmarks.peers`: in which layouts, in which environment, and in
what it differs from megacore.
"""

import argparse
import os
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers.environments import python_of
from benchmarks.peers.process import EQUAL, OWN
from benchmarks.rounds import Contender
from megacore.config import Config
from megacore.errors import ConfigError
from megacore.tools.settings.load import load
from megacore.tools.verify.layouts import parse as parse_layout

OURS = "megacore"
PRODUCTS = "products"  # what all must compute and nothing else: the bound beside the ratios
BEFORE = "megacore before"  # of the checkout that --before names
LAYOUTS = ("one", "dp2", "tp2", "pp2")
NO_SUCH_LAYOUT = "has no such layout here"

# How far a contender's loss may be from megacore's, in nats, after the same number of steps on the same
# tokens.
SAME_WEIGHTS, OTHER_WEIGHTS = 0.05, 0.1  # with the same initial weights; with others of the same spread


@dataclass(frozen=True)
class Peer:
    """A contender.

    `differs` says all in which its work or its arithmetic is not megacore's; `tolerance` None: another model.
    """

    environment: str
    layouts: tuple[str, ...]
    tolerance: float | None
    differs: str
    experts: bool = False  # whether it has mixtures of experts here


PEERS: dict[str, Peer] = {
    "plain-gpt-compiled": Peer(
        "torch",
        ("one", "dp2"),
        SAME_WEIGHTS,
        "one file of plain PyTorch, compiled as a whole; fp32 weights, under bf16 autocast rounds; DDP "
        "over data ranks",
    ),
    "transformers": Peer(
        "transformers",
        ("one", "dp2"),
        SAME_WEIGHTS,
        "fp32 weights, under bf16 autocast rounds; DDP over data ranks",
    ),
    "transformers-compiled": Peer(
        "transformers", ("one",), SAME_WEIGHTS, "the same, model and loss compiled as a whole"
    ),
    "deepspeed": Peer(
        "deepspeed",
        ("one", "dp2", "pp2"),
        SAME_WEIGHTS,
        "the model of transformers; fp32 ZeRO stage 0, bf16 stage 1; its pipeline cuts by parameters, the "
        "head on the last stage",
    ),
    "megatron-core": Peer(
        "megatron-core",
        (*LAYOUTS, "dp2ep2"),
        OTHER_WEIGHTS,
        "initial weights of its own; layers without Transformer Engine; on a CPU torch.cuda's names stand "
        "for the CPU",
        experts=True,
    ),
    "torchtitan": Peer(
        "torchtitan",
        LAYOUTS,
        None,
        "another model, Llama: RMS norms, rotary positions, swiglu of as many products (0.4 % fewer "
        "here), no biases, embeddings not "
        "tied; all parameters decay; sharded over data ranks (FSDP2); PyTorch's attention in place of "
        "flex attention",
    ),
}

NEEDED_BEFORE = "benchmarks/contender.py"  # what a checkout of megacore must have to run as it was

# The model that all have, torchtitan excepted.
GPT2 = {
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "bias": True,
    "tie_embeddings": True,
    "dropout": 0.0,
    "qk_norm": False,
}

# The mixture of experts that they have, if the config has experts: in every block, and without balance.
MIXTURE = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "bias": False,
    "tie_embeddings": True,
    "dropout": 0.0,
    "qk_norm": False,
    "first_dense": 0,
    "experts_every": 1,
    "router_scores": "softmax",
    "router_normalised": True,
    "router_scale": 1.0,
    "router_balance": "none",
    "router_z_loss": 0.0,
    "router_bias_rate": 0.0,
    "capacity_factor": None,
}

# The peers' loops have one learning rate, so megacore's has too, whatever the config's file says.
ONE_RATE = {"schedule": "constant", "warmup_steps": 0}
ALIKE = tuple(f"optim.{key}={value}" for key, value in ONE_RATE.items())


def config_of(args: argparse.Namespace, overrides: tuple[str, ...], world: int) -> Config:
    """What all are configured from.

    Raises `ConfigError` for another model than GPT-2's or `MIXTURE`, or other rates, than those that all
    have.
    """
    config = load(args.config, [*ALIKE, *overrides], world).config
    for section, values in (
        ("model", GPT2 if config.model.num_experts is None else MIXTURE),
        ("optim", ONE_RATE),
    ):
        for key, value in values.items():
            own = getattr(getattr(config, section), key)
            if own != value:
                raise ConfigError(f"{section}.{key}", f"{own} is not what the peers have", str(value))
    return config


def threads_of(layout: str) -> int:
    """Of each rank of a layout, whoever it belongs to: an equal share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // parse_layout(layout).world)


def contenders(
    args: argparse.Namespace,
    layout: str,
    precision: str,
    settings: str,
    states: dict[str, dict[str, Any]] | None,
) -> tuple[list[Contender], dict[str, str]]:
    """Who runs, and who cannot for want of an environment or because it has no such layout.

    `settings` are those of the peers' processes; megacore and the bare products always have megacore's.
    `states`: what processes must then turn out to have set (`process.expected`); None where nothing is set,
    as on GPUs.
    """
    wanted = parse_layout(layout)
    overrides = (*ALIKE, *args.overrides, f"train.precision={precision}", *wanted.overrides())
    if torch.cuda.is_available():
        overrides = (*overrides, "train.device=auto")
    config = config_of(args, overrides, wanted.world)
    train, mixture = config.train, config.model.num_experts is not None
    shared = (train.global_batch_size * train.seq_len, overrides, wanted.world, threads_of(layout))
    required = states or {}
    running = [
        Contender(name, name, *shared, process=required.get(EQUAL))
        for name in (OURS, *(() if mixture else (PRODUCTS,)))
    ]
    if args.before is not None:
        running.append(Contender(BEFORE, OURS, *shared, checkout=args.before, process=required.get(EQUAL)))
    absent = {}
    for name in args.peers:
        peer = PEERS[name]
        if layout not in peer.layouts:
            absent[name] = NO_SUCH_LAYOUT
            continue
        if mixture and not peer.experts:
            absent[name] = "has no mixture of experts here"
            continue
        try:
            python = python_of(peer.environment)
        except RuntimeError as reason:
            absent[name] = f"no environment: {reason}"
            continue
        running.append(
            Contender(name, name, *shared, python=python, settings=settings, process=required.get(settings))
        )
    return running, absent


def settings_here() -> tuple[str, ...]:
    """Those that differ on this machine: on GPUs megacore sets nothing for its process."""
    return (OWN,) if torch.cuda.is_available() else (OWN, EQUAL)
