"""The DeepSpeed engine: ZeRO stages 0 to 3 (Rajbhandari et al. 2020, 2021), with state on the
device, in host memory or on disk.

DeepSpeed works among the data ranks: it reduces gradients, clips by the global norm and steps. megacore keeps
tensor ranks, pipeline and checkpoints. Only this module imports DeepSpeed, and only when an engine is built.
`ENGINES` hands it to the core.
"""

import contextlib
import io
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.optim_groups import ParameterGroups
from megacore.distributed.buffers import buffers_of
from megacore.distributed.collectives import all_reduce
from megacore.distributed.communicator import Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import TensorSlice, materialise, shard_of
from megacore.engine.choose import Engines
from megacore.engine.protocol import Engine, StepStatistics
from megacore.errors import ConfigError
from megacore.kernels.grad_norm import clip_coefficient
from megacore.model.stage import Stage
from megacore.tools.deepspeed.zero import (
    MeshUnit,
    OneByOne,
    ReleaseViews,
    StartBackward,
    adamw_options,
    group_parameters,
    mark_parameters,
    remove_swap_files,
    swap_folders,
)
from megacore.tools.deepspeed.zero_state import ZeroState
from megacore.tools.settings.ds_settings import ds_settings


class DeepSpeedEngine(Engine):
    """An `Engine` that uses DeepSpeed, for the parameters of a rank's one stage (see `protocol`)."""

    def __init__(self, config: Config, stages: Sequence[Stage], mesh: Mesh) -> None:
        (stage,) = stages  # the config was refused otherwise
        if buffers := buffers_of(stages):
            raise ConfigError(
                "engine.kind",
                f"DeepSpeed updates no buffers, and the model has {next(iter(buffers))}",
                "native or fsdp",
            )
        if frozen := [name for name, parameter in stage.named_parameters() if not parameter.requires_grad]:
            raise ConfigError(
                "engine.kind",
                f"DeepSpeed is given every parameter, and the model's {frozen[0]} is frozen",
                "native or fsdp",
            )
        self.mesh, self.scales_loss = mesh, config.train.precision == "fp16"
        settings = ds_settings(config)
        self.zero_stage: int = settings["zero_optimization"]["stage"]
        self.clip = settings["gradient_clipping"]
        if self.zero_stage == 0:
            settings["gradient_clipping"] = (
                # megacore clips: DeepSpeed takes the norm in fp32, which on a CPU is wrong in the fifth digit
                0.0
            )
        place = (settings["zero_optimization"].get("offload_optimizer") or {}).get("device", "none")
        self.offloads, self.swap_folders = place != "none", swap_folders(settings)
        self.parameters = dict(stage.named_parameters())
        # what this engine sums over them, before the plan's last sum and in it
        self.first: dict[Group, list[nn.Parameter]] = {}
        self.last: dict[Group, list[nn.Parameter]] = {}
        for parameter in self.parameters.values():
            over = mesh.gradient_sum(shard_of(parameter))
            if over.tokens != mesh.token_axes:
                wrong = (
                    f"DeepSpeed sums all gradients over {'×'.join(mesh.token_axes)}, and this model "
                    "has some that are not"
                )
                raise ConfigError("engine.kind", wrong, "native or fsdp")
            for group in over.first:
                self.first.setdefault(group, []).append(parameter)
            if over.last is not None:
                self.last.setdefault(over.last, []).append(parameter)
        deepspeed = prepare(settings, mesh)
        self.access, self.comm = deepspeed.utils, deepspeed.comm
        mark_parameters(stage, mesh)
        every = ParameterGroups(config.optim)
        groups, options = group_parameters(stage, every, mesh), adamw_options(every.every[-1])
        if self.offloads and settings["zero_force_ds_cpu_optimizer"]:
            self.optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, **options)
        else:
            self.optimizer = torch.optim.AdamW(groups, **options, fused=True)
        unit = MeshUnit(mesh)
        if self.zero_stage == 3:
            # Without the global batch, which `Init` would check against a world of one rank.
            alone = {key: value for key, value in settings.items() if key != "train_batch_size"}
            deepspeed.zero.Init(OneByOne(stage, mesh.device), unit.data, config_dict_or_path=alone, mpu=unit)
        else:
            materialise(stage.parameters(), mesh.device)
        with contextlib.redirect_stdout(io.StringIO()):  # no setting turns off its memory figures
            self.ds, self.zero, *_ = deepspeed.initialize(
                model=stage, optimizer=self.optimizer, config=settings, mpu=unit
            )
        self.modules: Sequence[nn.Module] = [ReleaseViews(self.ds) if self.zero_stage == 3 else self.ds]
        self.skipped = self._scalar(0.0)  # steps, in stage 0; in others DeepSpeed counts them
        self.held = ZeroState(
            self.zero_stage, self.parameters, self.optimizer, self.zero, self.access, mesh, place
        )

    def loss_gradient(self, scale: float | Tensor) -> Tensor:
        """See `Engine`. DeepSpeed takes the mean over the data ranks, so the scale makes it a sum."""
        return self._scalar(self.mesh.gradient_group.size * self._loss_scale()) * scale

    def _scalar(self, value: float) -> Tensor:
        """A number on the device, in fp64, written there by the device: `torch.tensor` copies it from
        the host, which waits for that.
        """
        return torch.full((), value, dtype=torch.float64, device=self.mesh.device)

    def _loss_scale(self) -> float:
        return float(self.zero.loss_scale) if self.scales_loss else 1.0

    def root(self, outputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        handed: list[Tensor] = []
        return StartBackward.apply(handed, *outputs), handed

    def backward(
        self, chunk: int, root: tuple[Tensor, list[Tensor]], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        """See `Engine`. DeepSpeed reduces complete gradients."""
        start, handed = root
        handed.extend(gradients)
        self.ds.backward(start, scale_wrt_gas=False)
        if not last:
            self.ds.step()  # it counts microbatches, and updates only after the last

    def reduce_gradients(self) -> None:
        """See `Engine`. Gradients are already summed over ranks that see other tokens."""
        for group, parameters in self.first.items():
            self._sum(parameters, group)

    def reduce_tied(self) -> None:
        for group in self.mesh.shared.values():
            self._sum(self.last[group], group)

    @torch.no_grad()
    def _sum(self, parameters: list[nn.Parameter], group: Group) -> None:
        """Sums this rank's parts of some gradients over ranks that divide them in the same way."""
        if self.offloads and self.zero_stage < 3:
            self.zero._wait_for_offload_copies()  # asynchronous copies to host memory
        held = [(p, gradient) for p in parameters if (gradient := self._gradient(p)) is not None]
        if not held or group.size == 1:
            return
        summed = all_reduce(
            torch.cat([gradient.flatten() for _, gradient in held]).to(self.mesh.device), group
        )
        for (parameter, gradient), part in zip(held, summed.split([g.numel() for _, g in held]), strict=True):
            if self.zero_stage == 3:
                self.access.safe_set_local_grad(parameter, part)
                continue
            gradient.copy_(part.view_as(gradient))
            if self.offloads:  # DeepSpeed took the norm while it copied the gradient to host memory
                self.zero.norm_for_param_grads[self.zero.get_param_id(parameter)] = part.double().norm()

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's part of a gradient, not copied; None if it has none."""
        if self.zero_stage == 0:
            return parameter.grad
        if self.zero_stage == 3:
            return self.access.safe_get_local_grad(parameter)
        # DeepSpeed's own optimizer for bf16 in stage 1 keeps all of it on every rank
        whole = getattr(parameter, "_hp_grad", None)
        if whole is not None:
            return whole
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        return None if mapping is None else mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]

    def gradients(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        """See `Engine`. They are whole, gathered from the data ranks."""
        found = {}
        for name, parameter in self.parameters.items():
            shard = shard_of(parameter)
            box = TensorSlice(shard.global_shape, shard.offset, shard.local_shape, shard.copied)
            found[name] = (self.access.safe_get_full_grad(parameter), box)
        return found

    def step(self, lr: float, loss: Tensor | None = None) -> StepStatistics:
        """See `Engine`.

        DeepSpeed notices bad steps: a gradient that is not finite changes only the loss scale.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        if self.zero_stage == 0:
            norm = self._guard_plain_step()
            self.ds.step()
        else:
            self.ds.step()
            known = (
                self.ds.get_global_grad_norm() if self.ds.was_step_applied() else math.inf
            )  # stage 3 would repeat the norm of the step before
            norm = (
                known.to(self.mesh.device, torch.float64)
                if isinstance(known, Tensor)
                else self._scalar(known)
            )
        return StepStatistics(norm, self.skipped + self.ds.skipped_steps)

    @torch.no_grad()
    def _guard_plain_step(self) -> Tensor:
        """Returns the norm in stage 0, and makes AdamW clip and skip bad steps:
        there DeepSpeed does none of these.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                squares += parameter.grad.double().square().sum() / shard_of(parameter).copies(
                    but=self.mesh.token_axes
                )
        norm = all_reduce(squares, self.mesh.model_group).sqrt()
        skip = ~norm.isfinite()
        self.skipped += skip
        # AdamW's kernel reads these two.
        coefficient = clip_coefficient(norm, self.clip) if self.clip else torch.ones_like(norm)
        self.optimizer.found_inf, self.optimizer.grad_scale = skip.float(), (1.0 / coefficient).float()  # type: ignore[attr-defined]
        return norm

    def settle(self) -> None:
        """See `Engine`. DeepSpeed leaves nothing under way."""

    def tensors(self) -> dict[str, tuple[Tensor, TensorSlice]]:
        """See `Engine`. In stage 3 they may be copies."""
        return self.held.tensors()

    def state(self) -> dict[str, Any]:
        state = {"updates": self.held.updates, "skipped": float(self.skipped) + self.ds.skipped_steps}
        if self.scales_loss:
            scaler = self.zero.loss_scaler
            # DeepSpeed's gradients are larger by the number of data ranks.
            state["loss_scale"] = scaler.cur_scale * self.mesh.gradient_group.size
            state["good_steps"] = float(scaler.cur_iter - scaler.last_overflow_iter - 1)
        return state

    def load_state(self, state: dict[str, Any], tensors: Mapping[str, tuple[Tensor, TensorSlice]]) -> None:
        self.held.set_updates(state["updates"])
        self.skipped.zero_()
        self.ds.skipped_steps = int(state["skipped"])
        if self.scales_loss and "loss_scale" in state:  # else the checkpoint is of a run that did not scale
            scaler = self.zero.loss_scaler
            scaler.cur_scale = state["loss_scale"] / self.mesh.gradient_group.size
            scaler.cur_iter, scaler.last_overflow_iter = int(state["good_steps"]), -1
        self.held.publish(tensors)

    def close(self) -> None:
        self.ds.destroy()
        remove_swap_files(self.swap_folders, self.mesh)
        # This also forgets the groups that DeepSpeed keeps for the process. If they are left, stage 3 may
        # abort at exit.
        self.comm.destroy_process_group()


ENGINES: Engines = {"deepspeed": DeepSpeedEngine}  # for `TrainStep` and `Trainer`


def prepare(settings: dict[str, Any], mesh: Mesh) -> Any:
    """Imports DeepSpeed, sets the environment that it reads, builds its extensions, and
    returns the package.
    """
    os.environ.setdefault("LOCAL_RANK", str(mesh.place.local_rank))
    os.environ.setdefault("WORLD_SIZE", str(mesh.place.world_size))
    deepspeed = import_deepspeed(mesh.device)
    # DeepSpeed still calls two collectives by the names that torch 2.13 replaced.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    if "log_level" not in settings:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On a CPU it would first build shared-memory collectives, for a minute or more. Only its inference uses
    # them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():  # one rank: DeepSpeed needs a group nevertheless
        dist.init_process_group(
            mesh.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=mesh.timeout
        )
    with mesh.listeners.compilation():
        for builder in builders(settings, deepspeed):
            build(builder, is_loss_rank=mesh.place.local_rank == 0)
    return deepspeed


def import_deepspeed(device: torch.device) -> Any:
    """Imports the package without its messages, and tells it which kind of device to use."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed

    return deepspeed


def builders(settings: dict[str, Any], deepspeed: Any) -> list[Any]:
    """The builders of the extensions that DeepSpeed needs for these settings."""
    offload = settings["zero_optimization"].get("offload_optimizer") or {}
    names = ["AsyncIOBuilder"] if swap_folders(settings) else []
    if offload.get("device", "none") != "none" and settings["zero_force_ds_cpu_optimizer"]:
        names.append("CPUAdamBuilder")
    return [deepspeed.accelerator.get_accelerator().create_op_builder(name) for name in names]


def build_folder(builder: Any) -> Path:
    """The folder in which PyTorch compiles an extension; it is locked meanwhile."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(builder.name, False))


def build(builder: Any, *, is_loss_rank: bool) -> None:
    """Loads an extension of DeepSpeed.

    Says so if it must be compiled first, which takes minutes once on each machine.
    """
    folder = build_folder(builder)
    fresh, lock = not (folder / f"{builder.name}.so").exists(), folder / "lock"
    if lock.exists() and is_loss_rank:
        print(
            f"waiting until whoever compiles {builder.name} has done so; if nobody does, delete {lock}",
            file=sys.stderr,
            flush=True,
        )
    elif fresh and is_loss_rank:
        print(
            f"DeepSpeed compiles {builder.name} into {folder}, once a machine: some minutes",
            file=sys.stderr,
            flush=True,
        )
    start = time.monotonic()
    builder.load()
    if fresh and is_loss_rank:
        print(
            f"DeepSpeed compiled {builder.name} in {time.monotonic() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )


def check_machine(config: Config, device: torch.device) -> None:
    """Raises `ConfigError` if this machine lacks something that the config needs."""
    if find_spec("deepspeed") is None:
        raise ConfigError("engine.kind", "DeepSpeed is not installed", "pip install deepspeed, or native")
    stated = os.environ.get("DS_ACCELERATOR", device.type)
    if stated != device.type:
        wrong = f"DS_ACCELERATOR={stated} contradicts train.device, which is {device.type} here"
        right = f"train.device={stated}, or DS_ACCELERATOR={device.type}"
        raise ConfigError("environment", wrong, right)
    if config.train.precision == "fp16" and device.type == "cpu":
        raise ConfigError("train.precision", "DeepSpeed has no fp16 on CPUs", "bf16, or engine.kind=native")
    for builder in builders(settings := ds_settings(config), import_deepspeed(device)):
        if not builder.is_compatible():
            right = (
                "apt install libaio-dev, or offload to cpu"
                if swap_folders(settings)
                else "zero_force_ds_cpu_optimizer=false"
            )
            raise ConfigError(
                "engine.config", f"DeepSpeed cannot compile {builder.name} on this machine", right
            )
