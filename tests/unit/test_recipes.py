"""What pages promise beyond their commands' syntax: the README is short and its runs fit their devices, a
recipe's numbers are those of its text, and a package has the files that it needs.
"""

import csv
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import megacore
from benchmarks import planner_rows
from benchmarks.planner import MEASURED
from launch import prepare
from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.tools.planner.profile import profile
from megacore.tools.planner.step_time import predict
from megacore.tools.settings import other_words
from megacore.tools.settings.load import flatten, parse_override
from tests.build import run_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_picture_is_on_a_page() -> None:
    """A picture that no page shows is drawn, downloaded and reviewed for nothing."""
    texts = [read(page) for page in ROOT.glob("**/*.md") if ".venv" not in page.parts]
    shown = {match for text in texts for match in re.findall(r"\]\([^)]*figures/(\w+\.png)\)", text)}
    assert {picture.name for picture in (ROOT / "docs/figures").glob("*.png")} <= shown


def test_pictures_are_small() -> None:
    """Everybody who clones the project downloads every version of them."""
    pictures = sorted((ROOT / "docs/figures").glob("*.png"))
    assert pictures and all(picture.stat().st_size < 200_000 for picture in pictures)


def commands(path: Path, script: str) -> list[list[str]]:
    """The words of a document's commands, in blocks and in text, that start a script with a config."""
    text = read(path)
    typed = re.findall(r"```bash[^\n]*\n(.*?)```", text, re.DOTALL) + re.findall(
        r"`(python [^`\n]*|launch/[^`\n]*)`", text
    )
    lines = [
        shlex.split(line, comments=True) for block in typed for line in block.replace("\\\n", "").splitlines()
    ]
    return [line for line in lines if f"launch/{script}.py" in line]


def overrides(words: list[str]) -> list[str]:
    return [word for word in words if re.match(r"[a-z]+\.\w+=", word)]


def test_the_readmes_runs_fit_their_devices() -> None:
    """For 1, 8 and 512 devices: the config's layout and batch divide over them,
    and what is planned is what runs.
    """
    found = []
    runs = [words for words in commands(README, "pretrain") if "model.source=my_model.py" not in words]
    for words in runs:
        number = re.search(r"(?:--num_gpus|--ntasks) (\d+)", " ".join(words))
        devices = int(number[1]) if number else 512 if "--hostfile" in words else 1
        config = words.index("--config")
        parallel = run_of(ROOT / words[config + 1], *words[config + 2 :], world=devices).parallel
        assert parallel.tensor * parallel.pipeline * int(parallel.data) == devices, words
        found.append(devices)
    assert found == [1, 8, 512, 512]
    [planned] = [words for words in commands(README, "plan") if "512" in words]
    assert [overrides(words) for words in runs[2:]] == [overrides(planned)] * 2


def test_the_recipe_of_gpt2_is_what_the_page_says() -> None:
    """A reader would spend days on a run with another batch or vocabulary, or without its tokenizer."""
    page = ROOT / "docs/recipes.md"
    runs = [words for words in commands(page, "pretrain") if "configs/gpt_124m.json" in words]
    fineweb, openwebtext = (
        run_of(ROOT / words[words.index("--config") + 1], *overrides(words), world=8) for words in runs
    )
    batch = [config.train.global_batch_size * config.train.seq_len for config in (fineweb, openwebtext)]
    assert batch == [524_288, 491_520]
    assert (fineweb.train.steps, openwebtext.train.steps) == (18_865, 600_000)
    for config in (fineweb, openwebtext):
        assert (config.model.vocab_size, config.max_positions) == (50_304, 1_024)

    prepared = [
        prepare.parse(words[2:])
        for words in commands(page, "prepare")
        if "hf:" in " ".join(words) and "gpt2" in words
    ]
    for config, options in zip((fineweb, openwebtext), prepared, strict=True):
        written = (options.output, f"{options.output}_valid", f"{options.output}.tokenizer.json")
        assert (config.data.train, config.data.valid, config.data.tokenizer) == written
        assert options.valid_fraction
    [planned] = [words for words in commands(page, "plan") if "configs/gpt_124m.json" in words]
    assert overrides(planned) == overrides(runs[0])


