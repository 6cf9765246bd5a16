"""The table of layouts that must compute the same as one process, and the mistakes that must be caught there.

A row is a config, overrides and layouts. Its layouts train for three steps with the real trainer on real
ranks, and `launch/verify.py` compares every gradient, weight, optimizer state, average and loss with plain
code on one process, in fp64. Each of the row's faults is then planted, and must be found in its layout.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacore.config.schema import MASK
from megacore.files import ROOT
from megacore.tools.verify.layouts import parse
from megacore.tools.verify.run import Options, Proof, Prover, prove
from megacore.tools.verify.workers import ProofWorkers
from tests.pool import MAX_WORLD

CONFIGS = ROOT / "configs"


@dataclass(frozen=True)
class Edit:
    """A mistake in the file of a model's layers: text that the file has once, and its replacement."""

    mistake: str
    before: str
    after: str


@dataclass(frozen=True)
class Fault:
    """A mistake to plant in one of a row's layouts.

    `change` is a function in `tests/faults`, as `module:function`, or an edit of the file of the model's
    layers. `differs` is the kind of tensor, or the logged number, that must be found different.
    """

    layout: str
    change: str | Edit
    differs: str = "gradient"

    def __str__(self) -> str:
        mistake = self.change.mistake if isinstance(self.change, Edit) else self.change.partition(":")[2]
        return f"{mistake} in {self.layout}"


@dataclass(frozen=True)
class Row:
    """A config with overrides, whose layouts must all compute the same as one process.

    A row without faults says in `no_fault` why. `compares` are kinds of tensors and logged numbers that the
    proof must have compared. `plant` changes the layouts and the one process alike.
    """

    name: str
    config: str
    overrides: str  # separated by spaces
    layouts: str  # separated by commas
    faults: tuple[Fault, ...] = ()
    no_fault: str = ""
    tolerance: float = 1e-11
    reason: str = "fp64 sums of some thousand terms in another order, which three updates enlarge"
    compares: frozenset[str] = frozenset({"gradient", "parameter", "loss", "grad_norm"})
    plant: str | None = None
    is_quick: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def world(self) -> int:
        """The number of ranks of the largest layout."""
        return max(parse(name).world for name in self.layouts.split(","))

    def prove(
        self, workers: ProofWorkers, folder: Path, layouts: str, change: str | Edit | None = None
    ) -> Proof:
        """Prove the row in `layouts`, with a fault's `change` if there is one."""
        overrides = self.overrides.split()
        if MASKED.strip() in overrides:
            # The proof writes its own corpus, which has a mask if this one has.
            (folder / f"corpus{MASK}").touch()
            overrides[overrides.index(MASKED.strip())] = f"data.train={folder}/corpus"

        plant = self.plant
        if isinstance(change, str):
            plant = f"tests.faults.{change}"
        elif change is not None:
            overrides.append(f"model.source={self.write_edited_source(folder, change)}")
        parsed = [parse(name) for name in layouts.split(",")]
        options = Options(str(CONFIGS / self.config), overrides, parsed, plant=plant)
        return prove(options, workers=workers)

    def write_edited_source(self, folder: Path, edit: Edit) -> Path:
        """Write the file of the model's layers with a mistake in it, and return the path of the copy."""
        source = (CONFIGS / self.config).with_suffix(".py")
        text = source.read_text(encoding="utf-8")
        assert text.count(edit.before) == 1, f"{source} must have exactly one {edit.before!r}"
        (folder / source.name).write_text(text.replace(edit.before, edit.after), encoding="utf-8")
        return folder / source.name


def cases(table: list[Row], least: int = 1, most: int = MAX_WORLD) -> list[Any]:
    """Return pytest's parameters `row` and `fault`: for each row None, and then each of its faults.

    Only rows whose largest layout has from `least` to `most` ranks.
    """
    parameters = []
    for row in table:
        assert row.faults or row.no_fault, f"{row.name} has no fault and does not say why"
        if least <= row.world <= most:
            marks = [pytest.mark.quick] if row.is_quick else []
            parameters.append(pytest.param(row, None, id=row.name, marks=marks))
            parameters += [pytest.param(row, fault, id=f"{row.name}: {fault}") for fault in row.faults]
    return parameters


