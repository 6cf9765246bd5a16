"""What the scripts in launch/ share: `-h` that begins with an example, and mistakes as one line with status 2."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megacore.errors import ConfigError, UserError
from megacore.place import Place, missing_hostfile, place_from_environment

INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


class Parser(argparse.ArgumentParser):
    """An argument parser whose help begins with `example` (a command), and whose errors are `ConfigError`s.

    With `ranks` the script is started once a rank by a launcher.
    """

    def __init__(self, example: str, description: str | None, *, ranks: bool = False, **options: Any) -> None:
        super().__init__(
            description=f"example:\n  {example}\n\n{description}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=argparse.SUPPRESS,  # it would stand above the example
            allow_abbrev=False,
            **options,
        )
        if ranks:  # what the deepspeed launcher adds; it is in the environment too, and read there
            self.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        flag, colon, wrong = message.removeprefix("argument ").partition(": ")
        raise ConfigError(*((flag, wrong) if colon and flag.startswith("--") else ("arguments", message)), "see -h")


def exit_status(script: Callable[[list[str]], int | None]) -> int:
    """Runs a script's body with the command line's arguments: what it returns (None: 0), `INTERRUPTED` after Ctrl-C,
    or 2 with one line on stderr for a `UserError`.
    """
    try:
        return script(sys.argv[1:]) or 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def rank_exit_status(script: Callable[[list[str], Place], int]) -> int:
    """`exit_status` of a script that a launcher starts once a rank: `script` returns its status, and only rank 0 prints the line."""
    place = Place()
    try:
        place = place_from_environment()
        if hostfile := missing_hostfile():
            raise ConfigError("--hostfile", f"{hostfile} does not exist", "a file with lines such as `localhost slots=4`, or no --hostfile")
        return script(sys.argv[1:], place)
    except UserError as error:
        if place.rank == 0:
            print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
