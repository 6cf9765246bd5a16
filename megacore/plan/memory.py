"""Predicts the memory of every rank of the pipeline, for the fullest of its tensor ranks, under each engine.

It counts parameters, gradients, optimizer state and the activations that wait for their backward. It does not count short-lived
buffers, and what CUDA, NCCL and the allocator keep for themselves: leave a tenth of the device or more.

Bytes a parameter (with `engine.shard_optimizer` the data ranks divide only master weights and moments):

| precision   | parameter | gradient | master weight | two moments | together |
|-------------|-----------|----------|---------------|-------------|----------|
| bf16, fp16  | 2         | 4        | 4             | 8           | 18       |
| fp32        | 4         | 4        |               | 8           | 16       |
| fp64        | 8         | 8        |               | 16          | 32       |

With `engine.kind=fsdp` a rank holds only masters (4 bytes, or 8), and everything is divided among N data ranks: 16/N (32/N).
`gathered` counts what is gathered beyond that while blocks run. With `engine.cpu_offload` the device holds only that.

With `engine.kind=deepspeed` fp32 has masters beside its parameters, 20 bytes in all, except in stage 0. Each of N data ranks holds
an N-th of the optimizer state from stage 1 on, of gradients from stage 2 on (in fp32 and fp16 from stage 1), and of parameters in
stage 3, where layers are whole while they run. Offloaded state is not on the device. Not counted: in fp32 a rank also keeps, for a
step, the whole gradients of the two parameters in which its part begins and ends.

Bytes of activations: `block_activations`, after Korthikanti et al. 2022.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megacore.config.deepspeed import ds_settings
from megacore.config.schema import Config, resolved
from megacore.plan.buckets import buffers_of
from megacore.plan.choices import attention_of, context_method_of, loss_chunk, splits_backward
from megacore.plan.flops import attention_sizes
from megacore.plan.generators import GENERATORS, generated
from megacore.plan.optimizers import STATES
from megacore.plan.parameters import ELEMENT_BYTES as ELEMENT_BYTES
from megacore.plan.parameters import GRADIENT_BYTES as GRADIENT_BYTES
from megacore.plan.parameters import block_parameters, elements, held_by, rank_parameters
from megacore.plan.partition import measured, placement_of, stage_layers
from megacore.plan.schedule import Op, unsplit
from megacore.plan.simulate import peak_held

FILLED = 2  # rounds of the pipeline's ranks, after which a rank holds as much as it ever will, except under gpipe


_PADDED: dict[Hashable, list[int]] = {}


def optimizer_bytes(config: Config) -> int:
    """Bytes a parameter of optimizer state: the state of `optim.kind`, and the master weight if it is not the parameter itself."""
    wide = GRADIENT_BYTES[config.train.precision]
    masters = wide if ELEMENT_BYTES[config.train.precision] < wide else 0
    return masters + wide * len(STATES[config.optim.kind])


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of the pipeline, the fullest of its tensor ranks."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int = 0  # parameters and gradients that are whole only while they are used

    @property
    def held(self) -> int:
        """The bytes that stay from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return self.held + self.activations + self.gathered


