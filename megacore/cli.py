"""What the scripts in launch/ share: `-h` that begins with an example, and mistakes as one line with status 2."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megacore.errors import ConfigError, UserError


class Parser(argparse.ArgumentParser):
    """An argument parser whose help begins with `example` (a command), and whose errors are `ConfigError`s."""

    def __init__(self, example: str, description: str | None, **options: Any) -> None:
        super().__init__(
            description=f"example:\n  {example}\n\n{description}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=argparse.SUPPRESS,  # it would stand above the example
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        flag, colon, wrong = message.removeprefix("argument ").partition(": ")
        raise ConfigError(*((flag, wrong) if colon and flag.startswith("--") else ("arguments", message)), "see -h")


def exit_status(script: Callable[[list[str]], None]) -> int:
    """Runs a script's body with the command line's arguments: 0, or 2 with one line on stderr for a `UserError`."""
    try:
        script(sys.argv[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
