"""Checks the commands of a page: their options, their settings, and the files they read."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.errors import UserError
from megacore.tools.settings.load import flatten, load, parse_override, smallest_world
from tests.documents.pages import ROOT, Fence, Finding, Page
from tests.documents.scripts import (
    ParsedError,
    Script,
    WrongWordsError,
    hidden_options,
    parse,
    script_at,
    script_of_command,
    script_of_module,
)
from tests.documents.shell import PLACEHOLDER, Command, ShellError, commands

OURS = re.compile(r"(launch|benchmarks|tests|configs|megacore|kernels|docs)/")
MODULES = re.compile(r"(benchmarks|tests|megacore)(\.|$)")
OVERRIDE = re.compile(r"(?:--)?[a-z_]+\.\w+=.*", re.DOTALL)
PATH_LIKE = re.compile(
    r"\.{0,2}[\w~.*-]*(/[\w.*-]*)+|[\w.*-]+\.(json|jsonl|txt|csv|png|py|pt|model|yaml|yml|svg|md|parquet)"
)
SLURM_SCRIPT = "launch/slurm/pretrain.sbatch"
QUICKSTART = "launch/quickstart.sh"
QUICKSTART_MAKES = ("data/stdlib", "runs/quickstart")

# By the destination of an option: what a command writes, and text that only looks like a path.
WRITES = {"output", "plot", "json", "cluster_file", "gpu_file", "heat_map", "out", "write", "folder"}
NOT_FILES = {"prompt", "overrides", "command", "image", "exclude", "include", "hosts_command", "url", "probe"}
NOT_FILES |= {"ranks_command", "plant", "fault", "layouts", "mount"}
FILE_SETTINGS = {"data.train", "data.valid", "data.tokenizer", "checkpoint.resume", "checkpoint.weights"}
FILE_SETTINGS |= {"model.source", "model.hf", "engine.config", "parallel.schedule"}

# Of launchers: the options whose product is the number of ranks.
RANKS = {"--nproc-per-node", "--nproc_per_node", "--nnodes", "--num_gpus", "--num_nodes"}
TASKS = {"--ntasks", "-n", "--num_processes", "-np"}


@dataclass
class State:
    """What the commands of a page have produced so far."""

    produced: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    needs_quickstart: list[int] = field(default_factory=list)

    def has(self, path: str) -> bool:
        """Whether a file is in the checkout or an earlier command has produced it, or a folder around it."""
        path = path.removeprefix("./").rstrip("/")
        if Path(path).name.startswith(("my.", "my_")):  # the reader's own file
            return True
        if "*" in path:
            return bool(list(ROOT.glob(path)))
        return is_tracked(path) or any(path.startswith(produced) for produced in self.produced)


@cache
def is_tracked(path: str) -> bool:
    """Whether a fresh checkout has the path; what runs leave in ignored folders does not count."""
    return path.split("/")[0] not in ("data", "runs", "models", "hostfile") and (ROOT / path).exists()


def wrong_commands(page: Page) -> list[Finding]:
    """The findings in all commands of a page, in fences and in text."""
    state = State()
    findings = list[Finding]()
    for fence in page.fences:
        state.produced += files_shown(page, fence)
        if fence.language == "bash":
            findings += wrong_in_fence(page, fence, state)
    if state.needs_quickstart and QUICKSTART not in page.text:
        files = " and ".join(QUICKSTART_MAKES)
        what = f"reads what {QUICKSTART} makes ({files}), which this page does not mention"
        findings.append(page.finding(state.needs_quickstart[0], what))
    return [*findings, *wrong_inline(page)]


def wrong_in_fence(page: Page, fence: Fence, state: State) -> Iterator[Finding]:
    try:
        typed = commands(fence.lines, fence.line + 1, state.variables)
    except ShellError as error:
        yield page.finding(error.line, str(error))
        return
    for command in typed:
        for what in wrong_in_command(command, state, has_needs=fence.words.startswith("needs")):
            yield page.finding(command.line, what)
        state.produced += command.written


def wrong_inline(page: Page) -> Iterator[Finding]:
    """Findings in the commands that the text shows in backticks."""
    for number, code in page.inline_code:
        if not re.match(r"(python3?|torchrun|deepspeed|megacore|bash|launch/\S+\.py|\w+\.py) ", code):
            continue
        # `plan.py --search` and `python -m benchmarks.muon` are parts of commands.
        is_name = re.fullmatch(r"python3? (-m )?\S+", code) or code.endswith("…")
        fragment = bool(is_name or not re.match(r"(python3?|torchrun|deepspeed|bash) ", code))
        text = re.sub(r"^(\w+\.py) ", r"launch/\1 ", code)
        try:
            typed = commands((text,), number, {})
        except ShellError as error:
            yield page.finding(number, str(error))
            continue
        for command in typed:
            state = State(produced=[""])  # every file is there: the text around the command says which
            for what in wrong_in_command(command, state, has_needs=True, fragment=fragment):
                yield page.finding(number, what)


def wrong_in_command(
    command: Command, state: State, *, has_needs: bool, fragment: bool = False
) -> Iterator[str]:
    """What is wrong with a command. Adds what it makes to `state`."""
    position = script_position(command.words)
    if position is None:
        yield from wrong_paths(command.words)
        if QUICKSTART in command.words:
            state.produced += QUICKSTART_MAKES
        else:  # such as git clone, cp or curl: what it writes is one of its words
            state.produced += [word.rstrip("/") for word in command.words[1:] if PATH_LIKE.fullmatch(word)]
        return
    index, script = position
    if script is None:
        yield f"{' '.join(command.words[: index + 1])}: the checkout has no such script"
        return
    words = [word for word in command.words[index + 1 :] if word not in (PLACEHOLDER, "...")]
    ranks = launched_ranks(command.words[:index])
    if script.path == ROOT / SLURM_SCRIPT:
        if words[:1] == ["--runs"]:
            del words[:2]
        script = Script(ROOT / "launch/pretrain.py")
    if script.path.suffix != ".py" or not script.has_parser:
        yield from wrong_paths(words)
        return
    if {"-h", "--help"} & set(words):
        return
    try:
        exact = with_values(words)
        parsed = parse(script, exact, fragment=fragment)
    except WrongWordsError as error:
        if not is_tolerated(str(error), words, fragment):
            yield f"{script.name}: {error}"
        return
    for word in parsed.rest:  # the script rejects what its parser leaves, unless it is a setting
        if word.startswith("-") and not OVERRIDE.fullmatch(word):
            yield f"{script.name}: {word} is not an option"
    for option in hidden_options(parsed, words):
        yield f"{script.name}: {option} is an old name that its -h does not show"
    if exact != words:  # the page leaves a number open, such as --world N
        parsed.values["world"] = None
    yield from wrong_settings(script, parsed, ranks, has_needs)
    if has_needs:
        yield from missing_configs(parsed, state)
    else:
        yield from missing_files(script, parsed, state, command.line)
    state.produced += written_files(script, parsed)

    nested = parsed.values.get("command")
    if isinstance(nested, list) and nested:
        inner = Command(command.line, [str(word) for word in nested])
        yield from wrong_in_command(inner, state, has_needs=has_needs, fragment=fragment)


def is_tolerated(message: str, words: list[str], fragment: bool) -> bool:
    """Whether a parser complains only of what the page leaves open: a placeholder, or an option's value."""
    if fragment and re.search(r"expected (one|at least one) argument", message):
        return True
    return any(re.fullmatch(r"[A-Z_]{2,}", word) and repr(word) in message for word in words)


