"""Wrong tables and plain modules that only a run shows: each is reported with its place in the module, and no
proof of one is EQUAL.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megacore.config.implied import has_masks
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.verify.layouts import Layout, parse
from megacore.tools.verify.proof_report import explain, explain_wrong_model, verdict
from megacore.tools.verify.run import Options, Proof, prove
from megacore.tools.verify.self_check.case import EXACT
from megacore.tools.verify.self_check.finding import Report
from megacore.tools.verify.self_check.passes import check_look_ahead, check_repeat
from megacore.tools.verify.self_check.run import self_check
from megacore.tools.verify.shrink import load_whole, shrink, write_case
from megacore.tools.verify.workers import ProofWorkers
from tests.build import run_of
from tests.commands import provers
from tests.plain_modules import write_example, write_folder

Edit = tuple[str, str]
EXAMPLE = str(ROOT / "configs/forks/plain_gpt.json")
FEW = ("model.num_layers=2", "train.seq_len=16", "train.micro_batch_size=2", "train.global_batch_size=4")
DOCUMENTS = "data.document_mask=true"
SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
OUTPUT = "self.output = nn.Linear(width, width)"
LEAVES = "return self.output(y.transpose(1, 2).flatten(2))"
BEFORE = "x = x + self.attention(self.norm1(x))"
NORMS = "self.norm1, self.norm2 ="
DIVIDE = '    "attention.width": "divide",  # a number of features: those of a rank\n'
LLAMA = {
    "self_attn": "region",
    "self_attn.[qkv]_proj": "column",
    "self_attn.o_proj": "row",
    "mlp": "region",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
}


@pytest.fixture(scope="module")
def workers() -> Iterator[ProofWorkers]:
    with provers() as workers:
        yield workers


def proof_of(
    workers: ProofWorkers, layouts: str, source: Path, *overrides: str, config: str = EXAMPLE
) -> Proof:
    names = list(map(parse, layouts.split(",")))
    return prove(Options(config, [f"model.source={source}", *FEW, *overrides], names), workers=workers)


def report(proof: Proof) -> str:
    lines = [line for result in proof.results for line in explain(result)]
    return "\n".join([*lines, *explain_wrong_model(proof), verdict(proof)])


def llama(folder: Path, workers: ProofWorkers, **changes: str | None) -> str:
    """Prove a small Llama with some of its table changed, and return what is reported."""
    table = {place: role for place, role in (LLAMA | changes).items() if role is not None}
    source, hf = folder / "parts.py", write_folder(folder, "llama", num_hidden_layers=2)
    source.write_text(f"PARTS = {table}\n")
    (folder / "run.json").write_text("{}")
    return outcome(workers, "tp2", source, f"model.hf={hf}", config=str(folder / "run.json"))


def outcome(workers: ProofWorkers, layouts: str, source: Path, *overrides: str, config: str = EXAMPLE) -> str:
    """Return what a proof reports, whether it can be made or not."""
    try:
        return report(proof_of(workers, layouts, source, *overrides, config=config))
    except ConfigError as error:
        return str(error)


TABLES: dict[str, tuple[dict[str, str | None], str]] = {
    "a forgotten column": (
        {"self_attn.[qkv]_proj": None, "self_attn.[qv]_proj": "column"},
        "model.layers.0.self_attn (in which k_proj is whole): ValueError: ",
    ),
    "a forgotten gate": (
        {"mlp.gate_proj": None},
        "model.layers.0.mlp (in which gate_proj is whole): RuntimeError: ",
    ),
    "columns and rows exchanged": (
        {"self_attn.[qkv]_proj": "row", "self_attn.o_proj": "column"},
        "model.layers.0.self_attn.q_proj: ValueError: ",
    ),
    "keys and values that each rank has whole": (
        {"self_attn.[qkv]_proj": None, "self_attn.q_proj": "column"},
        "module model.layers.0.self_attn.o_proj, its input",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_wrong_table_of_a_class_is_reported_with_the_part(
    name: str, tmp_path: Path, workers: ProofWorkers
) -> None:
    """Its user knows the module's names, and neither ranks nor shapes of pieces."""
    changes, words = TABLES[name]
    found = llama(tmp_path, workers, **changes)
    assert words in found and not found.startswith("EQUAL"), found


HAND_WRITTEN = (
    (SDPA, "attend(q, k, v)"),
    (
        "class Block(",
        """def attend(q, k, v):
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(3) @ v


class Block(""",
    ),
)
RAMP = (  # of as many factors as a sequence may have tokens, taken from its start
    (
        NORMS,
        'self.register_buffer("ramp", torch.linspace(0, 1, 4096)[:, None], persistent=False)\n'
        f"        {NORMS}",
    ),
    (BEFORE, "x = x + self.ramp[: x.shape[1]] * self.attention(self.norm1(x))"),
)
OWN_MASK = (
    (SDPA, SDPA.replace("is_causal=True", "attn_mask=torch.ones(x.shape[1], x.shape[1]).tril().bool()")),
)

