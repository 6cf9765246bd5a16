"""The help of every script has one form, an option has one meaning in all of them, and former names work."""

import argparse
import importlib
import inspect
import re
import shlex
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from megacore.tools import cli
from megacore.tools.cli import Parser, next_command
from megacore.tools.help_text import WIDEST, commands, invocation, shown_actions
from tests.pool import ROOT

FILES = [
    *ROOT.glob("launch/**/*.py"),
    *ROOT.glob("benchmarks/**/*.py"),
    *ROOT.glob("configs/forks/*.py"),
    *ROOT.glob("tests/*.py"),
    *ROOT.glob("tests/*/__main__.py"),
    ROOT / "tests/cluster/links.py",
]
SCRIPTS = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in FILES
    if re.search(r"^ +parser = Parser\($|parser = Parser\(\n", path.read_text())
)
LAUNCH = [name for name in SCRIPTS if name.startswith("launch.")]

# How a value of these options may be called, where scripts take different kinds of it.
VARIANTS = {
    "--output": {"FILE", "FOLDER", "PREFIX"},
    "--world": {"N", "N|MIN:MAX", "N,N"},
    "--layouts": {"LAYOUT,LAYOUT", "dp4:100,dp8"},
    "--only": {"NAME", "NAME,NAME", "N", "LAYOUT"},
    "--format": {"hf", "hf|nanogpt"},
    "--settings": {"own|equal", "NAME,NAME"},
    "--tokenizer": {"FILE", "NAME"},
    "--dtype": {"fp32|bf16|fp16", "uint16|uint32|int32|int64|uint64|uint8"},
}
FORMER = {"--out", "--links", "--look", "--watch", "--ranks", "--figure", "--corpus", "--device-file"}
IDIOMS = re.compile(
    r"\b(beside|behind|so (many|long|often)|go(es|ing)? on|whoever|nobody|somebody|stands? (in|at))\b|%\("
)


class Captured(BaseException):
    """A script's parser, taken at the moment in which it would parse."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser


@cache
def parser_of(name: str) -> Parser:
    """Return the parser of a script, which is imported and does nothing else."""
    module = importlib.import_module(name)
    if hasattr(module, "parser"):
        return module.parser()
    script = getattr(module, "main", None) or module.run
    places = [RankInfo()] * (len(inspect.signature(script).parameters) - 1)

    def capture(parser: Parser, *arguments: Any) -> None:
        raise Captured(parser)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Captured) as captured:
        patch.setattr(Parser, "parse_known_args", capture)
        script([], *places)
    return captured.value.parser


def complaints(parser: Parser) -> list[str]:
    """Return what is wrong with the form of a help text."""
    text = parser.help_text(100)
    parts = text.rstrip("\n").split("\n\n")
    epilogue = parts[-1].splitlines()
    page = epilogue[-1].rpartition("More: ")[2]
    actions = [each for each in shown_actions(parser) if not isinstance(each, argparse._SubParsersAction)]
    sentence = parts[1].replace("\n", " ")
    faults = {
        "a line is longer than 100 characters": any(len(line) > WIDEST for line in text.splitlines()),
        "the usage line is not first": not parts[0].startswith(f"usage: {parser.prog}"),
        "the purpose is not one sentence": not re.fullmatch(r"[A-Z][^.]*(\.\w[^.]*)*\.", sentence),
        "there is no example": not any(part.startswith("example:\n  ") for part in parts[2:]),
        "the epilogue has more than six lines": len(epilogue) > 6,
        "the exit status is missing": "Exit status: 0 " not in parts[-1].replace("\n", " "),
        "the page does not exist": not (ROOT / page).is_file(),
        "an option has no help": not all(action.help for action in actions),
        "a default is not written (default: …)": re.search(r"(?<!\()default: |defaults? to", text),
        "it depends on the machine": str(ROOT) in text or tempfile.gettempdir() in text,
        "it is worded otherwise in the style guide": IDIOMS.search(text),
    }
    return [complaint for complaint, is_so in faults.items() if is_so]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_help_has_the_form(name: str) -> None:
    parser = parser_of(name)
    assert complaints(parser) == []
    for command in commands(parser).values():
        assert isinstance(command, Parser) and complaints(command) == []


def test_scripts_are_found() -> None:
    assert len(LAUNCH) == len([*ROOT.glob("launch/**/*.py")]) and len(SCRIPTS) > len(LAUNCH) + 30


def planted(**changes: Any) -> Parser:
    """Return a parser whose help has the form, but for the changes."""
    texts = {"example": "python launch/plan.py --config FILE", "page": "README.md"} | changes
    return Parser(texts.pop("purpose", "Do something."), **texts)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"purpose": "Do something"}, "the purpose is not one sentence"),
        ({"purpose": "Do this. And that."}, "the purpose is not one sentence"),
        ({"notes": "word " * 150}, "the epilogue has more than six lines"),
        ({"page": "docs/" + "no_such_page.md"}, "the page does not exist"),
        ({"status": "well"}, "the exit status is missing"),
        ({"notes": "It goes on."}, "it is worded otherwise in the style guide"),
    ],
)
def test_a_planted_fault_of_the_form_is_reported(changes: dict[str, Any], complaint: str | None) -> None:
    assert complaints(planted(**changes)) == [*filter(None, [complaint])]


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_are_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the script's own parser, and each names a script that exists."""
    monkeypatch.chdir(tmp_path)  # where pictures could be written
    module, parser = importlib.import_module(name), parser_of(name)
    parsers = [parser, *commands(parser).values()]
    for example in [example for each in parsers for example in getattr(each, "examples")]:  # noqa: B009
        words = shlex.split(example)
        start = next(place for place, word in enumerate(words) if word.endswith(".py") or word in ("-m",))
        script, arguments = words[start], words[start + 1 :]
        if script == "-m":
            script, arguments = arguments[0].replace(".", "/"), arguments[1:]
            assert (ROOT / f"{script}.py").is_file() or (ROOT / script / "__main__.py").is_file()
        else:
            assert (ROOT / script).is_file()
        if name in LAUNCH:
            module.parse(arguments)
        else:
            parser.parse_intermixed_args(arguments)


