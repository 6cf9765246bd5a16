"""The layouts that run over a strict wire: every engine but DeepSpeed, every schedule, each
context method, sums, generation.
"""

from megacore.config.parallel import CHUNKS
from tests.strict.runs import Case

HOSTS = "engine.reduce_levels=2"
SHARD, FSDP = "engine.shard_optimizer=true", "engine.kind=fsdp"
# which fp64 refuses: over gloo it must be the same to 1e-9
NARROW = ("engine.reduce_dtype=bf16", "train.precision=fp32")
DOCUMENTS = "data.document_mask=true"
SHALLOW = "model.num_layers=2"  # where ranks meet often in each layer
UNTIED = "model.tie_embeddings=false"
# Sums that travel compressed: without loss as one process, rounded as over gloo.
EXACT_BLOCKS = 'engine.compression={"kind":"int8","block":64,"rounding":"none"}'
FULL_RANK = 'engine.compression={"kind":"low_rank","rank":null}'
INT8, LOW_RANK = (
    'engine.compression={"kind":"int8","block":64}',
    'engine.compression={"kind":"low_rank","rank":2}',
)
FP32 = "train.precision=fp32"

CASES = [
    Case("dp2"),
    Case("dp4", (SHARD,)),
    Case("dp4", (HOSTS,)),
    Case("dp4", (HOSTS, SHARD)),
    Case("dp2", NARROW, "gloo"),
    Case("dp4", (HOSTS, *NARROW), "gloo"),
    Case("dp4", (HOSTS, *NARROW, SHARD), "gloo"),
    Case("dp2", (FSDP,)),
    Case("dp4", (FSDP, "engine.shard_size=2")),
    Case("dp2", (FSDP, "engine.reshard=false")),
    Case("tp2", (SHALLOW,)),
    Case("tp4sp", (SHALLOW,)),
    Case("tp2dp2sp", (SHALLOW, SHARD)),
    Case("tp2dp2sp", (SHALLOW, FSDP)),
    *(Case("cp2", (f"parallel.context_method={method}",)) for method in ("gather", "ring", "ulysses")),
    Case("cp4", (SHALLOW, "parallel.context_method=ring", DOCUMENTS)),
    Case("cp2dp2", ("parallel.context_method=gather", SHARD)),
    Case(
        "tp2cp2sp",
        (
            SHALLOW,
            "parallel.context_method=ring",
        ),
    ),
    *(Case(f"pp2@{schedule}") for schedule in CHUNKS),
    *(Case(f"pp4@{schedule}", (UNTIED,) if i % 2 else ()) for i, schedule in enumerate(CHUNKS)),
    Case("pp3dp2"),
    Case("pp2dp2@zb_h1", (SHARD,)),
    Case("pp2dp2@zb_v", (FSDP, UNTIED)),
    Case("pp2dp2@interleaved", (HOSTS,)),
    Case("tp2pp2dp2sp", (SHARD,)),
    Case("pp2cp2", ("parallel.context_method=ring",)),
    Case("tp2", (SHALLOW,), generates=True),
    Case("pp3", generates=True),
    Case("cp2pp2", ("parallel.context_method=gather",), generates=True),
    Case("dp4", (HOSTS, EXACT_BLOCKS)),
    Case("dp4", (HOSTS, SHARD, FULL_RANK)),
    Case("tp2pp2dp2sp", (SHALLOW, FULL_RANK)),
    Case("dp4", (HOSTS, INT8, FP32), "gloo"),
    Case("dp2", (SHARD, LOW_RANK, FP32), "gloo"),
]
# Of these the suite runs some, over each model of hardware queues in turn.
EVERY_TIME = [3, 12, 34, 36, 39, 41]
