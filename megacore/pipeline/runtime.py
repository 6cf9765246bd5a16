"""Executes a lowered schedule on one stage: an action, a method.

One runtime for every schedule and every layout: gradient accumulation on one device is the one-stage schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.comm import Begun
from megacore.engine.protocol import Engine
from megacore.ledger import Channel
from megacore.mesh import Group
from megacore.model.gpt import DTYPES, Stage
from megacore.pipeline.schedule import TRANSFERS, Action, Op, Plan


@dataclass(frozen=True)
class Microbatch:
    """Inputs and targets ``[batch, seq]``, on the device, and the key of its random numbers."""

    inputs: Tensor
    targets: Tensor
    key: int = 0


class Runtime:
    """Runs plans on this rank's stage.

    What lives between a microbatch's forward and its backward is the autograd graph, held by the input (for its
    gradient) and the output's *edge* (to start backward from): the output itself is freed once it is sent.
    """

    def __init__(self, stage: Stage, engine: Engine | None, pp: Group) -> None:
        self.stage, self.engine, self.pp = stage, engine, pp
        self.ledger = pp.channel.ledger
        self.module = stage if engine is None else engine.module
        train = stage.config.train
        tokens = train.micro_batch_size * train.seq_len // (stage.group.size if stage.sequence else 1)
        self.hidden_shape = (tokens, stage.config.model.hidden_size)
        self.dtype = DTYPES[train.precision]
        self.device = stage.device
        self.peak_live = 0  # most microbatches whose activations were held at once
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
        """Executes this stage's part of `plan` over `batch`; collective over the pipeline.

        `target_weight` is the weight of a target's loss in what backward differentiates: 1 / targets of the global batch.
        Returns the sum of this rank's losses, a scalar on the device, zero on stages that are not last.
        """
        self.batch, self.target_weight = batch, target_weight
        self.loss = torch.zeros((), device=self.device, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)
        self.inputs: dict[int, Tensor] = {}  # received activations, leaves of their microbatch's graph
        self.outputs: dict[int, Tensor] = {}  # to be sent, or the loss
        self.roots: dict[int, Any] = {}  # what the engine starts backward from
        self.gradients: dict[tuple[int, bool], Tensor] = {}  # (microbatch, of the output rather than the input)
        self.sending: list[tuple[Begun, Tensor]] = []
        actions = plan[self.pp.rank]
        i = 0
        while i < len(actions):
            if actions[i].op in TRANSFERS:
                stop = next(j for j in range(i, len(actions) + 1) if j == len(actions) or actions[j].op not in TRANSFERS)
                self._transfer(actions[i:stop])
                i = stop
            else:
                self.ledger.mark(actions[i].op.value, actions[i].microbatch)
                self.methods[actions[i].op](actions[i])
                i += 1
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()
        return self.loss

    def _forward(self, action: Action) -> None:
        m = action.microbatch
        microbatch = self.batch[m]
        x = microbatch.inputs if self.stage.first else self.inputs[m].requires_grad_(self.stage.training)
        with torch.set_grad_enabled(self.stage.training):
            output = self.module(x, microbatch.key, targets=microbatch.targets if self.stage.last else None)
        if self.stage.last:
            self.loss += output.detach()
        else:
            self.outputs[m] = output.detach()
        if self.stage.training:
            self.roots[m] = self._engine.root(output)
            self.peak_live = max(self.peak_live, len(self.roots))
        elif not self.stage.first:
            del self.inputs[m]

    def _backward(self, action: Action) -> None:
        m = action.microbatch
        gradient = self._engine.loss_gradient(self.target_weight) if self.stage.last else self.gradients.pop((m, True))
        self._engine.backward(self.roots.pop(m), gradient.to(self.loss.dtype) if self.stage.last else gradient, last=action.last)
        if not self.stage.first:
            grad = self.inputs.pop(m).grad
            assert grad is not None
            self.gradients[m, False] = grad

    def _transfer(self, actions: Sequence[Action]) -> None:
        """Posts adjacent transfers as one batch, waits for what is received, then for what the batch before sent.

        By then the receivers have long posted theirs, so that this costs no time and frees the memory. (Asking
        `is_completed` would not: gloo completes a send only when it is waited for.)
        """
        posts = [self._post(action) for action in actions]
        links = [self._note(post) for post in posts]
        works = dist.batch_isend_irecv(posts)
        sent, self.sending = self.sending, []
        # NCCL returns one handle for the whole batch, gloo one a transfer.
        for i, post in enumerate(posts):
            work = Begun(works[min(i, len(works) - 1)], *links[i])
            if post.op is dist.irecv:
                work.wait()
            else:
                self.sending.append((work, post.tensor))
        for work, _ in sent:
            work.wait()

    def _note(self, post: dist.P2POp) -> tuple[Channel, int]:
        """Notes a transfer in the ledger: its link, and its number there."""
        own, peer = self.pp.ranks[self.pp.rank], post.peer
        link = self.ledger.link(own, peer) if post.op is dist.isend else self.ledger.link(peer, own)
        return link, link.begin(self.pp.name, "transfer", post.tensor)

    def _post(self, action: Action) -> dist.P2POp:
        m, peer, group = action.microbatch, self.pp.ranks[action.peer], self.pp.process_group
        if action.op is Op.SEND_ACTIVATION:
            return dist.P2POp(dist.isend, self.outputs.pop(m), peer, group)
        if action.op is Op.SEND_GRADIENT:
            return dist.P2POp(dist.isend, self.gradients.pop((m, False)).contiguous(), peer, group)
        buffer = torch.empty(self.hidden_shape, dtype=self.dtype, device=self.device)
        if action.op is Op.RECV_ACTIVATION:
            self.inputs[m] = buffer
        else:
            self.gradients[m, True] = buffer
        return dist.P2POp(dist.irecv, buffer, peer, group)
