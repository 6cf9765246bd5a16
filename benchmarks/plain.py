"""What megacore is compared with: GPT-2 from `transformers` in the training loop that one would write for it."""

from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.training import random_batch
from megacore.config import Config
from megacore.model.gpt import DTYPES


class PlainLoop:
    """The same model, batch and optimizer as `config` describes, in plain PyTorch: gradient accumulation, clipping, fused AdamW.

    With `autocast` the weights stay fp32 and products run in the config's precision; without, everything is in that
    precision. The loss is taken from the logits here: the model's own would copy them once more, to shift them.
    """

    def __init__(self, config: Config, autocast: bool) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        model, train, optim = config.model, config.train, config.optim
        sizes = GPT2Config(
            vocab_size=model.vocab_size,
            n_positions=train.seq_len,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,  # the defaults are outside this vocabulary
            eos_token_id=0,
        )
        torch.manual_seed(train.seed)
        self.dtype = DTYPES[train.precision]
        self.model: nn.Module = GPT2LMHeadModel._from_config(sizes, attn_implementation="sdpa")
        self.model.to(torch.float32 if autocast else self.dtype)
        self.autocast, self.clip = autocast, optim.grad_clip
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.batch = random_batch(config, torch.device("cpu"))

    def step(self) -> float:
        """Seconds of one step."""
        started = perf_counter()
        for microbatch in self.batch:
            with torch.autocast("cpu", self.dtype, enabled=self.autocast):
                logits = self.model(microbatch.inputs).logits
                loss = F.cross_entropy(logits.flatten(0, 1), microbatch.targets.flatten()) / len(self.batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return perf_counter() - started
