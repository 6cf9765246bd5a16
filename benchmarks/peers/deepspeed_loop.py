"""DeepSpeed's engine over GPT-2 of `transformers`: ZeRO over data ranks, and its own pipeline."""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.place import Ranks, decay_groups
from benchmarks.peers.transformers_loop import gpt2
from megacore.config import Config


class DeepSpeedLoop:
    """The same model, batch and optimizer as `config` describes.

    ZeRO stage 1, which under bf16 keeps the fp32 masters; fp32: stage 0.
    """

    def __init__(self, config: Config) -> None:
        self.ranks = Ranks(config)
        os.environ["DS_ACCELERATOR"] = self.ranks.device.type
        import deepspeed

        if self.ranks.device.type == "cpu":
            # a minute of compiling, for inference alone
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("nccl" if self.ranks.device.type == "cuda" else "gloo", verbose=False)
        train, optim = config.train, config.optim
        settings = {
            "train_batch_size": train.global_batch_size,
            "train_micro_batch_size_per_gpu": train.micro_batch_size,
            "gradient_accumulation_steps": config.num_microbatches,
            "gradient_clipping": optim.grad_clip,
            "steps_per_print": 10**9,
            "bf16": {"enabled": train.precision == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": int(train.precision == "bf16")},
        }
        self.batch = self.ranks.batch()
        self.pipelined = config.parallel.pipeline > 1
        model = gpt2(config)
        if self.pipelined:
            model = staged(model, config)
        optimizer = torch.optim.AdamW(
            decay_groups(model, optim.weight_decay),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(self) -> float:
        """Seconds of one step."""
        return self.ranks.seconds(self.work)

    def loss(self) -> float:
        """The mean over this rank's microbatches in the last step."""
        return float(self.mean)

    def work(self) -> None:
        """One step."""
        if self.pipelined:
            self.mean = self.engine.train_batch(
                (microbatch.tokens, microbatch.targets) for microbatch in self.batch
            )
            return
        self.mean = torch.zeros((), device=self.ranks.device)
        for microbatch in self.batch:
            loss = cross_entropy(self.engine(microbatch.tokens).logits, microbatch["targets"])
            self.mean += loss.detach() / len(self.batch)
            self.engine.backward(loss)
            self.engine.step()  # which steps behind the last microbatch alone


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Embedding(nn.Module):
    """GPT-2's token and position vectors; `weight` is what the head shares."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tokens, self.positions = model.transformer.wte, model.transformer.wpe

    @property
    def weight(self) -> Tensor:
        return self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, seq]`` → ``[batch, seq, hidden]``."""
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Layer(nn.Module):
    """One block, from hidden states to hidden states."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` → the same."""
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out


def staged(model: Any, config: Config) -> nn.Module:
    """GPT-2 as DeepSpeed's pipeline takes it: a list of layers, with the embedding again
    as the head, cut by parameters.
    """
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("embedding", Embedding, model, tied_weight_attr="tokens.weight"),
        *(Layer(block) for block in model.transformer.h),
        model.transformer.ln_f,
        TiedLayerSpec(
            "embedding",
            Embedding,
            model,
            forward_fn=lambda module, x: x @ module.weight.t(),
            tied_weight_attr="tokens.weight",
        ),
    ]
    return PipelineModule(
        layers, num_stages=config.parallel.pipeline, loss_fn=cross_entropy, partition_method="parameters"
    )