def check(row: Row, fault: Fault | None, workers: ProofWorkers, folder: Path) -> None:
    """Assert that a row's layouts compute the same as one process or, with its fault, that one differs."""
    if fault is None:
        check_row(row, workers, folder)
    else:
        check_fault(row, fault, workers, folder)


def check_row(row: Row, workers: ProofWorkers, folder: Path) -> None:
    """Assert that all layouts of a row compute the same as one process."""
    proof = row.prove(workers, folder, row.layouts)
    for result in proof.results:
        assert result.impossible is None and result.equal, (
            result.layout.name,
            result.impossible or result.failure or result.missing or result.beyond[:1],
        )
    differences = [difference for result in proof.results for difference in result.differences.values()]
    compared = {difference.kind for difference in differences} | {d.name for d in differences}
    assert row.compares <= compared, f"not compared: {row.compares - compared}"
    worst = max(differences, key=lambda difference: difference.relative)
    assert worst.relative < row.tolerance, f"{worst.describe()} {worst.size}; the bound is for {row.reason}"


def check_fault(row: Row, fault: Fault, workers: ProofWorkers, folder: Path) -> None:
    """Assert that a fault of a row makes its layout differ from one process."""
    assert fault.layout in row.layouts.split(","), "a fault must be planted in a layout that the row proves"
    # Whether the layout differs is enough: to find out where it differs first takes as long again.
    with mock.patch.object(Prover, "_look_again"):
        (result,) = row.prove(workers, folder, fault.layout, fault.change).results
    assert result.failure is None, result.failure
    different = {difference.kind for difference in result.beyond} | {d.name for d in result.beyond}
    assert fault.differs in different, f"{fault}: {fault.differs} is equal, and {sorted(different)} are not"


GPT = "gpt_tiny.json"  # rotary positions, swiglu, RMS norms
MOE = "moe_tiny.json"
LORA = "forks/lora.json"
HYBRID = "forks/hybrid.json"
MULTI_TOKEN = "forks/multi_token.json"
SPEEDRUN = "forks/speedrun.json"
VISION = "forks/vision.json"

FEW = "train.global_batch_size=16 "  # four microbatches: two for each data rank, one for each stage
DOCUMENTS = "data.document_mask=true "
PACKED = "data.packing=best_fit "
MASKED = "data.train=MASKED "  # stands for a corpus with a mask: in some steps, some ranks learn nothing
FSDP = "engine.kind=fsdp "
SHARDED = "engine.shard_optimizer=true "
FULL = "train.recompute=full "
SELECTIVE = "train.recompute=selective "
GATHER = "parallel.context_method=gather "
RING = "parallel.context_method=ring "
ULYSSES = "parallel.context_method=ulysses "

NEOX = (
    "model.branches=parallel model.rotary_share=0.5 model.norm=layernorm model.activation=gelu_erf "
    "model.bias=true model.attention_sinks=true "
)
WINDOWS = (
    "model.window=5 model.global_every=2 model.attention_cap=0.5 model.num_kv_heads=2 model.nope_every=4 "
    "model.window_schedule=[[1,2],[2,3]] model.attention_sinks=true model.attention_gate=headwise "
    "model.window_rope_theta=30 "
)
LEARNED = (
    "model.position=learned model.norm=layernorm model.activation=gelu model.bias=true model.dropout=0.1 "
)
# Layers and a vocabulary that ranks cannot divide evenly.
UNEVEN = "model.num_layers=5 model.vocab_size=65 "
GPT2 = UNEVEN + "model.position=learned model.norm=layernorm model.activation=gelu model.bias=true "
LLAMA = UNEVEN + "model.tie_embeddings=false "
SCALES = (
    LLAMA + "model.qk_norm=true model.head_size=12 model.num_kv_heads=2 model.qkv_bias=true "
    "model.attention_scale=0.2 model.embedding_scale=3 model.residual_scale=0.4 model.logit_scale=0.5 "
    'model.rope_scaling={"type":"linear","factor":2} '
)

