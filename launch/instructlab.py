"""Turns InstructLab's config.yaml into a config of megacore: its section `train`, for an imported
model and prepared conversations.
"""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import shlex
from pathlib import Path

from megacore.tools.cli import Parser, exit_with

EXAMPLE = (
    "python launch/instructlab.py ~/.config/instructlab/config.yaml --run runs/granite --data "
    "data/skills --output granite.json"
)
MORE = """Before it come two commands: one imports the model (launch/checkpoint.py import MODEL --format hf
--output runs/granite), one prepares the conversations (launch/prepare.py --chat --input skills.jsonl --output
data/skills --tokenizer runs/granite/tokenizer/...). Every key of the recipe becomes a setting, or is told by
name with the reason why it is none, or is refused."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, f"{__doc__}\n\n{MORE}")
    parser.add_argument("recipe", metavar="config.yaml", help="InstructLab's configuration")
    parser.add_argument("--run", required=True, metavar="FOLDER", help="the imported model")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="the prepared conversations")
    parser.add_argument("--output", required=True, metavar="FILE.json", help="the config to write")
    return parser.parse_args(argv)


def run(argv: list[str]) -> None:
    """Runs the script. Raises `UserError`."""
    args = parse(argv)
    from megacore.files import write_json
    from megacore.tools.interchange.instructlab import converted, read_recipe, resolve_converted
    from megacore.tools.output_files import check_output
    from megacore.tools.settings.validation import warmup_warning

    check_output("--output", args.output)
    sections, notes, processes = converted(read_recipe(args.recipe), args.run, args.data)
    # What pretrain would reject is rejected now.
    config = resolve_converted(sections, Path(args.output).stem, processes)
    write_json("--output", args.output, sections)
    for note in filter(None, [*notes, warmup_warning(config)]):
        print(note)
    command = ["torchrun", "--nproc-per-node", str(processes), "launch/pretrain.py", "--config", args.output]
    print(f"\nnext:\n  {shlex.join(command if processes > 1 else ['python', *command[3:]])}")


if __name__ == "__main__":
    exit_with(run)