def script_position(words: list[str]) -> tuple[int, Script | None] | None:
    """Where the words of a command name a script of the project, and which; None if they do not."""
    for index, typed in enumerate(words):
        word = typed.removeprefix("./")
        before = words[index - 1] if index else ""
        if word == SLURM_SCRIPT or (word.endswith(".py") and OURS.match(word)):
            return index, script_at(word)
        if before in ("-m", "--module") and MODULES.match(word):
            if word == "megacore":
                return command_position(words, index)
            return index, script_of_module(word)
        if word == "megacore" and (index == 0 or before.endswith("run")):
            return command_position(words, index)
    return None


def command_position(words: list[str], index: int) -> tuple[int, Script | None] | None:
    """The position of `NAME` in `megacore NAME`, and its script."""
    if len(words) <= index + 1 or words[index + 1].startswith("-"):
        return None
    return index + 1, script_of_command(words[index + 1])


def with_values(words: list[str]) -> list[str]:
    """Write a number for each placeholder, such as N or …, so that any type of option takes it."""
    placeholder = re.compile(rf"N|[A-Z]|.*{PLACEHOLDER}.*")
    return ["1" if placeholder.fullmatch(word) and "=" not in word else word for word in words]


def wrong_paths(words: list[str]) -> Iterator[str]:
    """Paths of the project that are not in the checkout."""
    for word in words:
        if OURS.match(word) and not re.search(r"[A-Z*…{]{2,}|[*…{<]", word) and not (ROOT / word).exists():
            yield f"{word} is not in the checkout"