CONTEXT = [
    Row(
        "windows, gathered keys",
        GPT,
        FEW + WINDOWS + GATHER,
        "one,tp2sp,cp2,cp4",
        (Fault("cp2", "context:sink_on_every_rank"),),
    ),
    Row(
        "windows, ring, documents",
        GPT,
        FEW + WINDOWS + RING + DOCUMENTS,
        "cp2,cp2pp2",
        (Fault("cp2", "context:window_in_own_tokens"),),
    ),
    Row(
        "windows, ulysses, selective recomputation",
        GPT,
        FEW + WINDOWS + ULYSSES + SELECTIVE,
        "cp2,pp2,dp2",
        (Fault("cp2", "context:pieces_out_of_order"),),
    ),
    Row(
        "windows, ring, z-loss, capped logits",
        GPT,
        FEW + WINDOWS + RING + "model.z_loss=0.05 model.logit_cap=0.5",
        "tp2pp2dp2,cp4",
        (Fault("cp4", "context:ring_gradients_not_home"),),
    ),
    Row(
        "learned positions, gathered keys",
        GPT,
        FEW + LEARNED + GATHER,
        "cp4",
        (Fault("cp4", "context:gathered_gradients_unsummed"),),
    ),
    Row(
        "grouped queries, ring, documents",
        GPT,
        FEW + RING + DOCUMENTS + "model.num_kv_heads=2",
        "cp4,cp2tp2sp",
        (Fault("cp4", "context:documents_forgotten_between_ranks"),),
    ),
    Row(
        "grouped queries, ulysses, documents, sharded optimizer",
        GPT,
        FEW + ULYSSES + DOCUMENTS + SHARDED + "model.num_kv_heads=2",
        "cp2dp2",
        (Fault("cp2dp2", "context:mean_by_rank"),),
    ),
    Row(
        "learned positions, ulysses, full recomputation",
        GPT,
        FEW + LEARNED + ULYSSES + FULL,
        "cp2pp2",
        (Fault("cp2pp2", "context:masks_of_the_first_rank"),),
    ),
    Row(
        "learned positions, gathered keys, documents, untied",
        GPT,
        FEW + LEARNED + GATHER + DOCUMENTS + "model.tie_embeddings=false",
        "cp2pp2,cp2tp2",
        (Fault("cp2tp2", "context:gathered_gradients_summed_twice"),),
    ),
    Row(
        "ring, chunked loss, fsdp",
        GPT,
        FEW + RING + FSDP + "model.chunked_loss=true",
        "cp2dp2",
        (Fault("cp2dp2", "context:part_by_itself"),),
    ),
    Row(
        "ring, offloaded activations",
        GPT,
        FEW + RING + "train.offload_activations=true",
        "cp2",
        (Fault("cp2", "context:targets_shifted_in_pieces"),),
    ),
    Row(
        "learned positions, documents",
        GPT,
        FEW + LEARNED + DOCUMENTS,
        "tp2dp2",
        (Fault("tp2dp2", "data:loss_mean_per_rank"),),
    ),
    Row(
        "packed documents, ring, masked targets",
        GPT,
        FEW + PACKED + DOCUMENTS + MASKED + RING,
        "cp2dp2",
        (Fault("cp2dp2", "context:loss_times_context"),),
    ),
    Row(
        "masked targets, gathered keys",
        GPT,
        FEW + MASKED + GATHER,
        "cp4",
        (Fault("cp4", "context:mean_by_rank"),),
    ),
    Row(
        "packed samples, masked targets",
        GPT,
        FEW + PACKED + MASKED,
        "pp2dp2",
        (Fault("pp2dp2", "context:mean_by_rank"),),
    ),
]

