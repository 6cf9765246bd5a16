"""Bytes of activations when a rank has most: what it keeps (`tools.choices.activations`), and what an action needs while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import le

from megacore.config.implied import splits_backward
from megacore.config.precision import ELEMENT_BYTES
from megacore.config.schema import Config, resolved
from megacore.pipeline.generators import GENERATORS, generated
from megacore.pipeline.partition import placement_of, plan_of, stage_layers
from megacore.pipeline.schedule import IN_FLIGHT, Action, Op, Plan, unsplit
from megacore.tools.choices.activations import block_activations, logits_kept, stage_kept, stage_waiting, unsplit_part, vocabulary_rows
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.resolve_auto import context_method_of, loss_chunk
from megacore.tools.planner.model_flow import GPT, ModelFlow
from megacore.tools.schedules.simulate import describe

FILLED = 2  # rounds of the pipeline's ranks, after which a rank holds as much as it ever will, except under gpipe
AT_WORK = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Peak:
    """The bytes of a rank's activations when they are most."""

    kept: int  # of forwards that wait for their backward, or for their weights' gradients
    logits: int  # and losses, with what is kept of them
    working: int  # that the action needs while it runs
    transfers: int  # messages under way
    moment: str  # the action
    live: tuple[int, ...]  # forwards of each chunk that wait, with the action's own
    waiting: tuple[int, ...]  # of each chunk, for weights' gradients

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return self.kept + self.logits + self.working + self.transfers


def rank_activations(config: Config) -> list[Peak]:
    """The peak of each rank of the pipeline."""
    layers = stage_layers(partitioned(config))
    kept, logits, waiting, last = stage_kept(config, layers), logits_kept(config), stage_waiting(config, layers), len(layers) - 1
    if config.train.offload_activations:
        kept, logits = [0.0] * len(kept), 0
    work = {(op, end): working(config, op, last if end else -1) for op in AT_WORK for end in (False, True)}
    peaks = []
    for stages, states, message in zip(placement_of(partitioned(config)), fullest(config), transfer_buffers(config), strict=True):
        losses = [logits * (stage == last) for stage in stages]
        sizes = [*(kept[stage] + loss for stage, loss in zip(stages, losses, strict=True)), *(waiting[stage] for stage in stages)]

        def held(state: State, sizes: Sequence[float] = sizes, stages: Sequence[int] = stages) -> float:
            at_work = work[state.action.op, stages[state.action.chunk] == last]
            return at_work + sum(n * size for n, size in zip(state.live + state.waiting, sizes, strict=True))

        state = max(states, key=held)
        at_work = work[state.action.op, stages[state.action.chunk] == last]
        loss = sum(n * size for n, size in zip(state.live, losses, strict=True))
        rest = int(held(state)) - at_work - loss
        peaks.append(Peak(rest, loss, at_work, message, describe(state.action), state.live, state.waiting))
    return peaks


def working(config: Config, op: Op, stage: int) -> int:
    """Bytes that an action of a stage needs while it runs, besides what is kept. `u` is a tensor that all tensor ranks hold, of this
    rank's tokens alone with sequence parallelism; `whole` is the same of all tokens; `inner` is the activation's output."""
    model, train, tokens, e = config.model, config.train, config.rank_tokens, ELEMENT_BYTES[config.train.precision]
    h, t, gates = model.hidden_size, config.parallel.tensor, 2 if model.activation == "swiglu" else 1
    whole, inner = e * tokens * h, e * tokens * resolved(model.ffn_size) // t
    u = unsplit_part(config, whole)
    gathered = whole if config.parallel.sequence and t > 1 else 0
    again = train.recompute == "selective"
    last = stage == len(stage_layers(partitioned(config))) - 1
    if op is Op.BACKWARD_WEIGHT:
        return gathered
    if op is Op.FORWARD:
        if train.recompute == "full":  # what a block makes lives until the block ends
            work = 4 * u + (gates + 1) * inner + gathered
        else:
            work = u + max(again * inner + whole, gathered + u)
        if last:  # the blocks run before there are logits
            head = e * min(tokens, loss_chunk(config)) * (vocabulary_rows(config) + h) if model.chunked_loss else 0
            work = max(gathered + head, work - logits_kept(config))
    else:
        # Down's input's gradient, then the activation's; then up's, whose input is gathered again.
        down = gathered + 2 * inner + gates * inner if again else max(gates * inner, gathered + inner)
        # Attention by `gather`, whose whole sequences come when the feed-forward part's activations are gone.
        keys = _gathered_keys(config) - (gates + (0 if again else 1)) * inner
        work = u + max(down, gathered + whole - (0 if again else inner), keys)
        if train.recompute == "full":
            work += block_activations(config, "none") - block_activations(config, "full") + u
        if last:  # the head comes first, and its logits are gone when the blocks begin
            work = max(gathered + whole + u, work - logits_kept(config))
    if train.offload_activations:  # the block at work, and what comes back for the next
        work += block_activations(config, "none") + block_activations(config, train.recompute)
        work += logits_kept(config) if last else 0
    return work


