"""Bytes of activations: what a rank keeps of every forward until its backward, and what an action needs while it runs.

What is kept is counted tensor by tensor, and tests hold it against the real code's tensors, to the byte. Notation: T tokens of a microbatch
on a context rank, h hidden size, f feed-forward size, a features of all query heads, k of all key heads, e bytes of an element.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megacore.config.precision import ELEMENT_BYTES
from megacore.config.resolve_auto import attention_of, context_method_of, fuses, loss_chunk, splits_backward
from megacore.config.schema import Config, resolved
from megacore.model.flops import attention_sizes
from megacore.pipeline.generators import GENERATORS, generated
from megacore.pipeline.partition import placement_of, plan_of, stage_layers
from megacore.pipeline.schedule import IN_FLIGHT, Action, Op, Plan, unsplit
from megacore.pipeline.simulate import describe

FILLED = 2  # rounds of the pipeline's ranks, after which a rank holds as much as it ever will, except under gpipe
AT_WORK = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
FLASH_HEAD = 256  # features of the widest head that flash attention takes


def block_activations(config: Config, recompute: str) -> int:
    """Bytes that a rank keeps of one block and microbatch until its backward, with a mode of `train.recompute`.

    A token costs in tensors that all tensor ranks hold (or, with sequence parallelism, divide): 4·e·h for the inputs of both norms, of
    query-key-value and of up; one fp32 number for each norm's scale, and for a layernorm's mean. In tensors that they always divide:
    e·(a + 2k) for query, key and value; e·a for attention's output; an fp32 logarithm a head; e·f for what enters the activation, twice
    that for swiglu; e·f for what leaves it.

    Without fused kernels there are also 2·h for the masks of two dropouts, e·(a + k) for queries and keys before they are rotated, and
    e·f for swiglu's silu. Normed queries and keys are always kept before and behind the norm, with an fp32 number a head; where one
    kernel norms and rotates, values too are kept twice, and no number. Attention
    by the formula keeps s scores a head, and no logarithms; and query, key and value in its products' order alone, e·3a: each key and
    value once for every query head that shares it.

    Where context ranks are more than key/value heads, ulysses keeps each of these more than once.

    After Korthikanti et al. 2022: their 34·s·b·h/t is for a gelu model with learned positions, f = 4h, bf16 and dropout, whose norms'
    statistics and attention's logarithms are left out. `selective` leaves out the scores and what follows up; `full` keeps only the
    block's input, e·h.
    """
    model, train, (a, k) = config.model, config.train, attention_sizes(config)
    h, f, e, tokens, fused = model.hidden_size, resolved(model.ffn_size), ELEMENT_BYTES[train.precision], config.rank_tokens, fuses(config)
    if recompute == "full":
        return unsplit_part(config, e * h * tokens)
    swiglu, wide = model.activation == "swiglu", max(4, e)
    at_once = fused and model.position == "rope" and config.engine.kind != "deepspeed"  # normed and rotated by one kernel
    unsplit = 4 * e * h + 2 * wide * (1 if model.norm == "rmsnorm" else 2) + (2 * h if model.dropout and not fused else 0)
    if (sdpa := attention_of(config) == "sdpa") or recompute != "none":
        split = e * (2 * a + 2 * k) + (4 * model.num_heads if sdpa else 0)
        if model.qk_norm and at_once:
            split += e * (a + 2 * k)
        elif model.qk_norm:
            split += e * (a + k) + (e * a if fused and model.num_heads > config.kv_heads else 0)  # a kernel copies heads that lie apart
        elif model.position == "rope" and not fused:
            split += e * (a + k)
        if sdpa and train.device != "cpu" and train.precision != "fp64" and not flash(config):
            split += 2 * e * (a - k)  # it takes each key and value once for every query head
    else:
        split = e * (4 * a + model.num_heads * train.seq_len) + (e * (a + 2 * k) if model.qk_norm else 0)
    split += wide * (model.num_heads + config.kv_heads) if model.qk_norm and not at_once else 0
    if (c := config.parallel.context) > 1 and context_method_of(config) == "ulysses":
        split += e * 2 * k * (max(1, c * config.parallel.tensor // config.kv_heads) - 1)
    split += e * f * (2 if swiglu else 1)
    if recompute == "none":
        split += e * f * (2 if swiglu and not fused else 1)
    return unsplit_part(config, unsplit * tokens) + split * tokens // config.parallel.tensor + (_random_state(config) if sdpa else 0)


def _random_state(config: Config) -> int:
    """Bytes of the state of dropout that PyTorch's attention keeps on a GPU, used or not."""
    if config.train.device == "cpu" or config.train.precision == "fp64":
        return 0
    return 24 if flash(config) else 16


def flash(config: Config) -> bool:
    """Whether PyTorch's attention takes its flash kernel on a GPU; else the one for any dtype."""
    return config.train.precision in ("bf16", "fp16") and config.head_size <= FLASH_HEAD


