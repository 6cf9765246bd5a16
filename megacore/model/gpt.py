"""A GPT, or the part of it that one pipeline stage holds."""

from contextlib import nullcontext
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.caches import keep_inductor_private
from megacore.config import Config
from megacore.config.resolve_auto import compiles, context_method_of
from megacore.config.source import source_of
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.sharding import Documents, positions_of
from megacore.distributed.buffers import buffers_of
from megacore.distributed.collectives import own_part
from megacore.distributed.communicator import Group
from megacore.distributed.shard import Shard, new_parameter, replicated, shard_of
from megacore.distributed.topology import Topology, alone
from megacore.errors import ConfigError
from megacore.model.block import Block
from megacore.model.cache import KeyValueCache
from megacore.model.context import Context
from megacore.model.initial import initialise
from megacore.model.norm import Norm
from megacore.model.offload import ActivationOffload
from megacore.model.rotary import rope_tables
from megacore.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megacore.tensor_parallel.embedding import VocabParallelEmbedding
from megacore.tensor_parallel.linear import column_linear, row_stride

BLOCKS: dict[str, type[nn.Module]] = {"gpt": Block}  # by `model.block`
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def inductor_options(group: Group) -> dict[str, bool] | None:
    """How Inductor compiles a block. It may time variants of a reduction or a product and keep the fastest, and some of these round
    differently. Each tensor rank would choose by itself, and what all hold alike would drift apart: there it must not measure."""
    return {"deterministic": True} if group.size > 1 else None


