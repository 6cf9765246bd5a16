"""Names that callbacks had before: a file that still uses one is told the new name before anything starts."""

from pathlib import Path

import pytest

from megacore.config.source import OLD_METHODS, execute
from megacore.errors import ConfigError
from megacore.train.callbacks import Callback
from tests import training
from tests.commands import run_script

FILE = """
from megacore.model.block import Block
from megacore.train.callbacks import Callback


class Probe(Callback):
    def {method}(self, *arguments):
        return {{}}

{name} = [Probe]
"""


def write(folder: Path, text: str) -> str:
    """Write a model's file and return its path."""
    (folder / "my_model.py").write_text(text)
    return str(folder / "my_model.py")


@pytest.mark.parametrize("name", ["CALLBACKS", "MONITORS"])
def test_a_file_lists_its_callbacks_by_either_name(tmp_path: Path, name: str) -> None:
    """A file of an older version would train without its metrics, and nothing would be printed."""
    source = execute(write(tmp_path, FILE.format(method="on_step", name=name)), None)
    (callback,) = source.callbacks
    assert issubclass(callback, Callback) and callback.__name__ == "Probe"


@pytest.mark.parametrize("name", ["CALLBACKS", "MONITORS"])
@pytest.mark.parametrize(("old", "new"), OLD_METHODS.items())
def test_a_method_by_its_old_name_is_an_error(tmp_path: Path, old: str, new: str, name: str) -> None:
    """It would never be called, and the user would miss a metric only after the run."""
    assert hasattr(Callback, new), "the new name is right"
    path = write(tmp_path, FILE.format(method=old, name=name))
    with pytest.raises(ConfigError) as caught:
        execute(path, None)
    assert str(caught.value) == (
        f"config error: model.source: {path}: the method {old} of Probe is not called any more "
        f"(the name {new}, see megacore.train.callbacks.Callback)"
    )


OLD_FILES = {
    "a method": (
        FILE.format(method="figures", name="MONITORS"),
        ": the method figures of Probe is not called any more (the name metrics, see "
        "megacore.train.callbacks.Callback)",
    ),
    "Monitor": (
        "from megacore.train.logs import Monitor\n",
        ", line 1: ModuleNotFoundError: No module named 'megacore.train.logs' (from megacore.train.callbacks "
        "import Callback (Monitor is called Callback))",
    ),
    "Observer": (
        "from megacore.distributed.observer import Observer\n",
        ", line 1: ModuleNotFoundError: No module named 'megacore.distributed.observer' (from "
        "megacore.distributed.events import Listener (once Observer))",
    ),
}


@pytest.mark.parametrize("old", OLD_FILES)
def test_a_run_with_an_old_file_ends_in_one_line(tmp_path: Path, old: str) -> None:
    """A traceback would not say what the name has become, and some launchers start a run with status 1 again
    and again.
    """
    text, wrong = OLD_FILES[old]
    path = write(tmp_path, text)
    config = training.write_config(tmp_path, training.write_corpus(tmp_path))
    done = run_script("launch/pretrain.py", "--config", config, f"model.source={path}")
    assert (done.returncode, done.stderr) == (2, f"config error: model.source: {path}{wrong}\n")