DENSE = [
    Row(
        "parallel branches, partial rotary positions, sinks",
        GPT,
        FEW + NEOX,
        "one,tp2sp,pp2,cp2",
        (Fault("tp2sp", "tensor:partial_gradients_unsummed"),),
    ),
    Row(
        "shared norm, relu2, normed embedding, biased head",
        GPT,
        FEW + "model.branches=shared_norm model.activation=relu2 model.zero_init=true "
        "model.embedding_norm=true model.head_bias=true",
        "tp2pp2dp2",
        (Fault("tp2pp2dp2", "tensor:embedding_unsummed"),),
    ),
    Row(
        "norms on both sides, geglu, dropout",
        GPT,
        FEW + "model.norm_place=both model.norm_offset=true model.activation=geglu model.nope_every=2 "
        "model.dropout=0.1",
        "tp2sp,dp2",
        (Fault("tp2sp", "tensor:dropout_differs_by_tensor_rank"),),
    ),
    Row(
        "norms after, gated attention, selective recomputation",
        GPT,
        FEW + SELECTIVE + "model.attention_gate=elementwise model.norm_place=post "
        "model.activation=geglu_erf model.embedding_norm=true",
        "tp2pp2dp2,tp2pp2sp@zb_v",
        (Fault("tp2pp2sp@zb_v", "split:weight_gradient_lost"),),
    ),
    Row(
        "chunked loss, z-loss, norm over all heads",
        GPT,
        FEW + "model.z_loss=0.05 model.chunked_loss=true model.qk_norm=true model.qk_norm_heads=all",
        "tp2sp,tp2pp2",
        (Fault("tp2sp", "tensor:norm_of_local_heads"),),
    ),
    Row(
        "growing batch",
        GPT,
        "train.batch_ramp=[[9,4]]",
        "tp2,pp2,dp2@gpipe",
        (Fault("dp2@gpipe", "rows:last_batch_size_at_every_step"),),
    ),
    Row(
        "growing batch, sharded optimizer, dropout",
        GPT,
        SHARDED + "train.batch_ramp=[[9,4]] model.dropout=0.1",
        "pp2dp2",
        (Fault("pp2dp2", "rows:last_batch_size_at_every_step"),),
    ),
    Row(
        "gpt2",
        GPT,
        GPT2,
        "tp4,tp4sp,dp4,tp2dp2,tp2dp2sp",
        (
            Fault("tp2dp2", "tensor:row_output_summed_over_data"),
            Fault("tp4", "tensor:bias_added_on_every_rank"),
        ),
    ),
    Row(
        "gpt2 on all axes",
        GPT,
        GPT2,
        "tp2pp2dp2,tp2pp2dp2sp",
        (Fault("tp2pp2dp2", "pipeline:tied_gradients_unsummed"),),
    ),
    Row(
        "llama",
        GPT,
        LLAMA,
        "tp4sp,pp4",
        (
            Fault("tp4sp", "tensor:vocabulary_offset_rounded_down"),
            Fault("pp4", "pipeline:clip_per_stage", "grad_norm"),
        ),
    ),
    Row(
        "llama on all axes",
        GPT,
        LLAMA,
        "tp2pp2dp2sp",
        (Fault("tp2pp2dp2sp", "tensor:tokens_gathered_in_wrong_order"),),
        is_quick=True,
    ),
    Row(
        "fewer microbatches than stages",
        GPT,
        GPT2 + "train.global_batch_size=8",
        "pp4",
        (Fault("pp4", "structure:even_share_of_layers_run"),),
    ),
    Row(
        "gpipe",
        GPT,
        GPT2 + "parallel.schedule=gpipe",
        "tp2pp2",
        (Fault("tp2pp2", "pipeline:graph_of_another_microbatch"),),
    ),
    Row(
        "grouped queries",
        GPT,
        GPT2 + "model.num_kv_heads=2 model.position=rope model.attention=eager",
        "tp2pp2",
        (Fault("tp2pp2", "tensor:grouped_heads_by_wrong_stride"),),
    ),
    Row(
        "untied, learned positions",
        GPT,
        GPT2 + "model.tie_embeddings=false",
        "tp2pp2dp2sp",
        (Fault("tp2pp2dp2sp", "tensor:softmax_over_own_vocabulary"),),
    ),
    Row(
        "tied, rotary positions, swiglu with biases",
        GPT,
        GPT2 + "model.position=rope model.activation=swiglu",
        "tp2pp2sp",
        (Fault("tp2pp2sp", "tensor:rope_offset_by_rank"),),
    ),
    Row(
        "dropout on all axes",
        GPT,
        GPT2 + "model.dropout=0.2",
        "tp2pp2dp2sp",
        (Fault("tp2pp2dp2sp", "tensor:dropout_differs_by_tensor_rank"),),
    ),
    Row(
        "dropout, full recomputation",
        GPT,
        GPT2 + FULL + "model.dropout=0.2",
        "tp2pp2sp",
        (Fault("tp2pp2sp", "pipeline:recompute_draws_another_mask"),),
    ),
    Row(
        "scales, norm over wide heads",
        GPT,
        SCALES,
        "tp2pp2",
        (Fault("tp2pp2", "tensor:head_norm_gradients_unsummed"),),
    ),
    Row(
        "scales, selective recomputation",
        GPT,
        SCALES + SELECTIVE + "model.attention=eager",
        "tp2pp2sp",
        (Fault("tp2pp2sp", "public:replicated_gradient_summed_twice"),),
    ),
    Row(
        "selective recomputation",
        GPT,
        GPT2 + SELECTIVE + "model.attention=eager",
        "tp2pp2",
        (Fault("tp2pp2", "tensor:column_gradient_unsummed"),),
    ),
    Row(
        "sharded optimizer on all axes",
        GPT,
        GPT2 + SHARDED,
        "tp2pp2dp2sp",
        (Fault("tp2pp2dp2sp", "data:data_ranks_read_the_same"),),
    ),
    Row(
        "fsdp, fewer rows than ranks",
        GPT,
        GPT2 + FSDP + "model.num_heads=2 model.attention_sinks=true model.qk_norm=true",
        "dp4",
        (Fault("dp4", "rows:fsdp_gradients_averaged"),),
    ),
    Row(
        "fsdp over tensor ranks",
        GPT,
        GPT2
        + FSDP
        + "model.activation=swiglu model.tie_embeddings=false model.qk_norm=true model.position=rope",
        "tp2dp2,tp2dp2sp",
        (Fault("tp2dp2sp", "rows:fsdp_partial_gradients_unsummed"),),
    ),
    Row(
        "fsdp, gathered for every pass",
        GPT,
        GPT2 + FSDP + "engine.reshard=true parallel.schedule=gpipe",
        "pp2dp2",
        (Fault("pp2dp2", "rows:fsdp_partial_gradients_unsummed"),),
    ),
    Row(
        "fsdp, gathered once a step, recomputed",
        GPT,
        GPT2 + FSDP + FULL + "engine.reshard=false model.dropout=0.1",
        "dp2",
        (Fault("dp2", "rows:fsdp_gradients_averaged"),),
    ),
]

