"""Plant small mistakes in functions drawn at random, and see whether verify or the tests notice.

A mutant is one function of the core with one small mistake: another sign, a comparison that includes its end,
a call left out, a gradient that is detached. The functions and mistakes follow from `--seed` alone. Each
mutant is planted in a copy of this checkout and meets, until something notices it: `launch/verify.py` on
configs that use its package, the test files that mention it, and with `--suite` all tests.

A survivor is not always a gap: the code may run on GPUs only, the mistake may change nothing that a user can
see, or only speed. So survivors are listed, with the line that was changed, to be read by a person.
"""

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = "python -m tests.mutants --seed 0 --count 30 --output mutants.json"
PACKAGES = ("model", "expert_parallel", "context_parallel", "optimizers", "engine", "checkpoint")
SECONDS = 900  # a command that runs longer than this hangs
MOST_TEST_FILES = 3

# Proofs that use a package, as arguments of launch/verify.py. Two ranks at most: most of the time of a larger
# layout is the start of its processes.
TINY = "--config configs/gpt_tiny.json --layouts"
PROOFS = {
    "model": (f"{TINY} one,tp2sp,pp2", "--config configs/forks/hybrid.json --layouts one"),
    "expert_parallel": ("--config configs/moe_tiny.json --layouts one,tp2sp,ep2",),
    "context_parallel": (f"{TINY} one,cp2 model.window=100", f"{TINY} cp2 data.document_mask=true"),
    "optimizers": (f"{TINY} one,dp2", f"{TINY} one,tp2 optim.kind=muon", f"{TINY} dp2 optim.kind=soap"),
    "engine": (f"{TINY} pp2,dp2 engine.shard_optimizer=true", f"{TINY} dp2 engine.kind=fsdp"),
    "checkpoint": (),  # no proof saves
}

ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass
class Mutant:
    """One mistake: what stood in a function, what replaces it, and what noticed it."""

    file: str
    function: str  # with its class: Attention.forward
    line: int  # counted from the function's first line
    column: int
    before: str
    after: str
    noticed: str = ""  # the check that noticed it, and its words; empty: survived
    seconds: float = 0.0


