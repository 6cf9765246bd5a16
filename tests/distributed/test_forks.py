"""The forks of configs/forks: each equals one process wherever its layers are cut,
and mistakes in its seams show.
"""

import contextlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megacore.pipeline.partition import Partition
from megacore.tools.launchers import place_from_environment
from megacore.tools.settings.load import load
from tests import training
from tests.build import mesh_of, run_of
from tests.distributed.test_seams_flow import gradient_dropped
from tests.steps import Found, apart, train

FORKS = Path(__file__).parents[2] / "configs/forks"
TOLERANCE = 1e-10  # fp64: sums of some thousand terms in another order, in gradients of single numbers
MODELS: dict[str, dict[str, Any]] = {
    "speedrun": {
        "norm": "rmsnorm",
        "position": "rope",
        "bias": False,
        "tie_embeddings": False,
        "window": 5,
        "valued": 2,
    },
    "multi_token": {"position": "rope"},
    "lora": {"num_kv_heads": 2, "adapt": ["*.attention.*", "blocks.[134].feed_forward.*"], "rank": 3},
    "vision": {"norm": "rmsnorm", "position": "rope", "patches": 4, "patch_size": 3, "sight_layers": 2},
    "hybrid": {"norm": "rmsnorm", "position": "rope", "bias": False, "attention_every": 3, "chunk": 3},
}
OPTIM = {"speedrun": {"kind": "muon"}}
ONE: tuple[int, list[str]] = (1, [])
LAYOUTS = {
    "pp4": (4, ["parallel.pipeline=4"]),
    "zb_v, sequence": (
        4,
        ["parallel.pipeline=2", "parallel.schedule=zb_v", "parallel.tensor=2", "parallel.sequence=true"],
    ),
    "interleaved, tp2": (
        4,
        ["parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.tensor=2", "train.recompute=full"],
    ),
    "cp2": (2, ["parallel.context=2"]),
    "fsdp": (2, ["parallel.data=2", "engine.kind=fsdp"]),
    "sharded": (2, ["parallel.data=2", "engine.shard_optimizer=true"]),
    "ulysses, sequence": (
        4,
        [
            "parallel.context=2",
            "parallel.context_method=ulysses",
            "parallel.tensor=2",
            "parallel.sequence=true",
        ],
    ),
}
ATTENDS = ("ulysses, sequence",)  # these forks' own attention has one way, which "cp2" is
MIXED = {"zb_v, sequence", "interleaved, tp2", "ulysses, sequence", "fsdp"}  # each axis once
HAVE = {"speedrun": {*LAYOUTS} - {*ATTENDS}, "multi_token": {*LAYOUTS} - {*ATTENDS}}
HAVE |= {"hybrid": MIXED, "vision": MIXED, "lora": MIXED | {"sharded"}}
CASES = [(fork, name) for fork, own in HAVE.items() for name in LAYOUTS if name in own]


def config_of(folder: Path, fork: str, *edits: tuple[str, str]) -> str:
    """A small config of a fork, with some of the fork's text replaced."""
    text = (FORKS / f"{fork}.py").read_text(encoding="utf-8")
    for before, after in edits:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / f"{fork}.py").write_text(text, encoding="utf-8")
    model = {"source": str(folder / f"{fork}.py"), **MODELS[fork]}
    return training.write_config(
        folder,
        "unused",
        model=model,
        train={"precision": "fp64"},
        optim=OPTIM.get(fork, {}) | {"weight_decay": 0.3},
    )


def trained(config_path: str, overrides: list[str], partition: Partition, lost: str) -> Found:
    """Some steps. `lost`: every cut loses the gradient of what layers hand on under this name."""
    place = place_from_environment()
    config = run_of(load(config_path, overrides, place.world_size).config.with_partition(partition))
    with gradient_dropped(lost) if lost else contextlib.nullcontext():
        return train(config, mesh_of(config))


@pytest.fixture(scope="module")
def run(pool: Any) -> Callable[..., list[Found]]:
    """`run(layout, config_path, lost="")`: what its ranks find.

    Where to cut is found here, once a config: each rank would count the products of all layers, which takes
    longer than the steps.
    """

    def found(layout: tuple[int, list[str]], config_path: str, lost: str = "") -> list[Found]:
        ranks, overrides = layout
        partition = run_of(config_path, *overrides, world=ranks).partition
        return pool.run(ranks, trained, config_path, overrides, partition, lost)

    return found


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """`config_path(fork)`: a fork as it is, written once."""
    return cache(lambda fork: config_of(tmp_path_factory.mktemp(fork), fork))


@pytest.fixture(scope="module")
def alone(run: Any, config_path: Callable[[str], str]) -> Callable[[str], Found]:
    """`alone(fork)`: what one process finds, which each fork computes once."""
    return cache(lambda fork: run(ONE, config_path(fork))[0])


