"""Each recipe of docs/recipes.md starts: its commands find their config, settings and data, and its training
runs two steps with real ranks, on a model that is small in size only.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from launch import prepare
from megacore.config import Config
from megacore.errors import UserError
from megacore.tools.local_ranks import free_port, rank_environment
from tests.build import run_of
from tests.commands import ROOT, run_script
from tests.documents.commands import QUICKSTART, launched_ranks
from tests.documents.pages import Fence, Page, read_page
from tests.documents.shell import Command, commands
from tests.pool import PATIENCE
from tests.training import write_corpus

PAGE = read_page(ROOT / "docs/recipes.md")
PREPARE = "launch/prepare.py"
PRETRAIN = "launch/pretrain.py"
VOCAB_SIZE = 64


def recipe(title: str, page: Page = PAGE) -> list[Fence]:
    """Return the fences of commands below a heading of the second level."""
    headings = [number for number, line in page.prose if line.startswith("## ")]
    first = page.lines.index(f"## {title}") + 1
    last = min([number for number in headings if number > first], default=len(page.lines) + 1)
    return [fence for fence in page.fences if first < fence.line < last and fence.language == "bash"]


def typed(fence: Fence) -> list[Command]:
    """Return the commands of a fence."""
    return commands(fence.lines, fence.line + 1, {})


def titles() -> list[str]:
    """Return the names of all recipes."""
    return [line.removeprefix("## ") for _, line in PAGE.prose if line.startswith("## ")]


def titles_with_configs() -> list[str]:
    """Return the recipes that train a config of the checkout.

    The others train the config that an import or a conversion has just written, and
    tests/unit/test_finetuning.py types all their commands.
    """
    return [
        title
        for title in titles()
        if any(config_of(command) for fence in recipe(title) for command in typed(fence))
    ]


def config_of(command: Command) -> str | None:
    """Return the config in configs/ that a command trains, or None."""
    if PRETRAIN not in command.words:
        return None
    config = command.words[command.words.index("--config") + 1]
    return config if config.startswith("configs/") else None


def start(fences: list[Fence], folder: Path) -> int:
    """Prepare tiny data where the commands prepare data, start each training, and return their number.

    Raises `ConfigError` if a command has a setting that does not exist, and `AssertionError` if a training
    fails.
    """
    (folder / "data").mkdir()
    provide(folder, "data/stdlib", "data/stdlib.model")  # by the quickstart, which other recipes build on
    trained = 0
    for fence in fences:
        for prefix in re.findall(r"data/\w+", fence.words):  # the fence says that the reader needs it
            provide(folder, prefix, f"{prefix}.model")
        for command in typed(fence):
            if PREPARE in command.words:
                options = prepare.parse(command.words[command.words.index(PREPARE) + 1 :])
                provide(folder, options.output, tokenizer_file(options.output, options.tokenizer))
            elif config_of(command) is not None:
                train(command, folder)
                trained += 1
    return trained


def tokenizer_file(prefix: str, tokenizer: str) -> str | None:
    """Return the file that preparing with this tokenizer writes, or None."""
    if tokenizer == "bytes":
        return None
    return f"{prefix}.model" if tokenizer.startswith("sentencepiece:") else f"{prefix}.tokenizer.json"


def provide(folder: Path, prefix: str, tokenizer: str | None) -> None:
    """Write a corpus of random tokens, its validation split, and a file where its tokenizer would be."""
    for name in (prefix, f"{prefix}_valid"):
        write_corpus(folder, name, vocab_size=VOCAB_SIZE)
    if tokenizer is not None:
        (folder / tokenizer).touch()


def train(command: Command, folder: Path) -> None:
    """Start a recipe's training for two steps, with at most two ranks along each axis."""
    words = command.words[command.words.index("--config") + 1 :]
    config, overrides = str(ROOT / words[0]), words[1:]
    user = run_of(config, *overrides, world=launched_ranks(command.words) or 1)
    small = smaller(user)
    world = small["parallel.tensor"] * small["parallel.pipeline"]
    world *= small["parallel.context"] * small["parallel.data"]
    if user.checkpoint.weights is not None:  # of a run that the reader has made with the same config
        earlier = [f"log.dir={user.checkpoint.weights}", "parallel.data=1", "parallel.context=1"]
        launch(folder, 1, ["--config", config, *assignments(small), *earlier])
    launch(folder, world, ["--config", config, *overrides, *assignments(small)])


def smaller(user: Config) -> dict[str, Any]:
    """Return settings that shrink a run and keep its architecture, engine, schedule and axes."""
    model, parallel = user.model, user.parallel
    settings: dict[str, Any] = {
        "model.num_layers": 4,
        "model.hidden_size": 64,
        "model.num_heads": 4,
        "model.vocab_size": VOCAB_SIZE,
        "train.steps": 2,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 4,
        "train.seq_len": 32,
        "train.precision": "fp32",
        "train.device": "cpu",
        "train.eval_batches": 1,
        "optim.warmup_steps": 1,
        "log.every": 1,
        "log.tensorboard": False,
    }
    if model.num_kv_heads != model.num_heads and model.num_kv_heads is not None:
        settings["model.num_kv_heads"] = 2
    if model.ffn_size is not None:
        settings["model.ffn_size"] = 96
    for axis in ("tensor", "pipeline", "context", "data"):
        settings[f"parallel.{axis}"] = min(2, int(getattr(parallel, axis)))
    return settings


def assignments(settings: dict[str, Any]) -> list[str]:
    return [
        f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in settings.items()
    ]


def launch(folder: Path, world: int, words: list[str]) -> None:
    """Run launch/pretrain.py on `world` ranks as a launcher would."""
    port = free_port()

    def run_rank(rank: int) -> CompletedProcess[str]:
        variables = rank_environment(rank, world, port) if world > 1 else {}
        return run_script(PRETRAIN, *words, timeout=PATIENCE, folder=folder, **variables)

    with ThreadPoolExecutor(world) as threads:
        ended = list(threads.map(run_rank, range(world)))
    errors = "".join(rank.stderr for rank in ended)
    assert not any(rank.returncode for rank in ended), errors
    assert "step 2/2" in ended[0].stdout, ended[0].stdout


@pytest.mark.parametrize("title", titles_with_configs())
def test_the_recipe_starts(title: str, tmp_path: Path) -> None:
    """A key that was renamed, or data under another name, would end a reader's run in its first second."""
    assert start(recipe(title), tmp_path)


def test_every_recipe_is_started() -> None:
    """Each recipe trains a config of the checkout, is a script, or is typed in test_finetuning.py."""
    assert set(titles()) - set(titles_with_configs()) == {"Quickstart", "Fine-tune", "Chat", "InstructLab"}
    assert [command.words for command in typed(recipe("Quickstart")[0])] == [["bash", QUICKSTART]]


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("train.micro_batch_size=64", "train.micro_batch=64", "train.micro_batch"),
        ("--output data/fineweb", "--output data/web", "data/fineweb"),
        ("configs/gpt_124m.json", "configs/gpt_125m.json", "gpt_125m"),
    ],
)
def test_a_wrong_recipe_is_noticed(right: str, wrong: str, message: str, tmp_path: Path) -> None:
    """The planted faults: an unknown key, data that no command prepares, and a config that does not exist."""
    page = Page(PAGE.name, PAGE.text.replace(right, wrong))
    assert page.text != PAGE.text
    with pytest.raises((UserError, AssertionError), match=re.escape(message)):
        start(recipe("GPT-2 124M", page), tmp_path)
