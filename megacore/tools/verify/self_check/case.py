"""The small model that the self-checks run, with its microbatches, its losses and its logits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.model.batch import Microbatch
from megacore.model.choose import layers_of
from megacore.model.layers import fields_of, losses_of
from megacore.model.stage import Stage, whole_model
from megacore.rng import key_of
from megacore.tools.verify.record import noise
from megacore.tools.verify.reference import (
    Corpus,
    Sample,
    batch_of,
    batch_sizes,
    microbatch,
    training_samples,
)

# Overrides of the small config. All else is the path that trains: the config's attention, chunked loss and
# recomputation, which `reference.PLAIN` replaces by plainer ones.
EXACT = (
    "train.precision=fp64",
    "engine.reduce_dtype=fp32",
    "engine.compression=null",
    "model.kernels=eager",
)


class Case:
    """A small config in fp64, for one process.

    Attributes:
        losses: the model's losses, by name.
        weights: what each loss's sum is multiplied by, coefficient / count in the first step, by name.
        microbatches: those of the first step; the first of them has targets.
        other_microbatches: those of the second step, with other tokens and keys.
        folder: where a checkpoint may be saved. It stays if this process is killed, so the caller removes it.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.layers = layers_of(config)
        self.losses, self.sources = losses_of(self.layers), fields_of(self.layers)
        self.sizes = batch_sizes(config)
        self.samples = training_samples(config, sum(self.sizes))
        self.microbatches, self.other_microbatches = self._step(1), self._step(min(2, len(self.sizes)))

        # The runtime weighs by the count in the global batch, so that all microbatches weigh alike.
        self.weights: dict[str, Tensor] = {}
        for name, loss in self.losses.items():
            count = sum(int((batch[loss.over] != IGNORED).sum()) for batch in self.microbatches)
            self.weights[name] = torch.tensor(loss.coefficient / max(count, 1), dtype=torch.float64)

    @cached_property
    def without_drops(self) -> "Case":
        """The same case without dropout and without a capacity of experts.

        Both make training differ from evaluation on purpose, and a capacity drops rows by what other samples
        and later tokens need.
        """
        model = self.config.model
        drops = {name: 0.0 for name in type(model).model_fields if name.endswith("dropout")}
        settings = model.model_copy(update=drops | {"capacity_factor": None})
        return Case(self.config.model_copy(update={"model": settings}), self.folder)

    @cached_property
    def rounds_to(self) -> str | None:
        """The dtype of fewer bits to which a layer rounds fp64 numbers, as by `x.float()`; None if none does.

        The proof then finds rounding where it looks for mistakes, as do checks that need fp64's precision.
        """
        model = self.build()  # what draws first weights may round them
        with Conversions() as conversions:
            self.loss(model, self.microbatches[0])
        return next(iter(conversions.narrower), None)

    def build(self) -> Stage:
        """Return a new whole model in training mode, at step 1, with noise added to every parameter.

        Zeros and ones hide mistakes: what a weight of 0 multiplies has no gradient, and neither has
        anything before it. The noise depends on the parameter's name only.
        """
        model = whole_model(self.config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(noise(name, tuple(parameter.shape), torch.float64))
        model.at_step(1)
        return model

    def microbatch(self, samples: Sequence[tuple[Corpus, Sample]], key: int = 0) -> Microbatch:
        """Return the microbatch of some samples, with all fields that the model's layers declare."""
        return microbatch(batch_of(samples), self.sources, key)

    def loss_sums(
        self, model: Stage, batch: Microbatch, gradients: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the sum of each loss over a microbatch, by name.

        `gradients`: what backward will start with at each loss, as the runtime knows it before the forward;
        some losses then compute the gradient of their inputs in forward.
        """
        sums: dict[str, Tensor] = model({}, batch, gradients=gradients)[1]
        return sums

    def loss(self, model: Stage, batch: Microbatch, gradients: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return what training minimises over a microbatch: the weighted sum of all losses' sums."""
        sums = self.loss_sums(model, batch, gradients)
        return torch.stack([self.weights[name] * value for name, value in sums.items()]).sum()

    def logits(self, model: Stage, batch: Microbatch) -> Tensor:
        """Return the logits ``[batch · seq, vocabulary]`` of a whole pass without targets.

        Raises `ConfigError` if the model's last layer has no method `logits`.
        """
        return model.logits(model({}, replace(batch, targets=None))[0]["hidden"])

    def _step(self, step: int) -> list[Microbatch]:
        """The microbatches of a step, with the runtime's keys."""
        size = self.config.train.micro_batch_size
        first = sum(self.sizes[: step - 1])
        return [
            self.microbatch(
                self.samples[first + index * size : first + (index + 1) * size],
                key_of(self.config.train.seed, step, index),
            )
            for index in range(self.sizes[step - 1] // size)
        ]


class Conversions(TorchFunctionMode):
    """Notes to which dtypes tensors with a gradient are rounded while the context lasts.

    Others may be: experts' weights, for example, are only compared with each other in fewer bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrower: list[str] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Call a function of PyTorch and look whether it rounds."""
        result = function(*arguments, **(options or {}))
        dtype = result.dtype if isinstance(result, Tensor) and result.is_floating_point() else torch.float64
        if dtype != torch.float64 and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            self.narrower.append(str(dtype))
        return result