AVERAGED = frozenset({"average", "valid_loss", "gradient", "parameter"})
# Every elementwise rule in one model. Rules that take signs would follow noise where a gradient is zero, as
# in the biases of keys.
ELEMENTWISE = (
    "model.qkv_bias=false optim.slow_warmup=10 optim.ema=0.7 "
    'optim.groups=[{"match":["blocks.0.*","embedding.*"],"kind":"lion"},'
    '{"match":["blocks.1.*","*norm*"],"kind":"ademamix"}] '
)
RULES_BY_NAME = {
    "lion and ademamix with ema": (ELEMENTWISE, {"lion_m", "ademamix_slow"}),
    "schedule-free": ("optim.kind=schedule_free ", {"free_sum"}),
    "soap with ema": ("optim.kind=soap optim.ema=0.7 ", {"soap_qr", "soap_v", "adam_m"}),
}
ENGINES = {
    "native": ("tp2pp2", ""),
    "sharded optimizer": ("tp2dp2", SHARDED),
    "fsdp": ("tp2dp2", FSDP),
}
RULES = [
    Row(
        f"{rule}, {engine}",
        GPT,
        FEW + overrides + engine_overrides,
        layout,
        no_fault="the row over data ranks has the faults of rules and averages, which all engines share",
        compares=AVERAGED | states,
    )
    for rule, (overrides, states) in RULES_BY_NAME.items()
    for engine, (layout, engine_overrides) in ENGINES.items()
]
RULES.append(
    Row(
        "lion and ademamix with ema over data ranks",
        GPT,
        FEW + ELEMENTWISE,
        "dp2",
        (
            Fault("dp2", "rows:lion_betas_swapped", "lion_m"),
            Fault("dp2", "rows:first_weights_averaged", "average"),
        ),
        compares=AVERAGED,
    )
)