def launched_ranks(words: list[str]) -> int | None:
    """The number of ranks that a launcher's options ask for, or None."""
    ranks: int | None = None
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        value = value if equals else words[index + 1] if index + 1 < len(words) else ""
        if value.isdigit() and option in RANKS:
            ranks = (ranks or 1) * int(value)
        elif value.isdigit() and option in TASKS:
            return int(value)
    if words and words[0] == "torchrun" and ranks is not None and "--nproc" not in " ".join(words):
        return None
    return ranks


@cache
def known_keys() -> frozenset[str]:
    return frozenset(flatten(Config().model_dump(by_alias=True)))


def overrides_in(parsed: ParsedError) -> list[str]:
    values = parsed.values.get("overrides") or parsed.rest
    return [word for word in values if isinstance(word, str) and OVERRIDE.fullmatch(word)]


def wrong_settings(script: Script, parsed: ParsedError, ranks: int | None, has_needs: bool) -> Iterator[str]:
    """Overrides of unknown keys, or a config that does not load with them."""
    overrides = [word for word in overrides_in(parsed) if PLACEHOLDER not in word]
    config = parsed.values.get("config")
    if not (isinstance(config, str) and config.endswith(".json") and is_tracked(config)):
        has_source = any(word.startswith(("model.source=", "model.hf=")) for word in overrides)
        for word in overrides:
            key = word.partition("=")[0].removeprefix("--")
            is_custom = key.startswith("model.") and (
                has_source or config is not None or script.name[:7] == "configs"
            )
            if key not in known_keys() and not is_custom:
                yield f"{key} is not a setting of the config (docs/config.md lists all)"
        return
    missing = [word for word in overrides if is_missing_file_setting(word)]
    overrides = [word for word in overrides if word not in missing]
    world = parsed.values.get("world")
    folder = Path.cwd()
    try:
        os.chdir(ROOT)
        if missing and any(word.startswith("model.") for word in missing):
            return  # a model that the checkout does not have: its settings are unknown
        size = smallest_world(config, overrides)
        wanted = world if isinstance(world, int) else ranks
        if parsed.values.get("search"):  # the config's own layout need not fit the ranks
            wanted = None
        load(config, overrides, wanted or size)
    except UserError as error:
        # A fence may need an optimizer that the page lets the reader write.
        if not (has_needs and "config error: optim.kind" in str(error)):
            yield f"{script.name} would reject this: {error}"
    finally:
        os.chdir(folder)


