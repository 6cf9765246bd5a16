"""Training as launch/pretrain.py does it: the real stage, engine, runtime and mesh; no
checkpoints, no logs.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernel_inputs import zipf_tokens
from megacore.config import Config
from megacore.context_parallel.sharding import positions_of, runs_of
from megacore.data.packing import Bounds
from megacore.distributed.communicator import SOLO, Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.rank_info import RankInfo
from megacore.engine.choose import build_engine
from megacore.model.batch import Microbatch
from megacore.model.layers import DTYPES
from megacore.model.stage import Stage
from megacore.pipeline.partition import layer_ranges
from megacore.tensor_parallel.gradient import WeightGradPart
from megacore.tools.choices.compiling import settled
from megacore.tools.choices.partition import partitioned
from megacore.tools.crowd import share_cores
from megacore.tools.deepspeed.engine import ENGINES
from megacore.tools.machine.device import take_device
from megacore.tools.settings.load import load
from megacore.train.loader import Loader, SampleSource
from megacore.train.step import StepResult, TrainStep


def join(config: Config, place: RankInfo) -> Mesh:
    """The mesh, with this rank's device set up as for training; collective."""
    return Mesh(partitioned(config), place, take_device(config, place))


def random_batch(
    config: Config, device: torch.device, seed: int = 0, cp: Group = SOLO, *, zipf: bool = False
) -> list[Microbatch]:
    """A step's microbatches for one data rank, of random tokens; this context rank's part of them.

    The tokens are uniform, or with `zipf` as frequent as in text, where some occur in every sentence.
    """
    train = config.train
    generator = torch.Generator().manual_seed(seed)
    shape = (config.num_microbatches, train.micro_batch_size, train.seq_len + 1)
    vocabulary = config.model.vocab_size
    if zipf:
        tokens = zipf_tokens(vocabulary, shape, generator)
    else:
        tokens = torch.randint(vocabulary, shape, generator=generator)
    tokens = tokens.to(device)
    own = torch.from_numpy(positions_of(runs_of(train.seq_len, cp.size, cp.rank))).to(device)
    return [Microbatch(t[:, own], t[:, own + 1], key) for key, t in enumerate(tokens)]


class RandomStream:
    """Uniformly random tokens as a training stream: a stand-in where the config names no corpus."""

    def __init__(self, config: Config) -> None:
        self.length, self.vocab_size = config.train.seq_len + 1, config.model.vocab_size

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """``[n]`` indices → tokens ``[n, seq_len + 1]``, the same for the same first index."""
        return np.random.default_rng(int(indices[0])).integers(
            self.vocab_size, size=(len(indices), self.length)
        )

    def learned(self, indices: np.ndarray) -> None:
        """All tokens are."""

    def documents(self, indices: np.ndarray) -> list[Bounds]:
        """``[n]`` indices → a document each."""
        return [(0, self.length) for _ in indices]


def trainer_flags() -> dict[str, bool]:
    """Return the flags that a run's ranks share in each step, none of them raised."""
    return {"stop": False, "save_failed": False}


class Training:
    """One rank's part in the steps of a run. Construction and `step` are collective.

    With a `stream` the trainer's loader reads a new batch for every step; without, all steps have the same
    random tokens, with `zipf` as frequent as in text.
    """

    def __init__(
        self, config: Config, mesh: Mesh, stream: SampleSource | None = None, *, zipf: bool = False
    ) -> None:
        # as a run does: what `train.compile=auto` becomes, and why
        config, self.compile_choice = settled(config, mesh, None)
        self.config, self.mesh = config, mesh
        self.train_step = TrainStep(config, mesh, engines=ENGINES)
        self.engine = self.train_step.engine
        self.batch = random_batch(config, mesh.device, mesh.sample_group.rank, mesh.cp, zipf=zipf)
        self.loader = None if stream is None else Loader(config, mesh, stream)
        self.sharing = share_cores(config, mesh.place.world_size, mesh.device)
        self.steps = 0
        self.figures: StepResult[torch.Tensor] | None = None
        self.before_update: Callable[[], None] = lambda: None

    def step(self) -> float:
        """Seconds of one step, from when all ranks are ready until this rank's device is done."""
        self.meet()
        started = perf_counter()
        self.work()
        self.wait()
        return perf_counter() - started

    def loss(self) -> float | None:
        """The mean loss of the global batch in the last step."""
        return None if self.figures is None else float(self.figures.loss)

    def meet(self) -> None:
        """Waits until all ranks and their devices are ready."""
        self.mesh.barrier()
        self.wait()

    def work(self) -> None:
        """A step, without waiting for the device."""
        self.steps += 1
        for fitting in self.sharing:
            fitting.fit()
        self.figures = self.train_step(
            self.steps, self.batch_of(self.steps), trainer_flags, self.before_update
        )
        self.engine.settle()  # in a run, under the next forward pass: here it may not hide between two turns

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()

    def batch_of(self, step: int) -> list[Microbatch]:
        """The microbatches of a step."""
        self.mesh.listeners.phase("data")
        return self.batch if self.loader is None else self.loader.read(step)


class LoneStage:
    """One stage of a pipeline in a process of its own: what its forward and its
    backward take with nobody to wait for.
    """

    def __init__(self, path: str, overrides: list[str], index: int, stages: int) -> None:
        pipeline = partitioned(
            load(path, [*overrides, f"parallel.pipeline={stages}"], world_size=stages).config
        )
        config = load(path, overrides).config
        self.mesh = join(config, RankInfo())
        self.stage = Stage(config, layer_ranges(pipeline)[index], self.mesh, self.mesh.device)
        self.engine = build_engine(config, [self.stage], self.mesh)
        self.batch = random_batch(config, self.mesh.device)
        tokens = config.train.micro_batch_size * config.train.seq_len
        self.hidden = torch.randn(tokens, config.model.hidden_size, dtype=DTYPES[config.train.precision])

    def measure(self) -> list[float]:
        """Median seconds of a microbatch's forward, its backward, and the two halves of a split
        backward, over one step's microbatches.
        """
        taken: list[list[float]] = [[], [], [], []]
        parts: list[WeightGradPart] = []

        def timed(kind: int, work: Callable[[], Any]) -> Any:
            started = perf_counter()
            result = work()
            taken[kind].append(perf_counter() - started)
            return result

        for split, microbatch in [
            (split, microbatch) for microbatch in self.batch for split in (False, True)
        ]:
            root, gradients = timed(0, partial(self.forward, microbatch))
            if split:
                parts = timed(2, partial(self.engine.backward_input, 0, root, gradients))
                timed(3, partial(self.engine.backward_weight, 0, parts, last=False))
            else:
                timed(1, partial(self.engine.backward, 0, root, gradients, last=False))
        self.engine.step(0.0)
        return [median(seconds) for seconds in taken]

    def forward(self, microbatch: Microbatch) -> tuple[Any, list[Tensor]]:
        """Where backward starts, and with which gradients."""
        dtype = torch.float64 if self.stage.config.train.precision == "fp64" else torch.float32
        gradients = {
            name: torch.full((), 1e-6, dtype=dtype, device=self.stage.device) for name in self.stage.losses
        }
        taken = {name: self.hidden.clone().requires_grad_() for name in self.stage.takes}
        flow, losses = self.stage(taken, microbatch, gradients=gradients)
        given = [*(torch.full_like(x, 1e-6) for x in flow.values()), *(gradients[name] for name in losses)]
        return self.engine.root([*flow.values(), *losses.values()]), given
