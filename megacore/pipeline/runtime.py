"""Executes a lowered schedule on one rank, over the stages that it holds. Every action has one method.

There is one runtime for every schedule and layout: gradient accumulation on one device is the one-stage schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.distributed.mesh import Group
from megacore.distributed.wire import Work
from megacore.engine.protocol import Engine
from megacore.model.gpt import DTYPES, Stage
from megacore.plan.schedule import TRANSFERS, Action, Op, Plan


@dataclass(frozen=True)
class Microbatch:
    """Inputs and targets ``[batch, seq]``, on the device, and the key of its random numbers."""

    inputs: Tensor
    targets: Tensor
    key: int = 0


Key = tuple[int, int]  # microbatch, chunk


class Runtime:
    """Runs plans on this rank's stages.

    Between a microbatch's forward and its backward the autograd graph stays in memory. The input (for its gradient) and the output's
    *edge* (to start backward from) hold it; the output itself is freed once it is sent.
    """

    def __init__(self, stages: Sequence[Stage], engine: Engine | None, pp: Group) -> None:
        self.stages, self.engine, self.pp = stages, engine, pp
        self.modules: Sequence[nn.Module] = stages if engine is None else engine.modules
        train, first = stages[0].config.train, stages[0]
        tokens = train.micro_batch_size * train.seq_len // (first.group.size if first.sequence else 1)
        self.hidden_shape = (tokens, first.config.model.hidden_size)
        self.dtype = DTYPES[train.precision]
        self.device = first.device
        self.peak_live = 0  # the most forwards whose activations were held at once
        self.methods: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.REDUCE_GRADIENTS: lambda _: self._engine.reduce_gradients(),
            Op.REDUCE_TIED: lambda _: self._engine.reduce_tied(),
        }

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None, "a plan with backward needs an engine"
        return self.engine

    def run(self, plan: Plan, batch: Sequence[Microbatch], target_weight: float = 0.0) -> Tensor:
        """Executes this rank's part of `plan` over `batch`; collective over the pipeline.

        `target_weight` is the weight of a target's loss in what backward differentiates: 1 / targets of the global batch.
        Returns the sum of this rank's losses, a scalar on the device, zero on ranks without the last stage.
        """
        self.batch, self.target_weight = batch, target_weight
        self.loss = torch.zeros((), device=self.device, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)
        self.inputs: dict[Key, Tensor] = {}  # activations received or taken over, leaves of their microbatch's graph
        self.outputs: dict[Key, Tensor] = {}  # to be sent
        self.roots: dict[Key, Any] = {}  # where the engine starts backward
        self.output_gradients: dict[Key, Tensor] = {}  # received or taken over
        self.input_gradients: dict[Key, Tensor] = {}  # to be sent
        self.sending: list[tuple[Work, Tensor]] = []
        self.chunk_of = {stage: chunk for chunk, stage in enumerate(plan.placement[self.pp.rank])}
        self.stage_of = plan.placement[self.pp.rank]
        actions = plan.actions[self.pp.rank]
        i = 0
        while i < len(actions):
            if actions[i].op in TRANSFERS:
                stop = next(j for j in range(i, len(actions) + 1) if j == len(actions) or actions[j].op not in TRANSFERS)
                self._transfer(actions[i:stop])
                i = stop
            else:
                self.methods[actions[i].op](actions[i])
                i += 1
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()
        return self.loss

    def _forward(self, action: Action) -> None:
        key, chunk = (action.microbatch, action.chunk), action.chunk
        stage, microbatch = self.stages[chunk], self.batch[action.microbatch]
        x = microbatch.inputs if stage.first else self.inputs[key].requires_grad_(stage.training)
        with torch.set_grad_enabled(stage.training):
            output = self.modules[chunk](x, microbatch.key, targets=microbatch.targets if stage.last else None)
        if stage.last:
            self.loss += output.detach()
        else:
            self._hand_over(self.inputs, self.outputs, key, 1, output.detach())
        if stage.training:
            self.roots[key] = self._engine.root(output)
            self.peak_live = max(self.peak_live, len(self.roots))
        elif not stage.first:
            del self.inputs[key]

    def _backward(self, action: Action) -> None:
        key, chunk = (action.microbatch, action.chunk), action.chunk
        stage = self.stages[chunk]
        if stage.last:
            gradient = self._engine.loss_gradient(self.target_weight).to(self.loss.dtype)
        else:
            gradient = self.output_gradients.pop(key)
        self._engine.backward(chunk, self.roots.pop(key), gradient, last=action.last)
        if not stage.first:
            grad = self.inputs.pop(key).grad
            assert grad is not None
            self._hand_over(self.output_gradients, self.input_gradients, key, -1, grad)

    def _hand_over(self, here: dict[Key, Tensor], away: dict[Key, Tensor], key: Key, step: int, x: Tensor) -> None:
        """Gives a chunk's result to the next stage (`step` 1) or the one before (-1): directly if this rank holds it, else to be sent."""
        m, chunk = key
        neighbour = self.chunk_of.get(self.stage_of[chunk] + step)
        if neighbour is None:
            away[key] = x
        else:
            here[m, neighbour] = x

    def _transfer(self, actions: Sequence[Action]) -> None:
        """Posts adjacent transfers as one batch, waits for its receives, and then for the sends of the batch before.

        Those sends have long been received by then, so waiting costs no time and frees their memory. (Asking `is_completed` would not
        free it: gloo completes a send only when it is waited for.)
        """
        assert self.pp.wire is not None
        posts = [self._post(action) for action in actions]
        sent, self.sending = self.sending, []
        for post, work in zip(posts, self.pp.wire.transfer(posts), strict=True):
            if post.op is dist.irecv:
                work.wait()
            else:
                self.sending.append((work, post.tensor))
        for work, _ in sent:
            work.wait()

    def _post(self, action: Action) -> dist.P2POp:
        key, peer, group = (action.microbatch, action.chunk), self.pp.ranks[action.peer], self.pp.process_group
        if action.op is Op.SEND_ACTIVATION:
            return dist.P2POp(dist.isend, self.outputs.pop(key), peer, group)
        if action.op is Op.SEND_GRADIENT:
            return dist.P2POp(dist.isend, self.input_gradients.pop(key).contiguous(), peer, group)
        buffer = torch.empty(self.hidden_shape, dtype=self.dtype, device=self.device)
        received = self.inputs if action.op is Op.RECV_ACTIVATION else self.output_gradients
        received[key] = buffer
        return dist.P2POp(dist.irecv, buffer, peer, group)
