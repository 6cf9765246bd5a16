"""Mistakes that rows of `tests/equal.py` plant.

They are not in the catalog, because each one needs the config of its row.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore.engine.averages import WeightAverages
from megacore.engine.fsdp import FSDPEngine
from megacore.kernels.adamw import AdamW
from megacore.model import latent_attention
from megacore.optimizers.lion import Lion
from megacore.pipeline.runtime import Runtime
from megacore.train.step import TrainStep
from tests.expert_rows import alike
from tests.faults import both

patch = mock.patch.object


def lion_betas_swapped() -> Any:
    """Lion steps by the mean that it should keep, and keeps the one that it should step by."""
    direction = Lion.direction

    def swapped(self: Lion, shards: Any) -> Any:
        betas = {"lion_beta1": self.settings.lion_beta2, "lion_beta2": self.settings.lion_beta1}
        return direction(Lion(self.settings.model_copy(update=betas)), shards)

    return patch(Lion, "direction", swapped)


def first_weights_averaged() -> Any:
    """The mean of `optim.ema` includes the first weights, as if there had been a step before the first."""
    update = WeightAverages.update
    return patch(WeightAverages, "update", lambda self, updates, skip: update(self, updates + 1, skip))


def last_batch_size_at_every_step() -> Any:
    """A growing batch's sum over few samples is weighted as the mean over many."""

    def weight_of_full_batch(self: TrainStep, batch: Any, field: str) -> float:
        train = self.config.train
        return 1.0 / (train.global_batch_size * train.seq_len)

    return patch(TrainStep, "one_over_count", weight_of_full_batch)


def shared_key_gradient_unsummed() -> Any:
    """The gradient of latent attention's shared key comes from a rank's own heads alone."""
    return patch(latent_attention, "enter_tensor_parallel", lambda x, *_: x)


def latents_not_partial() -> Any:
    """Gradients of latents from a rank's own tokens pass as gradients from all tokens."""
    replicated = latent_attention.replicated
    return patch(latent_attention, "replicated", lambda group, **_: replicated(group))


def unused_experts_undecayed() -> Any:
    """All tokens go to the first experts, and AdamW does not decay the weights of the others."""
    step = AdamW.step

    def step_where_gradients_are(self: AdamW, *arguments: Any) -> None:
        before = [master.clone() for master in self.masters]
        step(self, *arguments)
        with torch.no_grad():
            for master, old_master, gradient in zip(self.masters, before, self.gradients, strict=True):
                master.copy_(torch.where(gradient == 0, old_master, master))

    return both(alike(), patch(AdamW, "step", step_where_gradients_are))


def fsdp_gradients_averaged() -> Any:
    """FSDP2's default: data ranks' gradients are averaged, though losses are already weighted."""
    from torch.distributed.fsdp import FSDPModule

    return patch(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def fsdp_partial_gradients_unsummed() -> Any:
    """Partial gradients are not summed over tensor ranks, nor tied ones over stages."""
    return patch(FSDPEngine, "_sum", lambda *_: None)


def gradient_lost_at_cuts(name: str) -> Any:
    """At every cut the gradient of the tensor `name` is lost."""
    hand_over = Runtime._hand_over

    def without_gradient(
        self: Runtime, here: Any, away: Any, key: Any, step: int, flows: dict[str, Tensor]
    ) -> None:
        if step < 0 and name in flows:
            flows = flows | {name: flows[name].new_zeros(flows[name].shape)}
        hand_over(self, here, away, key, step, flows)

    return patch(Runtime, "_hand_over", without_gradient)


def gradient_of_first_block_lost() -> Any:
    """The tensor that speedrun's first block hands to later ones has no gradient across a cut."""
    return gradient_lost_at_cuts("first")


def gradient_of_patches_lost() -> Any:
    """The image that vision's first layer hands to later ones has no gradient across a cut."""
    return gradient_lost_at_cuts("patches")
