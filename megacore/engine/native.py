"""The native engine: every data rank holds whole optimizer state, gradients are summed in fp32, AdamW steps."""

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megacore.comm import all_reduce
from megacore.config import Config
from megacore.engine.optimizer import ALIGNMENT, AdamW, LossScale, fill_buffers
from megacore.engine.protocol import StepStatistics
from megacore.engine.reduce import GradientReducer
from megacore.mesh import Mesh
from megacore.model.gpt import Stage
from megacore.tensor_parallel.shard import Shard


class NativeEngine:
    """`Engine` over a stage's parameters (see `protocol`)."""

    def __init__(self, config: Config, stage: Stage, mesh: Mesh) -> None:
        self.mesh, self.clip = mesh, config.optim.grad_clip
        self.buffers = fill_buffers(stage)
        self.reducer = GradientReducer(self.buffers, mesh.dp, mesh.tp, config.engine.bucket_mib)
        self.optimizer = AdamW(self.buffers, config.optim)
        # Gradients are of the mean over the global batch; the scale starts where its microbatches' own would be 2^16.
        microbatches = config.train.global_batch_size // config.train.micro_batch_size
        self.loss_scale = LossScale(config.train.precision == "fp16", 2.0**16 * microbatches, mesh.device)
        self.skipped = torch.zeros((), device=mesh.device, dtype=torch.float64)
        self.counted = [buffer.rows_where(lambda slot: slot.shard.counted) for buffer in self.buffers]
        self.tied = [slot.view(b.gradients) for b in self.buffers for slot in b.slots if slot.name == "embedding.weight"]

    def loss_gradient(self, scale: float) -> Tensor:
        """See `Engine`."""
        return self.loss_scale.value * scale

    def backward(self, output: GradientEdge, gradient: Tensor, *, last: bool) -> None:
        """See `Engine`."""
        if last:
            self.reducer.arm()
        torch.autograd.backward([output], [gradient])

    def reduce_gradients(self) -> None:
        """See `Engine`."""
        self.reducer.finish()

    def reduce_tied(self) -> None:
        """See `Engine`."""
        assert self.mesh.tied is not None
        for gradient in self.tied:
            all_reduce(gradient, self.mesh.tied)

    def gradients(self) -> dict[str, tuple[Tensor, Shard]]:
        """See `Engine`."""
        return {slot.name: (slot.view(buffer.gradients), slot.shard) for buffer in self.buffers for slot in buffer.slots}

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of the gradient of the whole model, a replicated or tied parameter counted once; fp64 scalar, scaled."""
        # Norms of short rows, then fp64: PyTorch's CPU norm of a whole fp32 tensor is off by 4e-6 at half a million elements and
        # by 7e-4 at 16 million (measured with 2.13), and so would depend on how a layout cuts it.
        squares = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for buffer, counted in zip(self.buffers, self.counted, strict=True):
            rows = torch.linalg.vector_norm(buffer.gradients.view(-1, ALIGNMENT), dim=1).double()
            squares += torch.dot(rows.square_(), counted)
        return all_reduce(squares, self.mesh.model).sqrt()

    @torch.no_grad()
    def step(self, lr: float) -> StepStatistics:
        """See `Engine`. A step whose gradient is not finite changes nothing but the loss scale."""
        norm = self.grad_norm() / self.loss_scale.value
        skip = (~norm.isfinite()).float()
        coefficient = (self.clip / (norm + 1e-6)).clamp(max=1.0) if self.clip else torch.ones_like(norm)
        self.optimizer.step(lr, self.loss_scale.value / coefficient, skip)
        self.skipped += skip
        self.loss_scale.update(skip)
        for buffer in self.buffers:
            buffer.publish()
        self.reducer.clear()
        return StepStatistics(norm, self.skipped.clone())

    def tensors(self) -> dict[str, tuple[Tensor, Shard]]:
        """See `Engine`: for every parameter its master and both moments."""
        named = {}
        for i, buffer in enumerate(self.buffers):
            first, second = self.optimizer.moments(i)
            for slot in buffer.slots:
                for kind, flat in (("model", buffer.master), ("adam_m", first), ("adam_v", second)):
                    named[f"{kind}/{slot.name}"] = (slot.view(flat), slot.shard)
        return named

    def state(self) -> dict[str, float]:
        """See `Engine`. Reads the device."""
        scale = self.loss_scale
        numbers = torch.stack([self.optimizer.updates.double(), self.skipped, scale.value, scale.good_steps]).tolist()
        return dict(zip(("updates", "skipped", "loss_scale", "good_steps"), numbers, strict=True))

    def load_state(self, state: dict[str, float]) -> None:
        """See `Engine`."""
        self.optimizer.set_updates(state["updates"])
        self.skipped.fill_(state["skipped"])
        if self.loss_scale.dynamic and state["loss_scale"] > 1.0:  # else the checkpoint is of a run that did not scale
            self.loss_scale.value.fill_(state["loss_scale"])
            self.loss_scale.good_steps.fill_(state["good_steps"])
        for buffer in self.buffers:
            buffer.publish()
