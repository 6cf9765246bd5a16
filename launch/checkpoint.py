"""Look at the checkpoints of a run, without a device: what is in one (`info`), and are all of them whole (`verify`)."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout that is not installed

from megacore.checkpoint import Reader, checkpoints_in, locate
from megacore.cli import Parser, exit_status
from megacore.errors import CheckpointError

EXAMPLE = "python launch/checkpoint.py info runs/gpt_tiny"
COMMANDS = """info: step, state and every tensor of the newest whole checkpoint;
verify: is every file of every checkpoint there, readable, and every tensor complete (status 2 where not)"""


def size_text(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    size, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.4g} {unit}"


def info(path: Path) -> None:
    """Print what the checkpoint holds; tensors by their logical shape, whatever layout wrote them."""
    from rich.console import Console
    from rich.table import Table

    reader = Reader(locate(path))
    tensors = reader.manifest.tensors
    table = Table("tensor", "dtype", "shape", "size")
    table.columns[0].overflow = "fold"  # a long name goes on in the next line, never cut off
    for name in reader.names:
        tensor = tensors[name]
        table.add_row(name, tensor.dtype, " × ".join(map(str, tensor.shape)) or "scalar", size_text(tensor.nbytes))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    total = sum(tensor.nbytes for tensor in tensors.values())
    console.print(f"{reader.path}\nstep {reader.step}, written by megacore {reader.manifest.megacore_version}")
    console.print(f"{len(tensors)} tensors, {size_text(total)}, in {len(reader.manifest.files)} files")
    for key, value in reader.state.items():
        console.print(f"{key}: {json.dumps(value)}")


def verify(path: Path) -> None:
    """Print a line for each checkpoint, then raise the error of the newest damaged one, if any."""
    from rich.console import Console
    from rich.table import Table

    candidates = checkpoints_in(path)
    if not candidates:
        locate(path)  # raises, saying what was looked for
    table = Table("checkpoint", "tensors", "files", "size", "whole")
    errors = []
    for candidate in candidates:
        try:
            reader = Reader(candidate)
            reader.verify()
        except CheckpointError as error:
            errors.append(error)
            table.add_row(candidate.name, "", "", "", f"no: {error.wrong}")
        else:
            files = reader.manifest.files
            table.add_row(candidate.name, str(len(reader.names)), str(len(files)), size_text(sum(files.values())), "yes")
    Console(highlight=False, markup=False).print(table)
    if errors:
        raise errors[0]


def run(argv: list[str]) -> None:
    """Everything that the script does; raises `UserError`."""
    parser = Parser(EXAMPLE, f"{__doc__}\n\n{COMMANDS}")
    parser.add_argument("command", choices=("info", "verify"))
    parser.add_argument("path", type=Path, metavar="PATH", help="a run's log.dir, its checkpoints folder, or one step_… folder")
    args = parser.parse_args(argv)
    {"info": info, "verify": verify}[args.command](args.path)


if __name__ == "__main__":
    sys.exit(exit_status(run))
