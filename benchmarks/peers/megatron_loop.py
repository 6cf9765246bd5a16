"""megatron-core's GPT, optimizer and schedules, as its own training script puts them together.

On a CPU: its layers without Transformer Engine, which are its own and need no GPU, and `gpu_names` for what
it calls without asking.
"""

from typing import Any

import torch

from benchmarks.peers.gpu_names import let_cpu_stand_in
from benchmarks.peers.place import Ranks
from megacore.config import Config
from megacore.model.layers import DTYPES


class MegatronLoop:
    """The same model, batch and optimizer as `config` describes, over its tensor, pipeline and data ranks."""

    def __init__(self, config: Config) -> None:
        self.ranks = Ranks(config)
        if self.ranks.device.type == "cpu":
            let_cpu_stand_in()
            let_experts_run_on_cpu()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer import TransformerConfig

        model, train, optim, parallel = config.model, config.train, config.optim, config.parallel
        parallel_state.initialize_model_parallel(
            parallel.tensor, parallel.pipeline, expert_model_parallel_size=parallel.expert
        )
        tensor_parallel.model_parallel_cuda_manual_seed(train.seed)
        dtype = DTYPES[train.precision]
        half = train.precision == "bf16"
        sizes = TransformerConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_heads,
            ffn_hidden_size=model.ffn_size,
            layernorm_epsilon=model.norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            sequence_parallel=parallel.sequence,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=half,
            gradient_accumulation_fusion=False,
            use_cpu_initialization=self.ranks.device.type == "cpu",
            finalize_model_grads_func=finalize_model_grads,
            **mixture_of(config),
        )
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        gpt: Any = GPTModel(
            sizes,
            get_gpt_layer_local_spec(
                num_experts=model.num_experts, normalization="RMSNorm" if model.norm == "rmsnorm" else None
            ),
            model.vocab_size,
            train.seq_len,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=model.tie_embeddings,
            position_embedding_type="learned_absolute" if model.position == "learned" else "rope",
        ).to(self.ranks.device)
        if half:
            from megatron.core.transformer.module import Float16Module

            gpt = Float16Module(sizes, gpt)
        self.model = DistributedDataParallel(
            sizes, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True), gpt
        )
        self.model.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.beta1,
                adam_beta2=optim.beta2,
                adam_eps=optim.eps,
                clip_grad=optim.grad_clip,
                bf16=half,
                params_dtype=dtype,
            ),
            [self.model],
        )
        self.config, self.batch, self.run = config, self.ranks.batch(), get_forward_backward_func()
        shape = (train.micro_batch_size, train.seq_len)
        self.positions = torch.arange(train.seq_len, device=self.ranks.device).expand(shape)
        self.weights = torch.ones(shape, device=self.ranks.device)
        length = train.seq_len
        # True where a position must not be seen.
        self.mask = torch.ones(length, length, dtype=torch.bool, device=self.ranks.device).triu(1)[None, None]

    def forward(self, microbatches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        """A microbatch through a stage, and what its losses are made one with."""
        microbatch = next(microbatches)
        output = model(microbatch.tokens, self.positions, self.mask, labels=microbatch.targets)

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = (losses * self.weights).mean()
            return mean, {"loss": mean.detach().clone()}  # which the schedule then divides in place

        return output, loss

    def loss(self) -> float | None:
        """The mean over this rank's microbatches in the last step; None on a stage that is not the last."""
        return float(sum(entry["loss"] for entry in self.losses)) / len(self.losses) if self.losses else None

    def step(self) -> float:
        """Seconds of one step."""
        return self.ranks.seconds(self.work)

    def work(self) -> None:
        """One step."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        train = self.config.train
        self.losses = self.run(
            forward_step_func=self.forward,
            data_iterator=iter(self.batch),
            model=[self.model],
            num_microbatches=len(self.batch),
            seq_length=train.seq_len,
            micro_batch_size=train.micro_batch_size,
            forward_only=False,
        )
        self.optimizer.step()


def let_experts_run_on_cpu() -> None:
    """Gives megatron-core's mixture of experts what it takes for granted of a GPU and
    of Transformer Engine.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Its router looks whether this is None, where without Transformer Engine there is no such name.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)

    def on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # which leaves a CPU's sizes of an exchange as tensors
    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def mixture_of(config: Config) -> dict[str, Any]:
    """The settings of a model with experts: tokens exchanged by all-to-all, experts one after
    the other, no balance, no drops.
    """
    model = config.model
    if model.num_experts is None:
        return {}
    assert model.expert_ffn_size is not None
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_shared_expert_intermediate_size": model.shared_experts * model.expert_ffn_size or None,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": config.parallel.expert,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "bias_activation_fusion": False,
    }
