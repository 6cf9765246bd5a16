"""Convert the `train` section of InstructLab's config.yaml to a config of megacore, for an imported model and
prepared conversations.
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

from megacore.tools.cli import Parser, exit_with, next_command

EXAMPLE = (
    "python launch/instructlab.py ~/.config/instructlab/config.yaml --run runs/granite --data data/skills "
    "--output granite.json"
)
NOTES = (
    "Import the model first (launch/checkpoint.py import) and prepare the conversations "
    "(launch/prepare.py --chat). Each key of the file becomes a setting, is printed with the reason why it "
    "is left out, or is rejected with an error."
)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Convert the train section of InstructLab's config.yaml to a config of megacore.",
        example=EXAMPLE,
        notes=NOTES,
        status="0 done, 2 wrong arguments or file",
        page="docs/recipes.md",
    )
    parser.add_argument("recipe", metavar="FILE.yaml", help="InstructLab's config.yaml")
    parser.add_argument("--run", required=True, metavar="RUN", help="folder of the imported model")
    parser.add_argument(
        "--data", required=True, metavar="PREFIX", help="prefix of the prepared conversations' .bin and .idx"
    )
    parser.add_argument("--output", required=True, metavar="FILE.json", help="config to write")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    return parser().parse_args(argv)


def run(argv: list[str]) -> None:
    """Run the script. Raises `UserError`."""
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
    command = command if processes > 1 else ["python", *command[3:]]
    print(f"\nnext:\n  {next_command(shlex.join(command))}")


if __name__ == "__main__":
    exit_with(run)