HALVES = "parallel.expert_halves=true "
BIASED = "model.bias=true model.activation=swiglu_clamped "
DROPPING = "model.capacity_factor=0.6 "
DEEPSEEK = (
    "model.router_scores=sigmoid model.router_bias_rate=0.1 model.router_scale=2.5 model.expert_groups=4 "
    "model.groups_per_token=2 model.router_balance=global "
)
LATENT = "model.head_size=16 model.kv_rank=32 model.q_rank=48 model.plain_size=16 model.value_size=16 "

EXPERTS = [
    Row(
        "experts",
        MOE,
        "",
        "tp2dp2ep2,tp2dp2etp1ep4sp",
        (Fault("tp2dp2ep2", "experts:experts_summed_over_all"),),
    ),
    Row(
        "experts, sharded optimizer, full recomputation",
        MOE,
        SHARDED + FULL,
        "dp4ep2",
        (Fault("dp4ep2", "experts:experts_by_their_ranks"),),
    ),
    Row(
        "experts over context ranks",
        MOE,
        SELECTIVE,
        "cp2ep2",
        (Fault("cp2ep2", "dispatch:gates_of_others_without_gradient"),),
    ),
    Row(
        "experts divided over data ranks, halves",
        MOE,
        HALVES,
        "dp2etp2",
        (Fault("dp2etp2", "experts:features_summed"),),
    ),
    Row(
        "experts in a pipeline, halves",
        MOE,
        HALVES,
        "pp2dp2ep2@zb_v",
        (Fault("pp2dp2ep2@zb_v", "dispatch:second_half_without_gradient"),),
    ),
    Row(
        "experts in an interleaved pipeline, full recomputation",
        MOE,
        FULL,
        "tp2pp2spetp1ep2@interleaved",
        (Fault("tp2pp2spetp1ep2@interleaved", "routers:router_left_partial"),),
    ),
    Row(
        "experts, fsdp, halves",
        MOE,
        FSDP + HALVES,
        "dp4ep2",
        (Fault("dp4ep2", "dispatch:halves_in_the_other_order"),),
    ),
    Row("dropped rows", MOE, DROPPING, "dp2", (Fault("dp2", "dispatch:dropped_rows_unwritten"),)),
    Row(
        "dropped rows, halves, full recomputation",
        MOE,
        DROPPING + HALVES + FULL,
        "tp2dp2etp1ep4sp",
        (Fault("tp2dp2etp1ep4sp", "dispatch:capacity_of_a_rank", "routing"),),
    ),
    Row(
        "dropped rows over context ranks",
        MOE,
        DROPPING,
        "cp2tp2ep2,pp2cp2etp1ep2",
        (Fault("cp2tp2ep2", "dispatch:capacity_of_a_rank", "routing"),),
    ),
    Row(
        "biased experts divided over data ranks, selective recomputation",
        MOE,
        BIASED + SELECTIVE,
        "dp2etp2",
        (Fault("dp2etp2", "experts:biases_by_every_part"),),
    ),
    Row(
        "biased experts, fsdp",
        MOE,
        BIASED + FSDP,
        "tp2dp2",
        (Fault("tp2dp2", "experts:biases_by_every_part"),),
    ),
    Row(
        "biased experts",
        MOE,
        BIASED,
        "tp2dp2etp1ep4sp,tp2pp2ep1@zb_v",
        (Fault("tp2dp2etp1ep4sp", "dispatch:biases_whatever_their_weight"),),
    ),
    Row(
        "experts, muon, sharded optimizer",
        MOE,
        SHARDED + "optim.kind=muon",
        "dp4ep2",
        (Fault("dp4ep2", "matrices:norm_of_all_copies", "parameter"),),
    ),
    Row(
        "experts, muon, fsdp",
        MOE,
        FSDP + "optim.kind=muon",
        "tp2dp2etp1ep2",
        (Fault("tp2dp2etp1ep2", "matrices:gate_and_up_as_one", "parameter"),),
    ),
    Row(
        "router bias, full recomputation",
        MOE,
        DEEPSEEK + FULL,
        "dp4ep2",
        (Fault("dp4ep2", "routers:bias_by_own_counts", "buffer"),),
    ),
    Row(
        "router bias in a pipeline",
        MOE,
        DEEPSEEK,
        "tp2pp2spetp1ep2",
        (Fault("tp2pp2spetp1ep2", "routers:bias_by_own_counts", "buffer"),),
    ),
    Row(
        "router bias over context ranks, fsdp",
        MOE,
        DEEPSEEK + FSDP,
        "dp2cp2ep4",
        (Fault("dp2cp2ep4", "routers:bias_by_own_counts", "buffer"),),
    ),
    Row(
        "all tokens to the first experts",
        MOE,
        "",
        "dp4ep4",
        (Fault("dp4ep4", "rows:unused_experts_undecayed", "parameter"),),
        plant="tests.expert_rows:alike",
    ),
    Row(
        "all tokens to the first experts, least capacity",
        MOE,
        "model.capacity_factor=1e-6",
        "tp2dp2etp1ep4",
        (Fault("tp2dp2etp1ep4", "rows:unused_experts_undecayed", "parameter"),),
        plant="tests.expert_rows:alike",
    ),
    Row(
        "all tokens to the first experts, fsdp",
        MOE,
        FSDP,
        "dp4ep4",
        (Fault("dp4ep4", "rows:unused_experts_undecayed", "parameter"),),
        plant="tests.expert_rows:alike",
    ),
]