def functions(root: Path) -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """Yield every function of the core that computes something: file, qualified name, syntax tree."""
    for package in PACKAGES:
        for path in sorted((root / "megacore" / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for name, function in functions_in(tree, ""):
                if any(mistakes(function)):
                    yield str(path.relative_to(root)), name, function


def functions_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module or class, and of its classes, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions_in(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child


def mistakes(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str]]:
    """Yield the mistakes that this function allows: a node, and the source that replaces it."""
    harmless = {id(inner) for outer in without_effect(function) for inner in ast.walk(outer)}
    gives_tensor = function.returns is not None and ast.unparse(function.returns) == "Tensor"
    for statement in function.body:
        for node in ast.walk(statement):
            if id(node) in harmless:
                continue
            yield from ((node, text) for text in replacements(node))
            if isinstance(node, ast.If | ast.IfExp) and isinstance(
                node.test, ast.Name | ast.Attribute | ast.Call
            ):
                yield node.test, f"(not {ast.unparse(node.test)})"
            if gives_tensor and isinstance(node, ast.Return) and isinstance(node.value, ast.BinOp | ast.Call):
                # the right value, through which no gradient flows
                yield node, f"return ({ast.unparse(node.value)}).detach()"


def without_effect(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield what computes no result: annotations, log messages, what is raised or asserted."""
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.Raise | ast.Assert) or ast.unparse(node).startswith("logger."):
            yield node


def replacements(node: ast.AST) -> Iterator[str]:
    """Yield the source of each mistake that can replace a node."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        operators = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        yield ast.unparse(ast.Compare(node.left, operators, node.comparators))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.AugAssign):
        yield f"{ast.unparse(node.target)} = {ast.unparse(node.value)}"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield repr(node.value + 1 if type(node.value) is int else 1.5 * node.value or 1.0)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Draw functions and one mistake in each, from `seed`."""
    rng = random.Random(seed)
    candidates = list(functions(root))
    if count > len(candidates):
        raise ConfigError("--count", f"the core has {len(candidates)} functions", "at most as many")
    mutants = []
    for file, name, function in rng.sample(candidates, count):
        node, after = rng.choice(list(mistakes(function)))
        source = (root / file).read_text(encoding="utf-8")
        before = ast.get_source_segment(source, node)
        assert before is not None
        mutants.append(Mutant(file, name, node.lineno - function.lineno, node.col_offset, before, after))
    return mutants


def plant(root: Path, mutant: Mutant) -> bool:
    """Write the mistake into the file under `root`; return False if the code is no longer there."""
    path = root / mutant.file
    if not path.exists():
        return False
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    function = next((node for name, node in functions_in(tree, "") if name == mutant.function), None)
    if function is None:
        return False
    segment = ast.get_source_segment(source, function) or ""
    places = [match.start() for match in re.finditer(re.escape(mutant.before), segment)]
    if not places:
        return False

    def distance(place: int) -> tuple[int, int]:
        """From where the code stood when it was drawn: lines, columns."""
        line = segment.count("\n", 0, place)
        column = place - (segment.rfind("\n", 0, place) + 1) + (function.col_offset if line == 0 else 0)
        return abs(line - mutant.line), abs(column - mutant.column)

    place = min(places, key=distance)
    mutated = segment[:place] + mutant.after + segment[place + len(mutant.before) :]
    path.write_text(source.replace(segment, mutated, 1), encoding="utf-8")
    return True


def files_of_tests(root: Path, mutant: Mutant) -> list[str]:
    """Return the test files with most mentions of the mutant's function, class and module, unit tests first.

    A file's mention of a word counts as a share of all its mentions, so that a name that every file has, such
    as forward, decides nothing.
    """
    owner, _, name = mutant.function.rpartition(".")
    words = {owner, name.strip("_"), Path(mutant.file).stem} - {""}
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / "tests").rglob("test_*.py"))}
    scores = dict.fromkeys(texts, 0.0)
    for word in words:
        mentions = {path: len(re.findall(rf"\b_*{re.escape(word)}\b", text)) for path, text in texts.items()}
        for path, count in mentions.items():
            scores[path] += count / max(sum(mentions.values()), 1)
    best = sorted(texts, key=lambda path: -scores[path])[:MOST_TEST_FILES]
    return sorted((str(path.relative_to(root)) for path in best), key=lambda file: "/unit/" not in file)


def checks(root: Path, mutant: Mutant, suite: bool) -> Iterator[list[str]]:
    """Yield the commands that may notice a mutant, the quickest first."""
    package = mutant.file.split("/")[1]
    for arguments in PROOFS[package]:
        yield ["launch/verify.py", *arguments.split()]
    pytest = ["-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
    yield [*pytest, *files_of_tests(root, mutant)]
    if suite:
        yield [*pytest, "--numprocesses", "2", "--dist", "loadfile"]


def examine(root: Path, mutant: Mutant, suite: bool) -> None:
    """Run the checks on the mutant that is planted in `root`, until one notices it."""
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for command in checks(root, mutant, suite):
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            mutant.noticed = f"{shown(command)}: hangs"
            break
        if done.returncode not in (0, 5):  # 5: a file of which pytest has nothing to run
            mutant.noticed = f"{shown(command)}: {reason(done.stdout, done.stderr)}"
            break
    mutant.seconds = round(time.monotonic() - start, 1)


def shown(command: list[str]) -> str:
    """Return what a command checks, in a few words."""
    if command[0] == "launch/verify.py":
        return " ".join(["verify", *command[1:]])
    return (
        "tests that mention it" if any(word.startswith("tests/") for word in command) else "the whole suite"
    )


def reason(stdout: str, stderr: str) -> str:
    """Return the lines in which a check says what it noticed: verify's self-check, its layouts, a test."""
    lines = [line.strip() for line in (*stdout.splitlines(), *stderr.splitlines()) if line.strip()]
    starts = ("WRONG", "NOT EQUAL", "NOT PROVED", "FAILED", "ERROR")
    telling = [line for start in starts for line in lines if line.startswith(start)]
    return " | ".join(telling[:3] or lines[-1:]) or "failed without a word"


def copy_of(root: Path, folder: Path) -> Path:
    """Copy the checkout's files, tracked or new, without what git ignores."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
    for file in filter(None, files.split("\0")):
        if (root / file).exists():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, folder / file)
    return folder


def main(argv: list[str]) -> int:
    """Draw mutants, plant one after the other and list what noticed each."""
    parser = Parser(
        "Change the code at random and report which changes the tests notice.",
        example=EXAMPLE,
        page="CONTRIBUTING.md",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random choice")
    parser.add_argument("--count", type=int, default=30, metavar="N", help="functions to change")
    parser.add_argument("--list", action="store_true", help="start nothing; print the changes")
    parser.add_argument("--suite", action="store_true", help="run all tests on changes that survive")
    parser.add_argument(
        "--mutants", metavar="FILE", help="use the changes of an earlier --output instead of new ones"
    )
    parser.add_argument(
        "--checkout", type=Path, metavar="FOLDER", help="code to change (default: this checkout)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the results as they come")
    args = parser.parse_args(argv)
    args.checkout = args.checkout or ROOT
    if args.mutants is None:
        mutants = draw(args.checkout, args.seed, args.count)
    else:
        mutants = [Mutant(**row) for row in json.loads(Path(args.mutants).read_text(encoding="utf-8"))]
    for number, mutant in enumerate(mutants):
        before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
        print(f"{number}: {mutant.file} {mutant.function}: {before} → {after}", flush=True)
        if args.list:
            continue
        mutant.noticed = ""
        with tempfile.TemporaryDirectory(prefix="megacore_mutant_") as folder:
            copy = copy_of(args.checkout, Path(folder))
            if plant(copy, mutant):
                examine(copy, mutant, args.suite)
            else:
                mutant.noticed = "the code is no longer there"
        print(f"   {mutant.noticed or 'SURVIVED'} ({mutant.seconds:.0f} s)", flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps([asdict(row) for row in mutants], indent=1), encoding="utf-8")
    if not args.list:
        survivors = sum(not mutant.noticed for mutant in mutants)
        print(f"{len(mutants) - survivors} of {len(mutants)} mutants noticed, {survivors} survived")
    return 0


if __name__ == "__main__":
    exit_with(main)