def new_block(index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A block of the config's kind. Raises `ConfigError` if one of `model.source` cannot be made, or has a parameter without a record."""
    source = source_of(config)
    if source is None:
        return BLOCKS[config.model.block](index, config, mesh, dtype, device)
    with source.blamed(f", block {index}"):
        block = source.block(index, config, mesh, dtype, device)
        if not isinstance(block, nn.Module):
            raise TypeError(f"{type(block).__name__} is no torch.nn.Module")
    for name, parameter in block.named_parameters():
        if not isinstance(getattr(parameter, "shard", None), Shard):
            wrong = f"{source.path}: {name} of block {index} does not say which part of the whole tensor it is"
            raise ConfigError("model.source", wrong, "a layer of megacore.tensor_parallel, or megacore.distributed.shard.new_parameter")
    return block


class Stage(nn.Module):
    """Blocks ``layers`` of a GPT, with the embeddings before the first block and the head after the last.

    A parameter has the same name in every layout (blocks keep their global index). Initialisation, checkpoints and comparisons use this
    name. Two ranks that share embeddings each hold a copy under the same name, and the engine sums the two gradients.
    """

    def __init__(self, config: Config, layers: range, mesh: Topology, device: torch.device | str) -> None:
        """`mesh`: the whole cluster's, or one of a single process (`topology.alone`).

        On the device `meta` the stage has only names and shapes: somebody gives its parameters memory, and calls `compute_on`.
        """
        super().__init__()
        model, train = config.model, config.train
        device, dtype = torch.device(device), DTYPES[train.precision]
        self.config, self.group, self.cp = config, (group := mesh.tp), mesh.cp
        self.first, self.last = layers.start == 0, layers.stop == model.num_layers
        self.sequence = config.parallel.sequence and group.size > 1
        if self.first or (self.last and model.tie_embeddings):
            self.embedding = self._vocabulary(dtype, device)
        if self.first and model.position == "learned":
            shape, along = (config.max_positions, model.hidden_size), (replicated(group, partial=self.sequence),)
            table = Shard(shape, along, decay=True, init_std=model.init_std)
            self.position = new_parameter(table, dtype, device)
        self.blocks = nn.ModuleDict({str(i): new_block(i, config, mesh, dtype, device) for i in layers})
        if self.last:
            self.norm = Norm(model, group, self.sequence, dtype, device)
            if not model.tie_embeddings:
                self.head = self._vocabulary(dtype, device)
        if device.type != "meta":
            self.compute_on(device)
            held = {name: (parameter, shard_of(parameter)) for name, parameter in self.named_parameters()}
            initialise(held, {name: shard for name, (_, shard) in held.items()}, train.seed, dtype)
        if compiles(config):
            keep_inductor_private()
            for buffer in buffers_of([self]).values():  # a graph would be compiled for every microbatch's key
                buffer.note = torch.compiler.disable(buffer.note)  # type: ignore[method-assign]
            for block in self.blocks.values():
                block.compile(options=inductor_options(group))

    def compute_on(self, device: torch.device) -> None:
        """Makes all but the parameters on the device. The engine brings these when they are used."""
        model, train = self.config.model, self.config.train
        self.device = device
        for buffer in buffers_of([self]).values():
            buffer.fill(device)
        self.sequences, self.positions = None, None
        own = np.arange(train.seq_len)
        if self.cp.size > 1:
            self.sequences = Sequences(train.seq_len, self.cp, context_method_of(self.config))
            own = positions_of(self.sequences.own)
            self.positions = torch.from_numpy(own).expand(train.micro_batch_size, -1).to(device)
        self.rope: tuple[Tensor, Tensor] | None = None
        if model.position == "rope":
            at_least_fp32 = torch.float64 if train.precision == "fp64" else torch.float32
            in_tables = np.arange(train.seq_len) if self.config.data.document_mask else own
            self.rope = rope_tables(in_tables, self.config.head_size, model.rope_theta, at_least_fp32, device, model.rope_scaling)

    @cached_property
    def text_rope(self) -> tuple[Tensor, Tensor]:
        """The rotary tables of all positions, for texts that are written."""
        assert self.rope is not None
        if self.cp.size == 1:
            return self.rope
        model, dtype = self.config.model, self.rope[0].dtype
        every = np.arange(self.config.max_positions)
        return rope_tables(every, self.config.head_size, model.rope_theta, dtype, self.device, model.rope_scaling)

    @cached_property
    def offload(self) -> ActivationOffload:
        """The offload of activations to host memory, made when `train.offload_activations` first needs it."""
        return ActivationOffload(self.device)

    def _vocabulary(self, dtype: torch.dtype, device: torch.device) -> VocabParallelEmbedding:
        model = self.config.model
        return VocabParallelEmbedding(
            model.vocab_size,
            model.hidden_size,
            init_std=model.init_std,
            group=self.group,
            sequence=self.sequence,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        x: Tensor,
        key: int = 0,
        cache: KeyValueCache | None = None,
        targets: Tensor | None = None,
        documents: Documents | None = None,
        positions: Tensor | None = None,
        loss_gradient: Tensor | None = None,
    ) -> Tensor:
        """Tokens ``[batch, seq]`` on the first stage, hidden states on others → hidden states, or with `targets` their `loss`.

        Hidden states are ``[batch · seq, hidden]``, with sequence parallelism this rank's tokens. `key` names the
        microbatch for dropout. The last stage's hidden states go to `loss` or `logits`. With a `cache` the tokens
        follow those that it holds, and are added to it. Context ranks hold the tokens ``sequences.own`` of each sequence.
        Attention stays within `documents`, in which tokens have `positions` ``[batch, seq]``.
        """
        train = self.config.train
        if self.first:
            batch, seq = x.shape
        elif cache is None:
            batch, seq = train.micro_batch_size, train.seq_len // self.cp.size
        else:
            batch, seq = cache.batch_size, x.shape[0] // cache.batch_size
        start = 0 if cache is None else cache.length
        sequences = self.sequences
        if cache is not None:
            sequences, positions = cache.sequences, cache.positions
        elif documents is not None:
            sequences = Sequences(train.seq_len, self.cp, context_method_of(self.config), documents)
        positions = self.positions if positions is None and cache is None else positions
        rope = None
        if self.rope is not None:
            by_position = positions is not None and (documents is not None or cache is not None)
            rows = positions.flatten() if by_position else slice(start, start + seq)  # type: ignore[union-attr]
            cos, sin = self.rope if cache is None else self.text_rope
            rope = cos[rows], sin[rows]
        dropout = self.config.model.dropout if self.training else 0.0
        where, kernels = (sequences, positions), self.config.model.kernels
        context = Context(batch, seq, rope, self.group, self.sequence, dropout, key, start, cache, kernels, *where)
        if self.first:
            x = self.embed(x, context)
        with self.offload.around() if train.offload_activations and self.training else nullcontext():
            for block in self.blocks.values():
                if train.recompute == "full" and self.training:
                    x = checkpoint(block, x, context, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = block(x, context)
        if cache is not None:
            cache.advance(seq)
        return x if targets is None else self.loss(x, targets, loss_gradient)

    def embed(self, tokens: Tensor, context: Context) -> Tensor:
        """Tokens ``[batch, seq]`` → ``[batch · seq, hidden]``, scaled, with learned positions added."""
        x = self.embedding(tokens.flatten())
        if (scale := self.config.model.embedding_scale) != 1.0:
            x = x * scale
        if self.config.model.position == "learned":
            if context.positions is None:
                positions = self.position[context.start : context.start + context.seq_len].repeat(context.batch_size, 1)
            else:
                positions = F.embedding(context.positions.flatten(), self.position)
            x = x + (own_part(positions, self.group) if self.sequence else positions)
        return context.drop(x, "embedding")

    def logits(self, x: Tensor) -> Tensor:
        """The last stage's hidden states → logits over this rank's vocabulary rows, ``[batch · seq, rows]``.

        The vocabulary may be of any size: what is padded is the distance between the rows, in memory alone.
        """
        weight = self.head_layer.weight
        return column_linear(self.scaled_norm(x), weight, None, self.group, self.sequence, row_stride(x, len(weight)))

    @property
    def head_layer(self) -> VocabParallelEmbedding:
        """The layer whose weight is this rank's rows of the LM head."""
        return self.embedding if self.config.model.tie_embeddings else self.head

    def scaled_norm(self, x: Tensor) -> Tensor:
        """The last hidden states, normed and scaled for the head."""
        x = self.norm(x)
        scale = self.config.model.logit_scale
        return x if scale == 1.0 else x * scale  # equal to scaling the logits, which are many more

    def loss(self, x: Tensor, targets: Tensor, gradient: Tensor | None = None) -> Tensor:
        """The sum of the losses of all targets ``[batch, seq]`` that are not `IGNORED`, in nats; a scalar, in fp32 at least.

        `gradient`: what backward will start with, if it is known: forward then writes the gradient of the logits.
        """
        model, first_row = self.config.model, self.head_layer.first_row
        if model.chunked_loss:
            return vocab_parallel_linear_cross_entropy(
                self.scaled_norm(x), self.head_layer.weight, targets.flatten(), self.group, self.sequence, first_row, model.kernels
            )
        return vocab_parallel_cross_entropy(self.logits(x), targets.flatten(), self.group, first_row, model.kernels, gradient).sum()


def whole_model(config: Config, device: torch.device | str = "cpu") -> Stage:
    """The GPT on one device: all layers in one stage."""
    return Stage(config, range(config.model.num_layers), alone(config), device)