def shape(action: argparse.Action) -> str:
    """Return how an option's value is called, without the ending of a file; empty for a switch."""
    value = invocation(action).partition(" ")[2]
    return re.sub(r"\bFILE\.\w+", "FILE", value)


def disagreements(parsers: dict[str, Parser]) -> list[str]:
    """Return the options that mean different things in different scripts, and former names that are shown."""
    shapes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, parser in parsers.items():
        for each in (parser, *commands(parser).values()):
            for action in shown_actions(each):
                for option in action.option_strings:
                    shapes[option][shape(action).split(" [")[0]].append(name)
    reports = [f"{option} is a former name" for option in sorted(FORMER & shapes.keys())]
    for option, names in sorted(shapes.items()):
        if len(set(names) - VARIANTS.get(option, set())) > (0 if option in VARIANTS else 1):
            reports.append(f"{option}: {dict(names)}")
    return reports


def test_an_option_has_one_meaning() -> None:
    reports = disagreements({name: parser_of(name) for name in SCRIPTS})
    assert not reports, "\n".join(reports)


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        ("--out", {"metavar": "FILE"}),
        ("--device", {"metavar": "NAME"}),
        ("--dry-run", {"metavar": "RANKS"}),
        ("--output", {"metavar": "RUNDIR"}),
        ("--json", {"action": "store_true"}),
    ],
)
def test_a_planted_option_of_another_meaning_is_reported(option: str, settings: dict[str, str]) -> None:
    parser = planted()
    parser.add_argument(option, help="planted", **settings)  # type: ignore[arg-type]
    others = {name: parser_of(name) for name in ("launch.generate", "launch.preflight", "launch.plan")}
    (found,) = disagreements(others | {"planted": parser})
    assert found.startswith(option)


SAMPLE = ("--config", "c.json")
FORMER_FORMS: list[tuple[str, str, str]] = [
    ("launch.plan", "--device h100 --links p5", "--gpu h100 --cluster p5"),
    ("launch.plan", "--write plan.json", "--output plan.json"),
    ("launch.plan", "--dry-run 0,8-15", "--simulate-ranks 0,8-15"),
    ("launch.plan", "--device=h100", "--gpu h100"),
    ("launch.drill", "--ranks 4 --watch 9", "--world 4 --hang-seconds 9"),
    ("launch.ray_train", "--workers 8:16 --look 5", "--world 8:16 --poll 5"),
    ("launch.supervise", "--ranks 8 --look 5", "--world 8 --poll 5"),
    ("launch.pretrain", "--deepspeed_config ds.json", "--deepspeed ds.json"),
    ("launch.scaling", "runs/a --device h100 --samples 9", "runs/a --gpu h100 --resamples 9"),
    ("launch.sweep", "sweep.json --device h100", "sweep.json --gpu h100"),
    ("launch.try", "a.py --against b.py --folder runs/c", "a.py --baseline b.py --output runs/c"),
    ("launch.monitoring.picture", "--out a.png", "--output a.png"),
    ("launch.generate", "--checkpoint runs/a --json", "--checkpoint runs/a --json -"),
    ("launch.preflight", "--json train.steps=9", "--json - train.steps=9"),
    ("launch.preflight", "--json --train.steps 9", "--json - train.steps=9"),
    ("launch.preflight", "--json --dry-run", "--json - --dry-run"),
    ("benchmarks.judging", "--ranks 64", "--world 64"),
    ("benchmarks.context", "--tokens 64 --figure a.png", "--lengths 64 --plot a.png"),
]