LATENT_ATTENTION = [
    Row(
        "latent attention, zb_v",
        MOE,
        LATENT,
        "tp2pp2spetp1ep2@zb_v",
        (Fault("tp2pp2spetp1ep2@zb_v", "rows:latents_not_partial"),),
    ),
    Row(
        "latent attention, interleaved, full recomputation",
        MOE,
        LATENT + FULL,
        "tp2pp2@interleaved",
        (Fault("tp2pp2@interleaved", "rows:shared_key_gradient_unsummed"),),
    ),
    Row(
        "latent attention over context ranks",
        MOE,
        LATENT + SELECTIVE,
        "cp2ep2",
        (Fault("cp2ep2", "context:targets_shifted_in_pieces"),),
    ),
    Row(
        "latent attention, fsdp",
        MOE,
        LATENT + FSDP,
        "dp2ep2",
        (Fault("dp2ep2", "rows:fsdp_gradients_averaged"),),
    ),
    Row(
        "latent attention, sharded optimizer",
        MOE,
        LATENT + SHARDED,
        "dp2etp2",
        (Fault("dp2etp2", "experts:features_summed"),),
    ),
    Row(
        "latent attention, ring",
        MOE,
        LATENT + RING,
        "cp2tp2ep2",
        (Fault("cp2tp2ep2", "context:ring_gradients_not_home"),),
    ),
    Row(
        "latent attention, ulysses",
        MOE,
        LATENT + ULYSSES,
        "cp2tp2spep2",
        (Fault("cp2tp2spep2", "rows:latents_not_partial"),),
    ),
    Row(
        "latent attention, muon",
        MOE,
        LATENT + "optim.kind=muon",
        "tp2sp",
        (Fault("tp2sp", "matrices:qkv_as_one_where_sharded", "parameter"),),
    ),
]

