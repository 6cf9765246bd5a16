"""`model.source`: a file of the user's own with the settings and the layers of a model.

Whoever names a file has it executed.

The file stands alone: it imports installed packages and megacore, and not its neighbours. Its digest is part
of the config, so that a run, its checkpoints and its ranks all mean the same file. docs/blocks.md says what a
file holds.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import Field, ValidationError, create_model

from megacore.config.model import ModelConfig
from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.files import read_text

KEY, DIGEST = "model.source", "model.source_digest"
# what a file holds
SETTINGS, BLOCK, LAYERS, CALLBACKS, SMALL = "Settings", "Block", "layers", "CALLBACKS", "small"
OLD_CALLBACKS = "MONITORS"  # another name of CALLBACKS
PARTS, BUILD, UNTOUCHED = "PARTS", "build", "untouched"
RIGHT = f"a Python file with a class {BLOCK}, and a class {SETTINGS} if it has settings: docs/blocks.md"
RIGHT_PLAIN = f"a module and a table {PARTS} that suit each other: docs/models.md"
MOST_BYTES = 1 << 20
# Methods of callbacks and what they are called now, and modules that have moved.
OLD_METHODS = {
    "start": "on_start",
    "built": "on_built",
    "open": "on_records_open",
    "reopen": "on_rewind",
    "record": "on_record",
    "skipped": "on_skipped",
    "report": "on_log",
    "validation": "on_validation",
    "figures": "metrics",
    "parts": "step_parts",
    "close": "on_end",
}
MOVED = {
    "megacore.train.logs": "from megacore.train.callbacks import Callback (Monitor is called Callback)",
    "megacore.distributed.observer": "from megacore.distributed.events import Listener (once Observer)",
}
COPY = "source.py"  # in a run's folder
RIGHT_DIGEST = f"the file that is meant, which a run's folder keeps as {COPY}, or null for any"


@dataclass(frozen=True)
class Source:
    """A file that was executed, as it was then."""

    path: str
    text: str
    digest: str  # SHA-256 of its text
    module: ModuleType
    schema: type[Config]  # whose section `model` has the file's settings

    @property
    def block(self) -> Callable[..., Any]:
        """The class of its blocks."""
        block: Callable[..., Any] = getattr(self.module, BLOCK)
        return block

    @property
    def layers(self) -> Callable[[Config], Any] | None:
        """The function that gives all its layers, if it has one."""
        return getattr(self.module, LAYERS, None)

    @property
    def parts(self) -> Mapping[str, str] | None:
        """The table of a plain module: which of its parameters ranks divide (`megacore.model.plain`)."""
        return getattr(self.module, PARTS, None)

    @property
    def build(self) -> Callable[[Config], Any] | None:
        """The function that builds that module, if it is not the one of `model.hf`."""
        return getattr(self.module, BUILD, None)

    @property
    def untouched(self) -> Callable[[Config], Any] | None:
        """The function that builds a plain version of the model for a proof to compare with
        (`tools.verify.untouched`), if the file has one.
        """
        return getattr(self.module, UNTOUCHED, None)

    @property
    def callbacks(self) -> Sequence[Callable[[], Any]]:
        """The classes of its `megacore.train.callbacks.Callback`s, if it has any."""
        return [*getattr(self.module, CALLBACKS, ()), *getattr(self.module, OLD_CALLBACKS, ())]

    @property
    def small(self) -> Callable[[Config], Mapping[str, Any]] | None:
        """The function that corrects the small config of a proof (`tools.verify.shrink`), if it has one."""
        return getattr(self.module, SMALL, None)

    @contextmanager
    def blamed(self, doing: str = "") -> Iterator[None]:
        """A context for the file's own code: an exception in it is a `ConfigError`
        that names the line of the file.
        """
        try:
            yield
        except (ConfigError, ValidationError):
            raise
        except (Exception, SystemExit) as error:
            said = error.msg if isinstance(error, SyntaxError) else str(error)
            wrong = (
                f"{self.path}{line_of(self.path, error)}{doing}: {type(error).__name__}: "
                f"{' '.join(said.split())}"
            )
            right = RIGHT if self.parts is None else RIGHT_PLAIN
            if isinstance(error, ModuleNotFoundError):
                right = MOVED.get(error.name or "", right)
            raise ConfigError(KEY, wrong, right) from error


_EXECUTED: dict[tuple[str, str], Source] = {}  # by path and digest


def source_of(config: Config) -> Source | None:
    """The source of a config's model; None if the model is megacore's own."""
    model = config.model
    return None if model.source is None else execute(model.source, model.source_digest)


def blaming(config: Config, doing: str = "") -> AbstractContextManager[None]:
    """A context for the code of custom layers: an exception in it is a `ConfigError` of the key that gives
    them, which names the line of a file.
    """
    source = source_of(config)
    if source is not None:
        return source.blamed(doing)
    return nullcontext() if config.model.hf is None else blamed_class(config, doing)


@contextmanager
def blamed_class(config: Config, doing: str) -> Iterator[None]:
    """A context for the code of the class of `model.hf`."""
    try:
        yield
    except (ConfigError, ValidationError):
        raise
    except Exception as error:
        wrong = f"{config.model.hf}{doing}: {type(error).__name__}: {' '.join(str(error).split())}"
        right = "a class whose plan divides it among tensor ranks, or model.source=FILE.py with a table PARTS"
        raise ConfigError(config.model.custom_key, wrong, right) from error


def is_plain(config: Config) -> bool:
    """Whether a config's model is a plain module, whose own code computes: `megacore.model.plain`."""
    source = source_of(config)
    return config.model.hf is not None or (source is not None and source.parts is not None)