@pytest.mark.parametrize(("name", "former", "words"), FORMER_FORMS, ids=lambda value: str(value))
def test_former_names_mean_the_same_and_are_hidden(name: str, former: str, words: str) -> None:
    parser = parser_of(name)
    required = SAMPLE if any("--config" in a.option_strings and a.required for a in parser._actions) else ()
    parse = parser.parse_args if name == "launch.supervise" else parser.parse_intermixed_args
    assert vars(parse([*required, *former.split()])) == vars(parse([*required, *words.split()]))
    text = parser.help_text()
    hidden = {word.partition("=")[0] for word in former.split()} - set(words.split())
    assert not any(re.search(rf"{word}(?![-\w])", text) for word in hidden if word.startswith("--"))


def test_a_former_name_without_its_value_is_one_line_with_the_new_name() -> None:
    line = r"^config error: --simulate-ranks: expected one argument \(see -h\)$"
    with pytest.raises(ConfigError, match=line):
        parser_of("launch.plan").parse_args([*SAMPLE, "--dry-run"])


def test_a_mistyped_option_is_not_answered_with_a_former_name() -> None:
    with pytest.raises(ConfigError, match=r"--resample .*did you mean --resamples\?"):
        parser_of("launch.scaling").parse_args(["runs/a", "--resample", "3"])


def test_json_takes_a_file() -> None:
    words = [*SAMPLE, "--json", "a.json", "train.steps=9"]
    parsed = parser_of("launch.preflight").parse_intermixed_args(words)
    assert (parsed.json, parsed.overrides) == ("a.json", ["train.steps=9"])


def test_the_command_megacore_shows_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = importlib.import_module("launch.plan")
    monkeypatch.setattr(cli, "started_command", "megacore plan")
    text = plan.parser().help_text()
    assert text.startswith("usage: megacore plan --config FILE ") and "\n  megacore plan --config " in text
    monkeypatch.setattr(cli, "started_command", "megacore pretrain")
    text = importlib.import_module("launch.pretrain").parser().help_text()
    assert "\n  megacore pretrain --config " in text
    assert "\n  deepspeed --num_gpus 8 --module megacore pretrain --config " in text
    monkeypatch.setattr(cli, "started_command", "megacore sweep")
    assert plan.parser().help_text().startswith("usage: launch/plan.py ")
    monkeypatch.setattr(cli, "started_command", "megacore kubernetes/render")
    text = importlib.import_module("launch.kubernetes.render").parser().help_text()
    assert text.startswith("usage: megacore kubernetes/render ")
    assert "\n  megacore kubernetes/render --config " in text


@pytest.mark.parametrize(
    ("command", "started_by_megacore"),
    [
        ("python launch/pretrain.py --config a", "megacore pretrain --config a"),
        ("torchrun launch/pretrain.py --config a", "torchrun -m megacore pretrain --config a"),
        ("srun --ntasks 16 python launch/pretrain.py", "srun --ntasks 16 megacore pretrain"),
    ],
)
def test_the_next_command_has_the_form_of_this_one(
    monkeypatch: pytest.MonkeyPatch, command: str, started_by_megacore: str
) -> None:
    monkeypatch.setattr(cli, "started_command", None)
    assert next_command(command) == command
    monkeypatch.setattr(cli, "started_command", "megacore prepare")
    assert next_command(command) == started_by_megacore


def test_the_text_depends_on_the_width_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of("launch.plan")
    text = parser.help_text(WIDEST)
    for columns in ("100", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert parser.format_help() == text
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, parser.format_help().splitlines())) <= 60 and parser.help_text(WIDEST) == text