MODULES: dict[str, tuple[str, tuple[Edit, ...], tuple[str, ...], str]] = {
    "a number of features that is not divided": ("tp2", ((DIVIDE, ""),), (), "blocks.0.attention: "),
    "a number of heads in the code": (
        "tp2",
        (("t.unflatten(2, (-1, self.head_size))", "t.unflatten(2, (4, -1))"),),
        (),
        "module blocks.0.attention.output, its input",
    ),
    "its own mask": (
        "tp2sp",
        OWN_MASK,
        (),
        "blocks.0.attention: ValueError: blocks.0 attends with its own mask",
    ),
    "hand-written attention, context ranks": ("cp2", HAND_WRITTEN, (), "blocks.0 attends by its own code"),
    "hand-written attention, documents": (
        "one",
        HAND_WRITTEN,
        (DOCUMENTS,),
        "blocks.0 attends by its own code",
    ),
    "a buffer by length": ("cp2", RAMP, (), "module blocks.0.norm2, its input"),
    "a residual within a region": (
        "tp2",
        ((LEAVES, LEAVES.replace("return", "return x +")),),
        (),
        "module blocks.1.norm1, gradient of its output",
    ),
    "a scale behind a row": (
        "tp2",
        (
            (OUTPUT, f"{OUTPUT}\n        self.scale = nn.Parameter(torch.ones(width))"),
            (LEAVES, LEAVES.replace("return", "return self.scale *")),
        ),
        (),
        "blocks.0.attention.scale",
    ),
    "a shift of tokens": (
        "tp2sp",
        ((f"        {BEFORE}", f"        x = x + F.pad(x[:, :-1], (0, 0, 1, 0))\n        {BEFORE}"),),
        ("train.micro_batch_size=1",),  # of two, each rank would have a whole sequence
        "module blocks.0.norm1, its input",
    ),
    "two tensors enter a region": (
        "tp2",
        (
            ("self.attention(self.norm1(x))", "self.attention(self.norm1(x), x)"),
            (
                "def forward(self, x: Tensor) -> Tensor:\n        q, k, v",
                "def forward(self, x, more):\n        x = x + more\n        q, k, v",
            ),
        ),
        (),
        "blocks.0.attention: ValueError: a region of blocks.0 gets a second tensor with a gradient",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_a_layout_cannot_compute_is_reported_with_the_part(
    name: str, tmp_path: Path, workers: ProofWorkers
) -> None:
    """Each is right on one process, so that only the layout shows it."""
    layouts, edits, overrides, words = MODULES[name]
    found = outcome(workers, layouts, write_example(tmp_path, *edits), *overrides)
    assert words in found and not found.startswith("EQUAL"), found


def test_hand_written_attention_and_own_masks_train_where_they_see_all(
    tmp_path: Path, workers: ProofWorkers
) -> None:
    """Their users need no change unless they want context ranks or documents."""
    hand_written = outcome(workers, "one,tp2sp,pp2,dp2", write_example(tmp_path, *HAND_WRITTEN))
    assert hand_written.startswith("EQUAL to the untouched module"), hand_written


def checked(folder: Path, *edits: Edit) -> Report:
    """Return the self-check's findings about one process's model."""
    user = load_whole(EXAMPLE, [f"model.source={write_example(folder, *edits)}", *FEW])
    case = write_case(folder, shrink(user, [Layout("one")], 3, "fp64"), has_masks(user))
    return self_check(run_of(case, *EXACT), folder, (check_repeat, check_look_ahead))


def test_attention_without_a_mask_is_reported_by_the_look_ahead(tmp_path: Path) -> None:
    """The module is not causal itself, so that no comparison with it would find that."""
    report = checked(
        tmp_path, HAND_WRITTEN[0], (HAND_WRITTEN[1][0], HAND_WRITTEN[1][1].replace("~mask", "mask & ~mask"))
    )
    assert report.wrong == ("look ahead",)
    assert report.findings[1].summary.endswith("first in blocks.0")


def test_state_that_forward_changes_is_reported_by_the_repetition(tmp_path: Path) -> None:
    """Each layout runs forward another number of times."""
    counts = f"        self.calls += 1\n        x = x * self.calls\n        {BEFORE}"
    report = checked(tmp_path, (NORMS, f"self.calls = 0\n        {NORMS}"), (f"        {BEFORE}", counts))
    assert report.wrong == ("repeat",)
    assert report.findings[0].summary.endswith("first in blocks.0")


@pytest.mark.parametrize(
    ("key", "overrides", "layout"),
    [
        ("model.num_heads: 3 is not a multiple", ("model.num_heads=3", "model.hidden_size=24"), "tp2"),
        ("model.num_kv_heads: 2 is not a multiple", ("model.num_kv_heads=2",), "tp4"),
    ],
    ids=["odd heads", "fewer KV heads than tensor ranks"],
)
def test_heads_that_tensor_ranks_do_not_divide_are_rejected(
    key: str, overrides: tuple[str, ...], layout: str, tmp_path: Path, workers: ProofWorkers
) -> None:
    """Their features may be divisible, and each rank would attend with half a head."""
    assert key in outcome(workers, layout, write_example(tmp_path), *overrides)