def _gathered_keys(config: Config) -> int:
    """Bytes of whole sequences that attention by `gather` holds in backward: keys and values, their gradients, and those of a part."""
    if config.parallel.context == 1 or context_method_of(config) != "gather":
        return 0
    whole = config.rank_tokens * config.parallel.context * config.attention_sizes[1] // config.parallel.tensor
    return 3 * 2 * ELEMENT_BYTES[config.train.precision] * whole


def transfer_buffers(config: Config, flow: ModelFlow = GPT) -> list[int]:
    """Bytes of the messages that each rank of the pipeline has under way: to each neighbour as many as may be, and one that arrives.
    `flow`: what the model's layers declare."""
    placement = placement_of(partitioned(config))
    holder = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    found = []
    for rank, stages in enumerate(placement):
        cuts = {(holder[other], min(stage, other)) for stage in stages for other in (stage - 1, stage + 1) if other in holder}
        away = {(peer, cut) for peer, cut in cuts if peer != rank}
        largest = max((flow.message_bytes(config, cut) for _, cut in away), default=0)
        found.append(largest * (IN_FLIGHT * len({peer for peer, _ in away}) + 1) if away else 0)
    return found


@dataclass(frozen=True)
class State:
    """What a rank of the pipeline holds while an action runs: of each chunk the live forwards, and those between the two parts of a
    split backward."""

    action: Action
    live: tuple[int, ...]
    waiting: tuple[int, ...]

    @property
    def kind(self) -> tuple[Op, int]:
        """What it does, in which chunk."""
        return self.action.op, self.action.chunk

    def holds_no_more_than(self, other: "State") -> bool:
        """Whether `other`, of the same kind, has at least as much of everything."""
        return self.kind == other.kind and all(map(le, self.live, other.live)) and all(map(le, self.waiting, other.waiting))


def fullest(config: Config) -> list[list[State]]:
    """For every rank of a step's plan, the few states in which it holds most: a search asks for thousands."""
    parallel = config.parallel
    if parallel.schedule not in GENERATORS:  # a plan of its own
        return states_of(plan_of(partitioned(config)))
    if parallel.schedule == "gpipe":
        count = config.num_microbatches
        return [
            [State(Action(Op.FORWARD, count - 1, 0), (count,), (0,)), State(Action(Op.BACKWARD, 0, 0), (count,), (0,))]
            for _ in range(parallel.pipeline)
        ]
    count = min(config.num_microbatches, FILLED * parallel.pipeline)
    return _fullest(parallel.schedule, parallel.pipeline, count, config.chunks, splits_backward(config))


@lru_cache(maxsize=4096)
def _fullest(schedule: str, ranks: int, microbatches: int, chunks: int, split: bool) -> list[list[State]]:
    plan = generated(schedule, ranks, microbatches, chunks)
    return states_of(plan if split else unsplit(plan))


def states_of(plan: Plan) -> list[list[State]]:
    """For every rank the states of which no other of the same kind holds more, the first of equal ones."""
    found = []
    for stages, actions in zip(plan.placement, plan.actions, strict=True):
        divided = {(a.microbatch, a.chunk) for a in actions if a.op is Op.BACKWARD_INPUT}
        live, waiting, states = [0] * len(stages), [0] * len(stages), dict[tuple[object, ...], State]()
        for action in actions:
            c = action.chunk
            if action.op is Op.FORWARD:
                live[c] += 1
            elif action.op not in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
                continue
            states.setdefault((action.op, c, *live, *waiting), State(action, tuple(live), tuple(waiting)))
            if action.op is Op.BACKWARD_INPUT:
                live[c], waiting[c] = live[c] - 1, waiting[c] + 1
            elif action.op is not Op.FORWARD:
                held = waiting if (action.microbatch, c) in divided else live
                held[c] -= 1
        found.append(_maximal(list(states.values())))
    return found


def _maximal(states: Sequence[State]) -> list[State]:
    """Those of different states of which no other of the same kind holds more, in their order."""
    kinds: dict[tuple[Op, int], dict[int, State]] = {}
    for at in sorted(range(len(states)), key=lambda at: -sum(states[at].live + states[at].waiting)):  # who holds more of all comes first
        kept = kinds.setdefault(states[at].kind, {})
        if not any(states[at].holds_no_more_than(other) for other in kept.values()):
            kept[at] = states[at]
    return [states[at] for at in sorted(at for kept in kinds.values() for at in kept)]
