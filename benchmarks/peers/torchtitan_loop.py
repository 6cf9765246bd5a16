"""torchtitan's trainer over its Llama model, the nearest that it has to the config's: see
`NOT_IDENTICAL` in the report.

On a CPU: PyTorch's attention in place of kernels for GPUs, and sums in place of FSDP's premultiplied ones,
which gloo has not.
"""

import inspect
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peers.place import Ranks
from megacore.config import Config
from megacore.config.schema import resolved


class TorchtitanLoop:
    """A Llama of as many products as `config` has, over torchtitan's data, tensor and pipeline
    ranks; AdamW and clipping alike.
    """

    def __init__(self, config: Config) -> None:
        self.ranks = Ranks(config, join=False)
        os.environ.setdefault("LOCAL_RANK", str(self.ranks.rank))
        on_cpu = self.ranks.device.type == "cpu"
        if on_cpu:
            from torchtitan.tools import utils

            utils.device_type, utils.device_module = "cpu", torch.cpu
            from torchtitan.components import metrics

            nothing = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
            monitor = SimpleNamespace(
                device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None
            )
            metrics.build_device_memory_monitor = lambda: monitor
        from torchtitan.trainer import Trainer

        self.config = config
        self.trainer = Trainer(settings(config, Trainer, on_cpu))
        self.trainer.step = 1  # the first is always logged
        if on_cpu:
            from torch.distributed.fsdp import FSDPModule

            for part in self.trainer.model_parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.set_force_sum_reduction_for_comms(True)
        if (
            config.parallel.pipeline > 1
            and "arg_mbs" not in inspect.signature(self.trainer.pp_schedule.step).parameters
        ):
            self.trainer.pp_schedule.step = in_microbatches(self.trainer.pp_schedule)
        self.batch = self.ranks.batch()
        self.losses: list[torch.Tensor] = []
        self.forward_backward, self.trainer.forward_backward_step = (
            self.trainer.forward_backward_step,
            self.recorded,
        )

    def recorded(self, **inputs: Any) -> torch.Tensor:
        """torchtitan's microbatch, or all of a pipeline's, with its share of the loss kept."""
        self.losses.append(self.forward_backward(**inputs).detach())
        return self.losses[-1]

    def loss(self) -> float | None:
        """The mean over this rank's microbatches in the last step; None on a stage that is not the last."""
        last = self.config.parallel.pipeline == 1 or self.trainer.pp_has_last_stage
        return float(sum(self.losses)) * int(self.config.parallel.data) if last else None

    def inputs(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """A step's microbatches as torchtitan's loader gives them."""
        for microbatch in self.batch:
            yield {"input": microbatch.tokens}, microbatch["targets"]

    def step(self) -> float:
        """Seconds of one step."""
        return self.ranks.seconds(self.work)

    def work(self) -> None:
        """One step."""
        self.losses.clear()
        self.trainer.step += 1
        self.trainer.train_step(self.inputs())


def in_microbatches(schedule: Any) -> Any:
    """`step` of PyTorch's schedule as torchtitan 0.3 calls it, which takes microbatches; that of
    torch 2.13 takes a whole batch.
    """

    def step(
        *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, return_outputs: bool, loss_kwargs: Any
    ) -> None:
        schedule._stage.has_backward = True
        schedule._stage.clear_runtime_states()
        schedule._step_microbatches(
            arg_mbs or [()] * len(kwarg_mbs), kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs
        )

    return step


def settings(config: Config, trainer: Any, on_cpu: bool) -> Any:
    """The config as torchtitan's."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer.optimizer import default_adamw
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig
    from torchtitan.models import llama3

    model, train, parallel, optim = config.model, config.train, config.parallel, config.optim
    pipelined = parallel.pipeline > 1
    spec = replace(llama3.model_registry("debugmodel"), model=llama(config, llama3))
    return trainer.Config(
        model_spec=spec,
        dump_folder=tempfile.mkdtemp(prefix="torchtitan-"),
        loss=CrossEntropyLoss.Config(global_vocab_size=model.vocab_size),
        optimizer=default_adamw(lr=optim.lr, weight_decay=optim.weight_decay),
        tokenizer=Nothing(),
        dataloader=Nothing(),
        metrics=MetricsProcessor.Config(log_freq=10**9),
        activation_checkpoint=None,
        training=TrainingConfig(
            local_batch_size=train.micro_batch_size * (config.num_microbatches if pipelined else 1),
            global_batch_size=train.global_batch_size,
            seq_len=train.seq_len,
            max_norm=optim.grad_clip,
            mixed_precision_param="bfloat16" if train.precision == "bf16" else "float32",
            disable_cuda_graphs=pipelined or on_cpu,
        ),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=int(parallel.data),
            tensor_parallel_degree=parallel.tensor,
            pipeline_parallel_degree=parallel.pipeline,
            pipeline_parallel_schedule="1F1B",
            pipeline_parallel_microbatch_size=train.micro_batch_size,
            spmd_backend="partial_dtensor",
        ),
    )


def llama(config: Config, llama3: Any) -> Any:
    """Its Llama of the config's sizes, with as many feed-forward products: three matrices in place of two."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    model, train = config.model, config.train
    base = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    layers = llama3._build_llama3_layers(
        n_layers=model.num_layers,
        dim=model.hidden_size,
        n_heads=model.num_heads,
        hidden_dim=2 * resolved(model.ffn_size) // 3 // 8 * 8,
        rope=llama3.ComplexRoPE.Config(dim=config.head_size, max_seq_len=train.seq_len),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return replace(
        base,
        dim=model.hidden_size,
        vocab_size=model.vocab_size,
        tok_embeddings=replace(
            base.tok_embeddings, num_embeddings=model.vocab_size, embedding_dim=model.hidden_size
        ),
        norm=replace(base.norm, normalized_shape=model.hidden_size),
        lm_head=replace(base.lm_head, in_features=model.hidden_size, out_features=model.vocab_size),
        layers=layers,
    )


class Nothing:
    """In place of a tokenizer and a loader, which a step does not need."""

    def build(self, **_: Any) -> None:
        """Builds nothing."""

    def to_dict(self) -> dict[str, Any]:
        """Has no settings."""
        return {}
