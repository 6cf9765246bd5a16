"""Errors that a user can cause. Each is one line, with exit status 2.

Programmer errors are `assert`s and ordinary exceptions; they keep their traceback.
"""

MOST = 600  # characters of a part of a line: a key or a path may have any number of them


def shown(text: str, most: int = MOST) -> str:
    """The text for a terminal: on one line, without control characters, and of a long
    one its beginning and its end.
    """
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-most // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UserError(ValueError):
    """An error that says what the user got wrong, where, and what would be right.

    ``str(error)`` is the one line a user sees:
    ``<kind> error: <where>: <what is wrong> (<what would be right>)``.
    """

    kind = "user"
    of_this_machine = False  # whether only this machine of the job may have it

    def __init__(self, where: str, wrong: str, right: str) -> None:
        super().__init__(f"{self.kind} error: {shown(where) or '``'}: {shown(wrong)} ({shown(right)})")
        self.where, self.wrong, self.right = where, wrong, right

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        """So that it can be sent between processes."""
        return type(self), (self.where, self.wrong, self.right)


class ConfigError(UserError):
    """A config value, an override or a command-line argument is wrong; `where` is its key."""

    kind = "config"


class DataError(UserError):
    """A token file, a text or a tokenizer is wrong; `where` is its path."""

    kind = "data"


class LogError(UserError):
    """A run's records cannot be written; `where` is their path."""

    kind = "log"


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or of another model; `where` is its path."""

    kind = "checkpoint"
