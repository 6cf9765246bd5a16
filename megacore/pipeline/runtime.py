"""Executes a lowered schedule on one rank, over the stages that it holds. Every action has one method.

There is one runtime for every schedule and layout: gradient accumulation on one device is the one-stage schedule.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacore.context_parallel.sharding import Documents
from megacore.distributed.communicator import Group, Work
from megacore.distributed.observer import Observer, Observers
from megacore.engine.protocol import Engine
from megacore.model.gpt import DTYPES, Stage
from megacore.pipeline.schedule import IN_FLIGHT, Action, Op, Plan
from megacore.tensor_parallel.gradient import WeightGradPart


@dataclass(frozen=True)
class Microbatch:
    """Inputs and targets ``[batch, tokens of this rank]``, on the device, and the key of its random numbers."""

    inputs: Tensor
    targets: Tensor
    key: int = 0
    documents: Documents | None = None  # if attention stays within them: where they begin in each sequence
    positions: Tensor | None = None  # of its tokens, each in its document, like the inputs; None: those in the sequence

    @property
    def apart(self) -> dict[str, Any]:
        """What a stage is told if attention stays within documents."""
        return {} if self.documents is None else {"documents": self.documents, "positions": self.positions}


Key = tuple[int, int]  # microbatch, chunk
TAKES = {Op.FORWARD: Op.RECV_ACTIVATION, Op.BACKWARD: Op.RECV_GRADIENT, Op.BACKWARD_INPUT: Op.RECV_GRADIENT}  # messages by who takes them


class Runtime:
    """Runs plans on this rank's stages.

    Between a microbatch's forward and its backward the autograd graph stays in memory. The input (for its gradient) and the output's
    *edge* (to start backward from) hold it; the output itself is freed once it is sent. If backward is split, its first half frees all
    but the two tensors of each weight's product, and the second half frees each pair when it is multiplied.
    """

    def __init__(self, stages: Sequence[Stage], engine: Engine | None, pp: Group, observers: Observers | None = None) -> None:
        self.stages, self.engine, self.pp, self.observers = stages, engine, pp, observers
        self.modules: Sequence[nn.Module] = stages if engine is None else engine.modules
        train, first = stages[0].config.train, stages[0]
        tokens = first.config.rank_tokens // (first.group.size if first.sequence else 1)
        self.hidden_shape = (tokens, first.config.model.hidden_size)
        self.dtype = DTYPES[train.precision]
        self.device = first.device
        self.after_backward: Callable[[], None] | None = None  # called behind each that was launched
        self.peak_live = 0  # the most forwards whose activations, or a part of them, were held at once
        self.methods: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_ACTIVATION: lambda action: self._send(action, self.outputs),
            Op.RECV_ACTIVATION: lambda action: self._receive(action, self.inputs),
            Op.SEND_GRADIENT: lambda action: self._send(action, self.input_gradients),
            Op.RECV_GRADIENT: lambda action: self._receive(action, self.output_gradients),
            Op.REDUCE_GRADIENTS: lambda _: self._engine.reduce_gradients(),
            Op.REDUCE_TIED: lambda _: self._engine.reduce_tied(),
        }

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None, "a plan with backward needs an engine"
        return self.engine

    def run(self, plan: Plan, batch: Sequence[Microbatch], target_weight: float | Tensor = 0.0) -> Tensor:
        """Executes this rank's part of `plan` over `batch`; collective over the pipeline.

        `target_weight` is the weight of a target's loss in what backward differentiates: 1 / targets of the global batch.
        Returns the sum of this rank's losses, a scalar on the device, zero on ranks without the last stage.
        """
        self.batch = batch
        self.loss = torch.zeros((), device=self.device, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)
        starts = any(stage.last and stage.training for stage in self.stages)  # what backward starts with is known before the first forward
        self.loss_gradient = self._engine.loss_gradient(target_weight).to(self.loss.dtype) if starts else None
        self.inputs: dict[Key, Tensor] = {}  # activations received or taken over, leaves of their microbatch's graph
        self.outputs: dict[Key, Tensor] = {}  # to be sent
        self.roots: dict[Key, Any] = {}  # where the engine starts backward
        self.parts: dict[Key, list[WeightGradPart]] = {}  # of weights' gradients, which wait for their action
        self.output_gradients: dict[Key, Tensor] = {}  # received or taken over
        self.input_gradients: dict[Key, Tensor] = {}  # to be sent
        self.arriving: dict[tuple[Op, Key], Work] = {}  # messages
        self.sending: dict[int, deque[tuple[Work, Tensor]]] = defaultdict(deque)  # by the rank that receives
        self.chunk_of = {stage: chunk for chunk, stage in enumerate(plan.placement[self.pp.rank])}
        self.stage_of = plan.placement[self.pp.rank]
        for action in plan.actions[self.pp.rank]:
            self._wait_for_message(action)
            if not self.observers:
                self.methods[action.op](action)
            else:
                self.observers.tell(Observer.action_begins, action)
                self.methods[action.op](action)
                self.observers.tell(Observer.action_ends, action)
        for under_way in self.sending.values():
            while under_way:
                under_way.popleft()[0].wait()
        return self.loss

    def _forward(self, action: Action) -> None:
        key, chunk = (action.microbatch, action.chunk), action.chunk
        stage, microbatch = self.stages[chunk], self.batch[action.microbatch]
        x = microbatch.inputs if stage.first else self.inputs[key].requires_grad_(stage.training)
        with torch.set_grad_enabled(stage.training):
            ends = {"targets": microbatch.targets, "loss_gradient": self.loss_gradient} if stage.last else {}
            output = self.modules[chunk](x, microbatch.key, **ends, **microbatch.apart)
        if stage.last:
            self.loss += output.detach()
        else:
            self._hand_over(self.inputs, self.outputs, key, 1, output.detach())
        if stage.training:
            self.roots[key] = self._engine.root(output)
            self.peak_live = max(self.peak_live, len(self.roots) + len(self.parts))
        elif not stage.first:
            del self.inputs[key]

    def _backward(self, action: Action) -> None:
        key = action.microbatch, action.chunk
        self._engine.backward(action.chunk, self.roots.pop(key), self._output_gradient(key), last=action.last)
        self._pass_back(key)

    def _backward_input(self, action: Action) -> None:
        key = action.microbatch, action.chunk
        self.parts[key] = self._engine.backward_input(action.chunk, self.roots.pop(key), self._output_gradient(key))
        self._pass_back(key)

    def _backward_weight(self, action: Action) -> None:
        self._engine.backward_weight(action.chunk, self.parts.pop((action.microbatch, action.chunk)), last=action.last)

    def _output_gradient(self, key: Key) -> Tensor:
        """What backward starts with."""
        if self.stages[key[1]].last:
            assert self.loss_gradient is not None
            return self.loss_gradient
        return self.output_gradients.pop(key)

    def _pass_back(self, key: Key) -> None:
        """Hands the gradient of a chunk's input to the stage before."""
        if self.after_backward is not None:
            self.after_backward()
        if not self.stages[key[1]].first:
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

    def _receive(self, action: Action, held: dict[Key, Tensor]) -> None:
        """Posts a receive. The action that takes the message waits for it."""
        assert self.pp.communicator is not None
        key = action.microbatch, action.chunk
        held[key] = torch.empty(self.hidden_shape, dtype=self.dtype, device=self.device)
        self.arriving[action.op, key] = self.pp.communicator.receive(held[key], self.pp.ranks[action.peer])

    def _wait_for_message(self, action: Action) -> None:
        """Waits for what an action takes from another rank."""
        if action.op in TAKES:
            work = self.arriving.pop((TAKES[action.op], (action.microbatch, action.chunk)), None)
            if work is not None:
                work.wait()

    def _send(self, action: Action, held: dict[Key, Tensor]) -> None:
        """Posts a send, whose buffer stays until the send is complete: see `schedule.IN_FLIGHT`.

        (Asking `is_completed` would not tell: gloo completes a send only when it is waited for.)
        """
        assert self.pp.communicator is not None
        under_way = self.sending[action.peer]
        while len(under_way) >= IN_FLIGHT:
            under_way.popleft()[0].wait()
        x = held.pop((action.microbatch, action.chunk)).contiguous()
        under_way.append((self.pp.communicator.send(x, self.pp.ranks[action.peer]), x))