def test_the_published_steps_of_the_recipes_are_in_the_table() -> None:
    """The page compares a plan with measurements of others; a fit of the planner may change its side."""
    text = read(ROOT / "docs/recipes.md")
    rows = [
        row for row in planner_rows.read(MEASURED)[0] if row.setting.world == 8 and row.device.name == "a100"
    ]
    [row] = [row for row in rows if row.model == "mpt-125m" and row.setting.seq == 1024]
    predicted = predict(row.setting, row.device, row.cluster, profile(row.framework)).step
    assert f"predicts {predicted:.2f} s, and MosaicML [measured {row.seconds:.2f} s]" in text

    with MEASURED.open(encoding="utf-8", newline="") as file:
        published = [row for row in csv.DictReader(file) if row["n_gpus"] == "8" and row["tok_s_gpu"]]
    [mpt] = [
        row for row in published if row["model"] == "mpt-7b" and row["seq"] == "2048" and row["gbs"] == "48"
    ]
    assert mpt["hardware"] == "H100-80GB"
    assert f"{round(8 * float(mpt['tok_s_gpu']), -3):,.0f} for MPT-7B" in text
    [titan] = [row for row in published if row["framework"] == "torchtitan" and row["seq"] == "131072"]
    assert titan["model"] == "llama3-8b"
    assert f"{round(8 * float(titan['tok_s_gpu']), -2):,.0f} tokens per second" in text


def test_the_page_of_models_shows_what_runs() -> None:
    """Readers copy its table of parts, its config and its overrides."""
    page = ROOT / "docs/models.md"
    text = read(page)
    [table] = re.findall(r"^PARTS = \{.*?^\}", text, re.DOTALL | re.MULTILINE)
    assert table in read(ROOT / "configs/forks/plain_gpt.py")

    [content] = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    known = flatten(Config.model_validate_json(content).model_dump(by_alias=True))
    lines = [line for script in ("prepare", "verify", "pretrain") for line in commands(page, script)]
    keys = {word.split("=")[0] for line in lines for word in overrides(line)}
    assert {"model.hf", "checkpoint.weights", "parallel.tensor"} <= keys <= known.keys()


def test_the_settings_of_models_are_valid() -> None:
    """A setting that was renamed would send readers of the tables to a key that is rejected."""
    section = read(ROOT / "docs/models.md").partition("## Settings of published models")[2]
    settings = [f"model.{text}" for text in re.findall(r"`(\w+=[^`]+)`", section)]
    assert len(settings) > 50
    for setting in settings:
        path, value = parse_override(setting)
        ModelConfig.model_validate_json(json.dumps({path.removeprefix("model."): value}))


def test_every_setting_that_is_named_for_newcomers_exists() -> None:
    """A flag of another trainer would lead to a key that was renamed."""
    known = flatten(Config().model_dump(by_alias=True))
    rows = [
        line.split("|")[1] for line in read(ROOT / "docs/migrating.md").splitlines() if line.startswith("| `")
    ]
    named = [key for cell in rows for key in re.findall(r"`([a-z]+\.\w+)", cell)]
    assert len(named) > 50 and not set(named) - known.keys()


def test_the_table_for_newcomers_is_the_one_that_suggestions_come_from() -> None:
    """The page and the error messages would call one setting by two names."""
    command = "<!-- generated: other_words -->"
    assert f"{command}\n{other_words.table()}\n<!-- end -->" in read(ROOT / "docs/migrating.md")
    known = flatten(Config().model_dump(by_alias=True))
    keys = {key for names in other_words.words().values() for key in names}
    assert len(keys) > 60 and keys <= known.keys()
    # A word that is a key here as well may stand for nothing else.
    for word, names in other_words.words().items():
        assert word not in known or names == (word,), word


# Scripts that install a checkout, and the recipe of an image that holds one.
ONLY_IN_A_CHECKOUT = ("environment.sh", "quickstart.sh", "kubernetes/Dockerfile*")


def test_an_installed_package_has_all_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of an installed megacore would end where it reads a file that only a checkout has."""
    said = dict[str, Any]()
    monkeypatch.setattr("setuptools.setup", said.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    patterns = [(package, "*.py") for package in said["packages"]]
    patterns += [(package, pattern) for package, found in said["package_data"].items() for pattern in found]
    packed = set[Path]()
    for package, pattern in patterns:
        folder = ROOT / package.replace(".", "/")
        for prefix, elsewhere in said["package_dir"].items():
            if package == prefix or package.startswith(f"{prefix}."):
                folder = ROOT / elsewhere / package.removeprefix(prefix).removeprefix(".").replace(".", "/")
        packed.update(folder.glob(pattern))

    left_out = {path for pattern in ONLY_IN_A_CHECKOUT for path in (ROOT / "launch").glob(pattern)}
    left_out |= {ROOT / f"megacore/{name}/__init__.py" for name in ("kernels", "launch")}
    left_out.add(ROOT / "kernels/README.md")
    wanted = {
        path
        for folder in ("megacore", "kernels", "launch")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted - left_out == packed


def test_the_citation_is_of_the_newest_release() -> None:
    """A citation would have another version or date than what is cited."""
    cited = yaml.safe_load(read(ROOT / "CITATION.cff"))
    releases = re.findall(r"^## \[([\d.]+)\] - (.*)$", read(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert releases[0] == (cited["version"], str(cited["date-released"]))
    assert cited["version"] == megacore.__version__, "pyproject.toml is compared in test_packaging.py"