def block_activations(config: Config, recompute: str) -> int:
    """Bytes that a rank keeps of one block and microbatch until its backward, with a mode of `train.recompute`.

    With e bytes an element, a token costs in tensors that all tensor ranks hold (or, with sequence parallelism, divide):
    4·e·h for the inputs of both norms, of query-key-value and of up; 2·h for the masks of two dropouts. In tensors that they always
    divide: e·(a + 2k) for query, key and value; e·(a + k) more if these are rotated or normed (and an fp32 number a head for the
    norm); e·a for attention's output; for gelu e·2f (its input and output), for swiglu e·4f (gate and up, the gate's silu, the
    product). SDPA adds an fp32 logarithm a head. Other attention adds s scores a head, and keeps query, key and value in its
    products' order alone, e·3a: each key and value once for every query head that shares it.

    Where context ranks are more than key/value heads, ulysses keeps each of these more than once.

    For a gelu model with learned positions, f = 4h, bf16 and dropout, this is the published 34·s·b·h/t. `selective` leaves
    out the scores and what follows up; `full` keeps only the block's input, e·h.
    """
    model, train, (a, k) = config.model, config.train, attention_sizes(config)
    h, f, e = model.hidden_size, resolved(model.ffn_size), ELEMENT_BYTES[train.precision]
    tokens = _tokens(config)
    if recompute == "full":
        return _unsplit(config, e * h * tokens)
    unsplit = 4 * e * h + (2 * h if model.dropout else 0)
    if (sdpa := attention_of(config) == "sdpa") or recompute != "none":
        split = e * (2 * a + 2 * k) + (e * (a + k) if model.position == "rope" or model.qk_norm else 0)
        split += 4 * model.num_heads if sdpa else 0
    else:
        split = e * (4 * a + model.num_heads * train.seq_len) + (e * (a + 2 * k) if model.qk_norm else 0)
    split += 4 * (model.num_heads + config.kv_heads) if model.qk_norm else 0
    if (c := config.parallel.context) > 1 and context_method_of(config) == "ulysses":
        split += e * 2 * k * (max(1, c * config.parallel.tensor // config.kv_heads) - 1)
    split += e * f * (2 if model.activation == "swiglu" else 1)
    if recompute == "none":
        split += e * f * (2 if model.activation == "swiglu" else 1)
    return _unsplit(config, unsplit * tokens) + split * tokens // config.parallel.tensor


def rank_activations(config: Config) -> list[int]:
    """Peak bytes of activations on each rank of the pipeline: of every live forward, and of the one that runs."""
    model, recompute, layers = config.model, config.train.recompute, stage_layers(config)
    tokens, element = _tokens(config), ELEMENT_BYTES[config.train.precision]
    kept = [len(own) * block_activations(config, recompute) for own in layers]
    at_work = block_activations(config, "none")
    at_work = max(at_work, at_work + _gathered_keys(config) - _feed_forward(config))  # whose activations attention no longer needs
    working = [at_work - block_activations(config, recompute)] * len(kept)
    if config.train.offload_activations:  # on the device are the block at work, and what comes back for the next
        kept, working = [0] * len(kept), [at_work + block_activations(config, recompute)] * len(kept)
    # The ends: the embedding's dropout mask; the inputs of final norm and head, and the logits, whose gradient is written over them.
    # With a chunked loss only a chunk of them while it is at work, and until backward the gradients of hidden states and head.
    rows = -(-model.vocab_size // config.parallel.tensor)
    kept[0] += _unsplit(config, tokens * model.hidden_size) if model.dropout else 0
    kept[-1] += _unsplit(config, 2 * element * tokens * model.hidden_size)
    if model.chunked_loss:
        kept[-1] += element * tokens * model.hidden_size + 4 * rows * model.hidden_size
        working[-1] += element * rows * min(tokens, loss_chunk(config))
    else:
        kept[-1] += element * rows * tokens
    most_at_work = [max(working[stage] for stage in stages) for stages in placement_of(config)]
    held_at_peak = peak_of(config, kept, stage_waiting(config))
    return [int(held) + most for held, most in zip(held_at_peak, most_at_work, strict=True)]


def _gathered_keys(config: Config) -> int:
    """Bytes of whole sequences that attention by `gather` holds in backward: keys and values, their gradients, and those of a part."""
    if config.parallel.context == 1 or context_method_of(config) != "gather":
        return 0
    whole = _tokens(config) * config.parallel.context * attention_sizes(config)[1] // config.parallel.tensor
    return 3 * 2 * ELEMENT_BYTES[config.train.precision] * whole


def _feed_forward(config: Config) -> int:
    """Bytes that a block keeps for the backward of its feed-forward part alone."""
    kept = resolved(config.model.ffn_size) * (4 if config.model.activation == "swiglu" else 2)
    return ELEMENT_BYTES[config.train.precision] * kept * _tokens(config) // config.parallel.tensor


def peak_of(config: Config, kept: Sequence[float], waiting: Sequence[float]) -> list[float]:
    """`simulate.peak_held` of a step's plan, from the few states in which its ranks hold most: a search asks for thousands."""
    parallel = config.parallel
    if parallel.schedule not in GENERATORS:  # a plan of its own
        return measured(config, lambda plan: peak_held(plan, kept, waiting))
    if parallel.schedule == "gpipe":
        return [config.num_microbatches * kept[stage] for (stage,) in placement_of(config)]
    count = min(config.num_microbatches, FILLED * parallel.pipeline)
    peaks = []
    states_of = _fullest(parallel.schedule, parallel.pipeline, count, config.chunks, splits_backward(config))
    for stages, states in zip(placement_of(config), states_of, strict=True):
        sizes = [*(kept[stage] for stage in stages), *(waiting[stage] for stage in stages)]
        peaks.append(max(sum(n * size for n, size in zip(state, sizes, strict=True)) for state in states))
    return peaks


@lru_cache(maxsize=4096)
def _fullest(schedule: str, ranks: int, microbatches: int, chunks: int, split: bool) -> list[list[tuple[int, ...]]]:
    """For every rank, the states in which it holds most: of each chunk the live forwards, then of each those between the two parts of a
    split backward. States that hold no more of anything than another are left out."""
    plan = generated(schedule, ranks, microbatches, chunks)
    plan = plan if split else unsplit(plan)
    found = []
    for actions in plan.actions:
        divided = {(a.microbatch, a.chunk) for a in actions if a.op is Op.BACKWARD_INPUT}
        state, states = [0] * (2 * chunks), set[tuple[int, ...]]()
        for action in actions:
            c = action.chunk
            if action.op is Op.FORWARD:
                state[c] += 1
                continue
            states.add(tuple(state))  # what is held rises until a backward
            if action.op is Op.BACKWARD_INPUT:
                state[c], state[chunks + c] = state[c] - 1, state[chunks + c] + 1
                states.add(tuple(state))
            else:
                state[chunks + c if (action.microbatch, c) in divided else c] -= 1
        found.append([a for a in states if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in states)])
    return found


def stage_waiting(config: Config) -> list[float]:
    """Bytes that a stage keeps of a microbatch between the two parts of a split backward: each product's input and output's gradient.

    With recomputation it may be more than before the backward. Of the gradients only those of qkv and up are divided among tensor ranks.
    """
    model, (a, k) = config.model, attention_sizes(config)
    h, f, tokens, element = model.hidden_size, resolved(model.ffn_size), _tokens(config), ELEMENT_BYTES[config.train.precision]
    divided = 2 * a + 2 * k + f * (3 if model.activation == "swiglu" else 2)
    block = element * (_unsplit(config, 2 * h * tokens) + 2 * h * tokens + divided * tokens // config.parallel.tensor)
    waiting = [float(len(layers) * block) for layers in stage_layers(config)]
    waiting[0] += element * h * tokens
    if not model.chunked_loss:  # else head and hidden states have their gradients before backward
        waiting[-1] += element * tokens * (h + -(-model.vocab_size // config.parallel.tensor))
    return waiting


def rank_memory(config: Config, tensor_rank: int = 0) -> list[RankMemory]:
    """The memory of every rank of a resolved config's pipeline, on one of its tensor ranks, the first being the fullest."""
    precision, data = config.train.precision, config.token_ranks
    if config.engine.kind == "fsdp" and data > 1:
        return _fsdp_memory(config)
    if config.engine.kind == "deepspeed":
        return _deepspeed_memory(config)
    divisor = data if config.engine.shard_optimizer else 1
    memories = []
    for n, activations in zip(padded_parameters(config, tensor_rank), rank_activations(config), strict=True):
        state = n * optimizer_bytes(config) // divisor
        memories.append(RankMemory(n * ELEMENT_BYTES[precision], n * GRADIENT_BYTES[precision], state, activations))
    return memories


def padded_parameters(config: Config, tensor_rank: int = 0) -> list[int]:
    """What each rank of the pipeline holds in the native engine's buffers, gaps included. Equal layouts are laid out once."""
    engine = config.engine
    divides = engine.shard_optimizer, engine.reduce_dtype, engine.reduce_levels, engine.bucket_mib
    key = config.model, config.parallel, *divides, config.train.precision, config.train.seq_len, tensor_rank
    if key not in _PADDED:
        _PADDED[key] = [sum(b.size for b in buffers_of(config, rank, tensor_rank)) for rank in range(config.parallel.pipeline)]
    return _PADDED[key]


def _fsdp_memory(config: Config) -> list[RankMemory]:
    """`rank_memory` of the fsdp engine.

    With `reshard`, gathered at once are: the outermost unit (embeddings, positions, final norm, head) all the time, the block that
    runs, the next one with its receive buffer, and the gradients of a block with the buffer in which they are summed.
    Without it everything is gathered for a step, and whole gradients wait for the last microbatch.
    """
    precision, engine = config.train.precision, config.engine
    compute, accumulate = ELEMENT_BYTES[precision], GRADIENT_BYTES[precision]
    reshard = config.parallel.pipeline == 1 if engine.reshard is None else engine.reshard
    tensor, states = config.parallel.tensor, len(STATES[config.optim.kind])
    memories = []
    for rank, activations in zip(held_by(config), rank_activations(config), strict=True):
        n, blocks, block, outermost = rank.elements(tensor), rank.blocks, elements(rank.block, tensor), elements(rank.ends, tensor)
        gathered = outermost + min(blocks + 1, 3) * block if reshard else n
        waiting = outermost + 2 * block if reshard or config.num_microbatches == 1 else n
        held = 0 if engine.cpu_offload else -(-n * accumulate // config.shard_size)
        memories.append(RankMemory(held, held, states * held, activations, compute * gathered + accumulate * waiting))
    return memories


def _deepspeed_memory(config: Config) -> list[RankMemory]:
    """`rank_memory` of the deepspeed engine, without its buffers, whose sizes the ds_config gives."""
    precision, data = config.train.precision, config.token_ranks
    zero = ds_settings(config)["zero_optimization"]
    stage = zero["stage"]
    away = {name: (zero.get(f"offload_{name}") or {}).get("device", "none") != "none" for name in ("param", "optimizer")}
    masters = 4 if precision == "fp32" and stage > 0 else 0  # in 16 bits the table has them already
    divided = {"parameters": stage == 3, "gradients": stage >= 2 or (stage == 1 and precision != "bf16"), "optimizer": stage >= 1}
    divisors = {part: data if yes else 1 for part, yes in divided.items()}
    block, layers = block_parameters(config, config.parallel.tensor), config.model.num_layers
    memories = []
    for n, activations in zip(rank_parameters(config), rank_activations(config), strict=True):
        parameters = 0 if away["param"] else n * ELEMENT_BYTES[precision] // divisors["parameters"]
        gradients = 0 if away["optimizer"] else n * GRADIENT_BYTES[precision] // divisors["gradients"]
        optimizer = 0 if away["optimizer"] else n * (optimizer_bytes(config) + masters) // divisors["optimizer"]
        # Stage 3 has no pipeline: the ends are gathered in turn, and of the blocks the one at work and the next.
        gathered = ELEMENT_BYTES[precision] * max(2 * block, n - layers * block) if stage == 3 else 0
        memories.append(RankMemory(parameters, gradients, optimizer, activations, gathered))
    return memories


def _tokens(config: Config) -> int:
    """Tokens of a microbatch on a context rank."""
    return config.rank_tokens


def _unsplit(config: Config, size: int) -> int:
    """The part of an activation outside tensor-parallel regions that a rank holds: all of it, or its own tokens."""
    return -(-size // config.parallel.tensor) if config.parallel.sequence else size