def setting_path(word: str) -> Iterator[str]:
    """The files that an override's value refers to."""
    key, value = parse_override(word.removeprefix("--"))
    if key not in FILE_SETTINGS:
        return
    values = (
        [part[-1] if isinstance(part, list) else part for part in value]
        if isinstance(value, list)
        else [value]
    )
    for path in values:
        if not isinstance(path, str):
            continue
        path = path.removeprefix("file:")
        is_name_on_hub = key == "model.hf" and not re.match(r"(models|runs|data|configs)/|\.", path)
        if PATH_LIKE.fullmatch(path) and not path.startswith("/") and not is_name_on_hub:
            yield path


def is_missing_file_setting(word: str) -> bool:
    return any(not is_tracked(path) for path in setting_path(word))


def missing_files(script: Script, parsed: ParsedError, state: State, line: int) -> Iterator[str]:
    """The files a command reads that neither the checkout nor an earlier command has."""
    wanted = [*read_files(parsed)]
    for word in overrides_in(parsed):
        wanted += setting_path(word)
    wanted += implied_data(script, parsed)
    for path in dict.fromkeys(wanted):
        if any(path.startswith(produced) for produced in QUICKSTART_MAKES) and not state.has(path):
            state.needs_quickstart.append(line)
        elif not state.has(path):
            yield f"{path}: no earlier command on the page makes this (or write ```bash needs WHAT)"


def missing_configs(parsed: ParsedError, state: State) -> Iterator[str]:
    """The files of configs/ that a command reads and the checkout lacks: `needs` is for data and runs."""
    for path in read_files(parsed):
        is_name = not re.search(r"[A-Z]{2,}|[*…{]", path)
        if path.removeprefix("./").startswith("configs/") and is_name and not state.has(path):
            yield f"{path} is not in the checkout"


def read_files(parsed: ParsedError) -> Iterator[str]:
    for name, value in parsed.values.items():
        if name in WRITES | NOT_FILES:
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            text = str(item) if isinstance(item, str | Path) else ""
            if PATH_LIKE.fullmatch(text) and text not in ("-", "/") and not text.startswith("hf:"):
                yield text


def implied_data(script: Script, parsed: ParsedError) -> Iterator[str]:
    """The corpus of the config, if a training run reads it."""
    config = parsed.values.get("config")
    values = parsed.values
    if script.path.name != "pretrain.py" or values.get("print_config") or not isinstance(config, str):
        return
    if not is_tracked(config) or any(word.startswith("data.train=") for word in overrides_in(parsed)):
        return
    folder = Path.cwd()
    try:
        os.chdir(ROOT)
        train = load(config, [], smallest_world(config, [])).config.data.train
    except UserError:
        return  # reported already
    finally:
        os.chdir(folder)
    for part in train if isinstance(train, list) else [train]:
        yield str(part[-1] if isinstance(part, list | tuple) else part)


def written_files(script: Script, parsed: ParsedError) -> Iterator[str]:
    """The files and folders that a command leaves."""
    values: dict[str, Any] = parsed.values
    for name in WRITES:
        if isinstance(values.get(name), str | Path):
            yield str(values[name])
    folders = [word.partition("=")[2] for word in overrides_in(parsed) if word.startswith("log.dir=")]
    yield from folders
    config = values.get("config")
    if script.path.name in ("pretrain.py", "ray_train.py") and not folders and isinstance(config, str):
        # An imported model trains in a folder next to its own.
        imported = Path(config).name == "config.json"
        yield f"runs/{Path(config).parent.name}_finetuned" if imported else f"runs/{Path(config).stem}"
    if script.path.name == "sweep.py" and isinstance(values.get("spec"), str | Path):
        yield f"runs/{Path(values['spec']).stem}"


def files_shown(page: Page, fence: Fence) -> Iterator[str]:
    """The file that a block's content is, if its first line or the text before it gives its name."""
    first = fence.lines[0] if fence.lines else ""
    if match := re.match(r"# (\S+\.\w+)$", first):
        yield match[1]
    before = [line for number, line in page.prose if number < fence.line and line.strip()][-1:]
    if fence.language in ("json", "python", "yaml", "text") and before:
        yield from re.findall(r"`([\w./-]+\.(?:json|py|yaml|txt))`", before[0])