def execute(path: str, digest: object) -> Source:
    """Executes a file once, if it has the digest (None: whatever it has). Raises `ConfigError`."""
    if isinstance(digest, str) and (path, digest) in _EXECUTED:  # it may have been edited since
        return _EXECUTED[path, digest]
    try:
        text = read_text(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(KEY, f"cannot read {path}: {error.strerror}", RIGHT) from None
    except UnicodeDecodeError:
        raise ConfigError(KEY, f"{path} is not UTF-8 text", RIGHT) from None
    found = hashlib.sha256(text.encode()).hexdigest()
    if digest is not None and digest != found:
        raise ConfigError(DIGEST, f"{path} has the digest {found}, not {digest}", RIGHT_DIGEST)
    if (path, found) not in _EXECUTED:
        _EXECUTED[path, found] = executed(path, text, found)
    return _EXECUTED[path, found]


def executed(path: str, text: str, digest: str) -> Source:
    """Executes a file's text and checks what is in it. Raises `ConfigError`."""
    module = ModuleType(f"megacore_source_{digest}")
    module.__file__ = path
    source = Source(path, text, digest, module, Config)
    sys.modules[module.__name__] = module  # where dataclasses, pydantic and torch.compile look for it
    try:
        with source.blamed():
            exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
        settings = checked_settings(source)
        check_block(source)
        check_callbacks(source)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    schema = create_model("Config", __base__=Config, model=(settings, Field(default_factory=settings)))
    return Source(path, text, digest, module, schema)


def checked_settings(source: Source) -> type[ModelConfig]:
    """The settings of a file.

    Raises `ConfigError` if they are no section of a config, or have no valid defaults.
    """
    settings = getattr(source.module, SETTINGS, ModelConfig)
    if not (isinstance(settings, type) and issubclass(settings, ModelConfig)):
        raise ConfigError(
            KEY,
            f"{source.path}: {SETTINGS} is no section",
            f"class {SETTINGS}(megacore.config.schema.ModelConfig)",
        )
    with source.blamed(f", {SETTINGS}"):
        try:
            again = settings.model_validate_json(settings().model_dump_json(by_alias=True))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            wrong = (
                f"{source.path}: {SETTINGS}{f'.{name}' if name else ''} has no valid default: "
                f"{first['msg'].lower()}"
            )
            raise ConfigError(KEY, wrong, "a default for every setting, of the setting's own type") from None
        changed = [
            name for name in settings.model_fields if getattr(again, name) != getattr(settings(), name)
        ]
    if changed:
        wrong = f"{source.path}: {SETTINGS}.{changed[0]} changes when it is written as JSON and read"
        raise ConfigError(KEY, wrong, "numbers, strings, true and false, null, lists and objects")
    return settings


def check_block(source: Source) -> None:
    """Raises `ConfigError` unless the file's blocks can be called as the model calls them, or it has a table
    of a plain module's parts.
    """
    if (parts := source.parts) is not None:
        if not isinstance(parts, dict) or not all(
            isinstance(text, str) for row in parts.items() for text in row
        ):
            right = f"a dict of texts, such as {PARTS} = {{'mlp.up': 'column', 'mlp.down': 'row'}}"
            raise ConfigError(KEY, f"{source.path}: {PARTS} is not a table", right)
        if source.build is not None and not callable(source.build):
            raise ConfigError(KEY, f"{source.path}: {BUILD} cannot be called", f"a function {BUILD}(config)")
        return
    block = getattr(source.module, BLOCK, None)
    if source.layers is not None:
        return
    if block is None and source.build is not None:
        wrong = f"{source.path} has {BUILD}, and no {PARTS} that says which parameters ranks divide"
        raise ConfigError(KEY, wrong, f"{PARTS}, a dict of texts")
    if block is None:
        raise ConfigError(KEY, f"{source.path} has no {BLOCK}", RIGHT)
    for what, call, arguments in (
        (BLOCK, block, "index, config, mesh, dtype, device"),
        (f"{BLOCK}.forward", getattr(block, "forward", None), "self, x, context"),
    ):
        try:
            inspect.signature(call).bind(*arguments.split(", "))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                KEY, f"{source.path}: {what} cannot be called: {error}", f"{what}({arguments})"
            ) from None


def check_callbacks(source: Source) -> None:
    """Raise `ConfigError` if a class among the file's callbacks has a method by its old name.

    It would never be called.
    """
    with source.blamed(f", {CALLBACKS}"):
        callbacks = list(source.callbacks)
    for callback in callbacks:
        for old, new in OLD_METHODS.items():
            if hasattr(callback, old):
                name = getattr(callback, "__name__", "a callback")
                wrong = f"{source.path}: the method {old} of {name} is not called any more"
                raise ConfigError(KEY, wrong, f"the name {new}, see megacore.train.callbacks.Callback")


def line_of(path: str, error: BaseException) -> str:
    """Where in a file an exception was raised, as text; "" if it was nowhere in it."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f", line {error.lineno}"
    line, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return line
