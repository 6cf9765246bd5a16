"""What DeepSpeed gets from megacore: its view of the mesh, marked and grouped parameters, a
scalar to start backward from.
"""

import contextlib
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.config.optim_groups import ParameterGroup, ParameterGroups
from megacore.distributed.collectives import all_reduce
from megacore.distributed.communicator import Group
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import materialise, shard_of


class MeshUnit:
    """The mesh as DeepSpeed asks for it (its `mpu`).

    Model parallel is all of tp × pp: over fewer ranks every pipeline stage would clip by a norm of its own.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.alone: dist.ProcessGroup | None = None
        self.data = self._process_group(mesh.gradient_group)
        groups = {
            "data_parallel": mesh.gradient_group,
            "model_parallel": mesh.model_group,
            "tensor_model_parallel": mesh.tp,
        }
        for name, group in groups.items():
            answers = {
                "group": self._process_group(group),
                "world_size": group.size,
                "rank": group.rank,
                "group_ranks": list(group.ranks),
            }
            for what, answer in answers.items():  # it calls get_data_parallel_world_size() and the like
                setattr(self, f"get_{name}_{what}", lambda answer=answer: answer)

    def _process_group(self, group: Group) -> dist.ProcessGroup:
        """A communicator also for one rank, because DeepSpeed takes no group for the world."""
        if group.process_group is not None:
            return group.process_group
        if self.alone is None:
            mesh = self.mesh
            self.alone = dist.new_group(
                [mesh.place.rank], timeout=mesh.timeout, backend=mesh.backend, use_local_synchronization=True
            )
        return self.alone


class StartBackward(torch.autograd.Function):
    """A scalar from which backward starts with a gradient that is known only then.

    DeepSpeed's `backward` takes only scalars. The usual scalar, ``(output · gradient).sum()``, would keep the
    outputs in memory.

    forward      0
    backward     the content of `handed`; it contains the scalar's own gradient, DeepSpeed's loss scale,
                 already
    """

    @staticmethod
    def forward(ctx: Any, handed: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.handed = handed
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.handed)
        ctx.handed.clear()
        return None, *gradients


class ReleaseViews(nn.Module):
    """Wraps ZeRO 3's module so that backward makes views of parameters again, and
    autograd does not keep them.

    ZeRO 3 gathers a parameter while its module runs, and again for its backward. A view that autograd keeps
    (such as the query, key and value weight as a matrix) would hold the gathered memory from one to the
    other.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = [module]  # not registered: that would rename its parameters

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Runs the module."""
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            return self.inner[0](*args, **options)


def _pack(saved: Tensor) -> Any:
    base = saved._base
    if not isinstance(base, nn.Parameter):
        return saved
    return base, saved.shape, saved.stride(), saved.storage_offset() - base.storage_offset()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    base, shape, stride, offset = packed
    return base.detach().as_strided(shape, stride, base.storage_offset() + offset)


class OneByOne(nn.Module):
    """A stage on `meta` as ZeRO 3 divides it: a parameter gets memory when it is its turn, whole, and
    then this rank's part is left.
    """

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner, self.device = [stage], device  # not registered: as in `ReleaseViews`

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The stage's, in order."""
        for parameter in self.inner[0].parameters(recurse):
            materialise([parameter], self.device)
            yield parameter


def mark_parameters(module: nn.Module, mesh: Mesh) -> None:
    """Marks what counts in DeepSpeed's global norm: split parameters on every tensor rank, others on
    the first, second copies nowhere.
    """
    for parameter in module.parameters():
        shard = shard_of(parameter)
        last = mesh.gradient_sum(shard).last
        parameter.model_parallel = parameter.tensor_model_parallel = bool(shard.split_over)  # type: ignore[attr-defined]
        parameter.ds_pipe_replicated = last is not None and last.rank > 0  # type: ignore[attr-defined]


def group_parameters(module: nn.Module, groups_of: ParameterGroups, mesh: Mesh) -> list[dict[str, Any]]:
    """Groups parameters that are treated alike, for an AdamW; collective.

    DeepSpeed makes one flat tensor of each group. `factor` is that on the rate.

    Those that are summed over tensor ranks, or between stages, have their own groups, so that the ranks that
    sum divide them alike.
    """
    alike: dict[tuple[ParameterGroup, bool, tuple[str, ...]], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        shard = shard_of(parameter)
        alike[groups_of.of(name, shard), shard.decay, shard.partial_over].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": own, "factor": group.factor, "weight_decay": group.weight_decay if decay else 0.0}
        | adamw_options(group)
        for (group, decay, _), own in alike.items()
    ]
    # DeepSpeed's norm is one collective a group, over the model's ranks. All ranks need equally many groups,
    # or they hang.
    count = all_reduce(torch.tensor(len(groups), device=mesh.device), mesh.model_group, dist.ReduceOp.MAX)
    for _ in range(int(count) - len(groups)):
        largest = max(groups, key=lambda group: len(group["params"]))
        groups.append(largest | {"params": [largest["params"].pop()]})
    return groups


def adamw_options(group: ParameterGroup) -> dict[str, Any]:
    """The settings of a group as PyTorch's AdamW and DeepSpeed's call them."""
    settings = group.rule.settings
    return {"lr": group.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}


def swap_folders(settings: dict[str, Any]) -> list[Path]:
    """The folders where DeepSpeed keeps tensors on disk under these settings."""
    zero = settings["zero_optimization"]
    offloads = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    return sorted({Path(offload["nvme_path"]) for offload in offloads if offload.get("device") == "nvme"})


def remove_swap_files(folders: list[Path], mesh: Mesh) -> None:
    """Removes files that DeepSpeed leaves on disk, and folders that are empty then; collective."""
    for folder in folders:
        for own in folder.glob(f"zero_stage_3/*/rank{mesh.place.rank}"):
            shutil.rmtree(own)
    if folders:
        mesh.barrier()
    for folder in folders:
        with contextlib.suppress(OSError):  # another rank was faster, or others' files are in it
            for path in [*folder.glob("zero_stage_3/*"), folder / "zero_stage_3", folder]:
                path.rmdir()