ADAPTED = 'model.adapt=["*.attention.*","blocks.[13].feed_forward.*"] '
SETTINGS = {
    SPEEDRUN: "model.window=5 model.valued=2 ",
    MULTI_TOKEN: "",
    LORA: ADAPTED + "model.num_kv_heads=2 model.rank=3 optim.weight_decay=0.3 ",
    VISION: "model.patches=4 model.patch_size=3 model.sight_layers=2 ",
    HYBRID: "model.attention_every=3 model.chunk=3 ",
}
PLAIN_LAYOUTS = {
    SPEEDRUN: "cp2,pp4,tp2pp2sp@zb_v",
    MULTI_TOKEN: "cp2,pp4,tp2pp2sp@zb_v",
    LORA: "tp2,tp2pp2sp@zb_v",
    VISION: "pp4,tp2pp2sp@zb_v",
    HYBRID: "cp2,tp2pp2sp@zb_v",
}
NOT_PARTIAL = Edit("own tokens not partial", "partial=config.parallel.sequence", "partial=False")
CUSTOM_FAULTS = {
    SPEEDRUN: (
        Fault("pp4", "rows:gradient_of_first_block_lost"),
        Fault(
            "cp2",
            Edit(
                "window counted from the rank's first token",
                "seen = (behind >= 0) & (behind < self.window)",
                "behind = behind - behind[..., :1]\n"
                "        behind = behind + torch.arange(x.shape[0] // context.batch_size)[:, None]\n"
                "        seen = (behind >= 0) & (behind < self.window)",
            ),
        ),
        Fault(
            "tp2pp2sp@zb_v",
            Edit("shared numbers not partial", "partial=True),), fill=0.5)", "),), fill=0.5)"),
        ),
        Fault("tp2pp2sp@zb_v", NOT_PARTIAL),
    ),
    MULTI_TOKEN: (
        Fault(
            "cp2",
            Edit(
                "targets shifted on each rank",
                "return self.loss(x, batch[loss.over], ",
                'last = batch["targets"].shape[1] - 1\n'
                '        wanted = batch["targets"].roll(-1, 1).index_fill(1, torch.tensor(last), IGNORED)\n'
                "        return self.loss(x, wanted, ",
            ),
        ),
    ),
    LORA: (
        Fault("tp2pp2sp@zb_v", Edit("adapter not partial", "partial=sequence", "partial=False")),
        Fault(
            "tp2",
            Edit(
                "adapter counted twice in the norm",
                '(replicated(where["group"], partial=sequence),)',
                '(type(along := replicated(where["group"]))(along.axis, 0, 1),)',
            ),
            "grad_norm",
        ),
    ),
    VISION: (Fault("pp4", "rows:gradient_of_patches_lost"), Fault("tp2pp2sp@zb_v", NOT_PARTIAL)),
    HYBRID: (
        Fault(
            "cp2",
            Edit(
                "gradient of a state lost between context ranks",
                "runs_in_order(whole.movedim(2, 0), sequences)",
                "runs_in_order(whole.movedim(2, 0).detach(), sequences)",
            ),
        ),
        Fault(
            "cp2",
            Edit(
                "state of the wrong run of tokens",
                "before[run.start // length] for run in sequences.own",
                "before[i] for i in range(len(sequences.own))",
            ),
        ),
        Fault(
            "cp2",
            Edit(
                "convolution begins at the rank's first token",
                "torch.stack([every[:, :, i : i + back] for i in at], 2)",
                "torch.stack([before for i in at], 2)",
            ),
        ),
    ),
}
RECOMPUTED_FAULTS = {
    VISION: (
        Fault(
            "tp2pp2@interleaved",
            Edit(
                "gradient of patches counted on each tensor rank",
                "enter_tensor_parallel(patches, context.group, True) if context.sequence else patches",
                "enter_tensor_parallel(patches, context.group, context.sequence)",
            ),
        ),
    )
}
ELSEWHERE = "the model's faults are planted in the row of its config without settings"

CUSTOM = []
for config, settings in SETTINGS.items():
    name = Path(config).stem
    recomputed = RECOMPUTED_FAULTS.get(config, ())
    CUSTOM += [
        Row(name, config, settings, PLAIN_LAYOUTS[config], CUSTOM_FAULTS[config]),
        Row(
            f"{name}, full recomputation",
            config,
            settings + FULL,
            "tp2pp2@interleaved",
            recomputed,
            "" if recomputed else ELSEWHERE,
        ),
        Row(f"{name}, fsdp", config, settings + FSDP, "dp2", no_fault=ELSEWHERE),
    ]
    if config in (SPEEDRUN, MULTI_TOKEN, LORA):
        CUSTOM.append(
            Row(f"{name}, sharded optimizer", config, settings + SHARDED, "dp2", no_fault=ELSEWHERE)
        )
    if config in (LORA, VISION, HYBRID):
        CUSTOM.append(Row(f"{name}, ulysses", config, settings + ULYSSES, "cp2tp2sp", no_fault=ELSEWHERE))
