"""GPT-2 of `transformers` in the training loop that one would write for it."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.place import Ranks, decay_groups, set_weights
from megacore.caches import keep_inductor_private
from megacore.config import Config
from megacore.model.layers import DTYPES
from megacore.tools.interchange.mapped import gpt2_tensors


def gpt2(config: Config) -> nn.Module:
    """GPT-2 of the config's sizes, without dropout, with PyTorch's attention; in fp32,
    with megacore's initial weights.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    model, train = config.model, config.train
    sizes = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=train.seq_len,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.ffn_size,
        layer_norm_epsilon=model.norm_eps,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,  # the defaults are outside this vocabulary
        eos_token_id=0,
    )
    peer = GPT2LMHeadModel._from_config(sizes, attn_implementation="sdpa")
    set_weights(peer, config, gpt2_tensors(config))
    return peer


class PlainLoop:
    """The same model, batch and optimizer as `config` describes: gradient accumulation, clipping,
    fused AdamW; DDP over data ranks.

    Under bf16 the weights stay fp32, and autocast rounds. The loss is taken from the logits here: the model's
    own would copy them once more, to shift them.
    """

    autocast: ClassVar[bool] = True
    compiled: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.ranks = Ranks(config, join=config.parallel.data != 1)
        self.dtype, optim = DTYPES[config.train.precision], config.optim
        self.model = self.build(config).to(self.ranks.device, torch.float32 if self.autocast else self.dtype)
        self.reduced = self.prepare(self.model)
        if self.ranks.world > 1:
            self.reduced = nn.parallel.DistributedDataParallel(self.reduced)
        if self.compiled:
            keep_inductor_private()
        self.forward = torch.compile(self.microbatch_loss) if self.compiled else self.microbatch_loss
        self.clip, self.batch = optim.grad_clip, self.ranks.batch()
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model, optim.weight_decay),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )

    def build(self, config: Config) -> nn.Module:
        """The model, in fp32."""
        return gpt2(config)

    def prepare(self, model: nn.Module) -> nn.Module:
        """What stands around the model before DDP does."""
        return model

    def rounding(self) -> torch.autocast:
        """Autocast, where the loop has any and the precision needs it."""
        return torch.autocast(
            self.ranks.device.type, self.dtype, enabled=self.autocast and self.dtype != torch.float32
        )

    def microbatch_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over a microbatch."""
        with self.rounding():
            return F.cross_entropy(self.reduced(inputs).logits.flatten(0, 1), targets.flatten())

    def step(self) -> float:
        """Seconds of one step."""
        return self.ranks.seconds(self.work)

    def loss(self) -> float:
        """The mean over this rank's microbatches in the last step."""
        return float(self.sum)

    def work(self) -> None:
        """One step."""
        self.sum = torch.zeros((), device=self.ranks.device)
        for i, microbatch in enumerate(self.batch):
            if isinstance(self.reduced, nn.parallel.DistributedDataParallel):
                self.reduced.require_backward_grad_sync = i == len(self.batch) - 1
            loss = self.forward(microbatch.tokens, microbatch["targets"]) / len(self.batch)
            loss.backward()
            self.sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


class CompiledLoop(PlainLoop):
    """The same, with model and loss compiled as a whole."""

    compiled = True


class LowPrecisionLoop(PlainLoop):
    """The same with weights, and all else, in the run's precision: less exact than its rivals."""

    autocast = False