def stage_kept(config: Config) -> list[float]:
    """Bytes that each stage keeps of a microbatch until its backward, without the logits."""
    model, tokens, e = config.model, config.rank_tokens, ELEMENT_BYTES[config.train.precision]
    block, wide = block_activations(config, config.train.recompute), max(4, e)
    kept = [float(len(own) * block) for own in stage_layers(config)]
    if config.parallel.tensor > 1:
        kept[0] += 9 * tokens  # rows of the table as int64, and which of them are another rank's
    if model.dropout and not fuses(config):
        kept[0] += unsplit_part(config, tokens * model.hidden_size)
    # Input and statistics of the final norm, and the head's input if its product is not in chunks.
    statistics = wide * (1 if model.norm == "rmsnorm" else 2)
    kept[-1] += unsplit_part(config, ((1 if model.chunked_loss else 2) * e * model.hidden_size + statistics) * tokens)
    return kept


def logits_kept(config: Config) -> int:
    """Bytes that the last stage keeps of a microbatch's logits and loss; the logits' gradient is written over them.

    With a chunked loss: the gradients of hidden states and head, which forward computes.
    """
    model, tokens, e = config.model, config.rank_tokens, ELEMENT_BYTES[config.train.precision]
    rows, wide = vocabulary_rows(config), max(4, e)
    if model.chunked_loss:
        return e * tokens * model.hidden_size + wide * rows * model.hidden_size
    return (e * rows + wide) * tokens


def stage_sizes(config: Config) -> list[float]:
    """Bytes that each stage keeps of a microbatch until its backward, with the logits."""
    return [*(kept := stage_kept(config))[:-1], kept[-1] + logits_kept(config)]


def vocabulary_rows(config: Config) -> int:
    """Rows of the vocabulary on the fullest tensor rank."""
    return -(-config.model.vocab_size // config.parallel.tensor)


def stage_waiting(config: Config) -> list[float]:
    """Bytes that a stage keeps of a microbatch between the two parts of a split backward: each product's input and output's gradient.

    With recomputation it may be more than before the backward. Of the gradients only those of qkv and up are divided among tensor ranks.
    """
    model, (a, k), e = config.model, attention_sizes(config), ELEMENT_BYTES[config.train.precision]
    h, f, tokens = model.hidden_size, resolved(model.ffn_size), config.rank_tokens
    divided = 2 * a + 2 * k + f * (3 if model.activation == "swiglu" else 2)
    block = e * (unsplit_part(config, 2 * h * tokens) + 2 * h * tokens + divided * tokens // config.parallel.tensor)
    waiting = [float(len(layers) * block) for layers in stage_layers(config)]
    waiting[0] += e * h * tokens
    if not model.chunked_loss:  # else head and hidden states have their gradients before backward
        waiting[-1] += e * tokens * (h + vocabulary_rows(config))
    return waiting


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
    kept, logits, waiting, last = stage_kept(config), logits_kept(config), stage_waiting(config), len(stage_layers(config)) - 1
    if config.train.offload_activations:
        kept, logits = [0.0] * len(kept), 0
    work = {(op, end): working(config, op, last if end else -1) for op in AT_WORK for end in (False, True)}
    peaks = []
    for stages, states, message in zip(placement_of(config), fullest(config), transfer_buffers(config), strict=True):
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
    last = stage == len(stage_layers(config)) - 1
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
    whole = config.rank_tokens * config.parallel.context * attention_sizes(config)[1] // config.parallel.tensor
    return 3 * 2 * ELEMENT_BYTES[config.train.precision] * whole


def transfer_buffers(config: Config) -> list[int]:
    """Bytes of the messages that each rank of the pipeline has under way: to each neighbour as many as may be, and one that arrives."""
    placement = placement_of(config)
    holder = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    message = unsplit_part(config, ELEMENT_BYTES[config.train.precision] * config.rank_tokens * config.model.hidden_size)
    found = []
    for rank, stages in enumerate(placement):
        peers = {holder[other] for stage in stages for other in (stage - 1, stage + 1) if other in holder} - {rank}
        found.append(message * (IN_FLIGHT * len(peers) + 1) if peers else 0)
    return found


@dataclass(frozen=True)
class State:
    """What a rank of the pipeline holds while an action runs: of each chunk the live forwards, and those between the two parts of a
    split backward."""

    action: Action
    live: tuple[int, ...]
    waiting: tuple[int, ...]

    def holds_no_more_than(self, other: "State") -> bool:
        """Whether `other`, of the same kind, has at least as much of everything."""
        same = (self.action.op, self.action.chunk) == (other.action.op, other.action.chunk)
        return same and all(x <= y for x, y in zip(self.live + self.waiting, other.live + other.waiting, strict=True))


def fullest(config: Config) -> list[list[State]]:
    """For every rank of a step's plan, the few states in which it holds most: a search asks for thousands."""
    parallel = config.parallel
    if parallel.schedule not in GENERATORS:  # a plan of its own
        return states_of(plan_of(config))
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
        own = list(states.values())
        found.append([a for a in own if not any(a is not b and a.holds_no_more_than(b) for b in own)])
    return found


def unsplit_part(config: Config, size: int) -> int:
    """The part of an activation outside tensor-parallel regions that a rank holds: all of it, or its own tokens."""
    return -(-size // config.parallel.tensor) if config.parallel.sequence else size
