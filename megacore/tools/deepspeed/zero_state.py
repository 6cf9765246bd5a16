"""Presents the master weights and moments that DeepSpeed keeps for a rank as pieces of logical tensors."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import TensorSlice, boxes_of_range, logical_name, piece_key, shard_of

# of tensors in a checkpoint, and what AdamW calls them
KINDS = {"model/": None, "adam_m/": "exp_avg", "adam_v/": "exp_avg_sq"}


class ZeroState:
    """This rank's ranges of elements of every parameter's master and moments.

    Stages 1 and 2 lay parameters end to end and divide the whole among data ranks. Stage 3 divides every
    parameter, padded to equal parts. Stage 0 divides nothing.
    """

    def __init__(
        self,
        stage: int,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        zero: Any,
        access: Any,
        mesh: Mesh,
        device: str,
    ) -> None:
        """`zero`: DeepSpeed's wrapper of `optimizer`.

        `access`: its functions for ZeRO 3's partitions (`deepspeed.utils`). `device`: where the optimizer's
        state is: none (on the device), cpu or nvme.
        """
        self.stage, self.parameters, self.optimizer, self.zero, self.access = (
            stage,
            parameters,
            optimizer,
            zero,
            access,
        )
        self.mesh, self.offloads, self.swaps = mesh, device != "none", device == "nvme"
        # axes over which a rank's part of the state is its own
        self.divided = mesh.token_axes if stage > 0 else ()
        # The moments are made now rather than at the first step, so that a checkpoint can be read into them.
        is_torch = isinstance(optimizer, torch.optim.AdamW)
        for i, flat in enumerate(self.flats()):
            with self._swapped_in(i):
                optimizer.state[flat] = {
                    "step": torch.zeros((), dtype=torch.float32, device=flat.device) if is_torch else 0,
                    "exp_avg": torch.zeros_like(flat),
                    "exp_avg_sq": torch.zeros_like(flat),
                }

    def flats(self) -> list[Tensor]:
        """This rank's master weights, which AdamW updates."""
        if self.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @contextlib.contextmanager
    def _swapped_in(self, index: int) -> Iterator[None]:
        """A context in which one of `flats` and its moments are in memory.

        Then they go back to disk, if they live there.
        """
        swapped = self.swaps and self.zero._swappable_optimizer_subgroup(index)
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_in(index)
        yield
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_out(index)

    @property
    def updates(self) -> float:
        """The number of steps that were not skipped."""
        return float(self.optimizer.state[self.flats()[0]]["step"])

    def set_updates(self, count: float) -> None:
        """Sets `updates`."""
        for flat in self.flats():
            state = self.optimizer.state[flat]
            state["step"] = (
                torch.full_like(state["step"], count) if torch.is_tensor(state["step"]) else int(count)
            )

    def tensors(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        """The pieces by name (see `shard.piece_key`), not copied; in stage 3 they may be copies."""
        pieces: dict[str, tuple[Tensor, TensorSlice]] = {}
        for prefix, kind in KINDS.items():
            for name, parameter in self.parameters.items():
                start, held = self._held(parameter, kind)
                shard = shard_of(parameter)
                stop = min(start + held.numel(), prod(shard.local_shape))  # stage 3 pads
                for first, box in boxes_of_range(shard, start, max(start, stop)):
                    view = held[first - start : first - start + prod(box.local_shape)].view(box.local_shape)
                    copied = shard.copied_along(but=self.divided)
                    pieces[piece_key(f"{prefix}{name}", pieces)] = (view, replace(box, copied=copied))
        return pieces

    def _held(self, parameter: nn.Parameter, kind: str | None) -> tuple[int, Tensor]:
        """This rank's range of a parameter's master weight (kind None) or moment:
        its start, and its elements.
        """
        if self.stage == 0:
            return 0, (parameter.data if kind is None else self.optimizer.state[parameter][kind]).view(-1)
        if self.stage < 3:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # other ranks have all of it
                return 0, torch.empty(0)
            flat, place = (
                self.optimizer.param_groups[mapping.param_group_index]["params"][0],
                mapping.hp_fragment_address,
            )
            whole = flat.data if kind is None else self.optimizer.state[flat][kind]
            return mapping.lp_fragment_address.start, whole[place.start : place.start + place.numel]
        get = self.access
        held = (
            get.safe_get_local_fp32_param(parameter)
            if kind is None
            else get.safe_get_local_optimizer_state(parameter, kind)
        )
        if self.offloads:  # copies: values that were read from disk are in a buffer that is used again
            held = held.to("cpu", copy=self.swaps)
        return self.mesh.gradient_group.rank * held.numel(), held.detach()

    @torch.no_grad()
    def publish(self, tensors: Mapping[str, tuple[Tensor, TensorSlice]]) -> None:
        """Takes over values that were copied into the result of `tensors()`, and copies
        the masters into the parameters.
        """
        if self.stage in (1, 2):
            self.zero.update_lp_params()
        elif self.stage == 3:
            self._put_back(tensors)

    def _put_back(self, tensors: Mapping[str, tuple[Tensor, TensorSlice]]) -> None:
        """Gives DeepSpeed the values that were read into `tensors`, in stage 3."""
        runs: dict[str, list[Tensor]] = defaultdict(list)
        for key, (tensor, _) in tensors.items():
            runs[logical_name(key)].append(tensor.flatten())
        for prefix, kind in KINDS.items():
            for name, parameter in self.parameters.items():
                held = torch.zeros_like(self._held(parameter, kind)[1])
                if run := runs[f"{prefix}{name}"]:
                    whole = torch.cat(run)
                    held[: whole.numel()].copy_(whole)
                if kind is None:
                    self.access.safe_set_local_fp32_param(parameter, held)
                else:
                    self.access.safe_set_local_optimizer_state(parameter, held, kind)
        # DeepSpeed's own step ends with this.
        self.zero._partition_all_parameters()
        for i in range(len(self.flats())):
            with self._swapped_in(i):
                self.zero._reassign_or_swap_out_partitioned_parameters(i)
        self.zero._post_step(set())