@pytest.mark.parametrize(("fork", "name"), CASES)
def test_every_layout_is_one_process(
    run: Any, config_path: Any, alone: Callable[[str], Found], fork: str, name: str
) -> None:
    """A tensor that is lost at a cut, tokens of a neighbour that are not seen, a number
    that ranks share and each changes.
    """
    assert apart(run(LAYOUTS[name], config_path(fork)), alone(fork)) < TOLERANCE


BY_PLACE = (
    "seen = (behind >= 0) & (behind < self.window)",
    "behind = behind - behind[..., :1] + torch.arange(x.shape[0] // context.batch_size)[:, None]\n        "
    "seen = (behind >= 0) & (behind < self.window)",
)
ROLLED = (
    "return self.loss(x, batch[loss.over], ",
    'wanted = batch["targets"].roll(-1, 1).index_fill(1, torch.tensor(batch["targets"].shape[1] - 1), '
    "IGNORED)\n        "
    "return self.loss(x, wanted, ",
)
ALONE = (
    "runs_in_order(whole.movedim(2, 0), sequences)",
    "runs_in_order(whole.movedim(2, 0).detach(), sequences)",
)
ANEW = ("torch.stack([every[:, :, i : i + back] for i in at], 2)", "torch.stack([before for i in at], 2)")
IN_TURN = (
    "before[run.start // length] for run in sequences.own",
    "before[i] for i in range(len(sequences.own))",
)
TWICE = (
    "enter_tensor_parallel(patches, context.group, True) if context.sequence else patches",
    "enter_tensor_parallel(patches, context.group, context.sequence)",
)
MISTAKES = {
    "patches whose gradient is counted on each tensor rank": ("vision", TWICE, "interleaved, tp2"),
    "patches of own tokens as if of all": (
        "vision",
        ("partial=config.parallel.sequence", "partial=False"),
        "zb_v, sequence",
    ),
    "a state whose gradient is lost between context ranks": ("hybrid", ALONE, "cp2"),
    "a state of the wrong run": ("hybrid", IN_TURN, "cp2"),
    "a convolution that begins where the rank's tokens do": ("hybrid", ANEW, "cp2"),
    "a window counted from where the rank's tokens begin": ("speedrun", BY_PLACE, "cp2"),
    "a share of what each rank has of a number": (
        "speedrun",
        ("partial=True),), fill=0.5)", "),), fill=0.5)"),
        "zb_v, sequence",
    ),
    "tokens that are not seen as parts": (
        "speedrun",
        ("partial=config.parallel.sequence", "partial=False"),
        "zb_v, sequence",
    ),
    "targets that are rolled by each rank": ("multi_token", ROLLED, "cp2"),
    "an adapter's factor of own tokens as if of all": (
        "lora",
        ("partial=sequence", "partial=False"),
        "zb_v, sequence",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_caught(
    run: Any, alone: Callable[[str], Found], tmp_path: Path, mistake: str
) -> None:
    """In the forks' own seams; one process computes the same with and without them."""
    fork, edit, name = MISTAKES[mistake]
    one, wrong = alone(fork), config_of(tmp_path, fork, edit)
    assert apart(run(ONE, wrong), one) < TOLERANCE
    assert apart(run(LAYOUTS[name], wrong), one) > 1e-6


@pytest.mark.parametrize(("fork", "lost"), [("speedrun", "first"), ("vision", "patches")])
def test_a_tensor_whose_gradient_is_lost_at_a_cut_is_caught(
    run: Any, config_path: Any, alone: Callable[[str], Found], fork: str, lost: str
) -> None:
    """The planted fault, of a skip or an encoder's: forward is right, and so is
    every gradient of the last stage.
    """
    assert apart(run(LAYOUTS["pp4"], config_path(fork), lost), alone(fork)) > 1e-6


def test_adapters_in_the_norm_twice_are_caught(
    run: Any, alone: Callable[[str], Found], tmp_path: Path
) -> None:
    """The planted fault: a factor that both tensor ranks hold counts on each.

    No weight or gradient is wrong before the first update.
    """
    twice = (
        '(replicated(where["group"], partial=sequence),)',
        '(type(along := replicated(where["group"]))(along.axis, 0, 1),)',
    )
    right = alone("lora").figures[0]
    for edits, fits in (((), True), ((twice,), False)):
        (loss, norm), *_ = run((2, ["parallel.tensor=2"]), config_of(tmp_path, "lora", *edits))[0].figures
        assert abs(loss / right[0] - 1) < TOLERANCE
        assert (abs(norm / right[1] - 1) < TOLERANCE) is fits
