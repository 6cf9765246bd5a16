"""Compares this checkout with another one (`--before`): the same parts take turns, each in a process that
runs the code of the checkout that it measures.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.parts import SLICES, Part
from benchmarks.gpu.running import Rows, call, describe_error, set_up
from megacore.errors import ConfigError
from megacore.tools.cli import exit_with

ROOT = Path(__file__).resolve().parents[2]
# Parts of the first slice: the arguments of their functions, and the seconds that each turn may take.
COMPARED = {
    "gpt_124m": (("gpt_124m", "eager", "compiled"), 58),
    "bandwidth": (("gpt_124m", "gpt_1b"), 44),
}
# A GPU that becomes slower while it gets warm slows both alike.
ORDER = ("here", "before", "before", "here")


def alternating_parts(checkout: Path, only: Sequence[str]) -> tuple[Part, ...]:
    """The parts that are compared, in turns here and in `checkout`.

    Raises:
        ConfigError: `checkout` is no megacore with this file, or `only` has another part.
    """
    file = Path(__file__).relative_to(ROOT)
    if not (checkout / file).is_file():
        raise ConfigError(
            "--before",
            f"{checkout} has no {file}",
            "a working copy of this version of megacore or a newer one",
        )
    if unknown := [name for name in only if name not in COMPARED]:
        raise ConfigError("--only", f"{unknown[0]} is not compared by --before", ", ".join(COMPARED))
    folders = {"here": ROOT, "before": checkout.resolve()}
    known = {part.name: part for part in SLICES["first"].parts}
    parts = []
    for name in only or COMPARED:
        contenders, seconds = COMPARED[name]
        for number, side in enumerate(ORDER):
            label = f"{name}, {side}, round {number // 2 + 1}"
            arguments = (str(folders[side]), known[name].function, *contenders)
            parts.append(Part(label, seconds, f"{__name__}:run_in", arguments))
    return tuple(parts)


def run_in(rows: Rows, checkout: str, function: str, *arguments: str) -> None:
    """A part: call `function` in a process that runs the code of `checkout` and adds to the same rows."""
    task = {"rows": str(rows.path), "dry": rows.dry, "seconds": rows.left(), "folder": str(rows.folder)}
    task |= {"function": function, "arguments": arguments}
    paths = [checkout, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "benchmarks.gpu.before", json.dumps(task)]
    status = subprocess.run(command, cwd=checkout, env=environment, check=False).returncode
    if status:
        rows.add(failed=f"the process ended with status {status}")


def main(argv: list[str]) -> None:
    """The process that `run_in` starts; its argument is the task, in JSON. How it fails is a row too."""
    task = json.loads(argv[0])
    until = time.monotonic() + task["seconds"]
    rows = Rows(Path(task["rows"]), task["dry"], until, Path(task["folder"]))
    try:
        check_imports(Path.cwd())
        set_up(task["dry"])
        call(task["function"], rows, task["arguments"])
    except Exception as error:
        traceback.print_exc()
        rows.add(failed=describe_error(error))


def check_imports(checkout: Path) -> None:
    """Raise `ImportError` if megacore or its kernels come from another checkout."""
    for name in ("megacore", "megacore.kernels.gelu"):
        file = import_module(name).__file__
        if file is None or not Path(file).is_relative_to(checkout):
            raise ImportError(f"{name} is imported from {file}, not from {checkout}")


if __name__ == "__main__":
    exit_with(main)
