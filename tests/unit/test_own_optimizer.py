"""The optimizer of docs/optimizers.md, written by hand as a reader would: a config may then name it."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from megacore.optimizers.rule import RULES, unregister
from megacore.tools.settings.load import load
from tests.pool import ROOT
from tests.training import write_config

TEXT = (ROOT / "docs/optimizers.md").read_text()


def test_the_documents_rule_is_registered_by_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader who copies it would be told that there is no such optimizer."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "my_rule.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write_config(tmp_path, "unused")
    with pytest.raises(ConfigError, match=r"optim.lr: .* \(a number"):
        load(path, ["optim.lr=[]"])
    import_module("my_rule")
    try:
        overrides = ["optim.kind=sign", "optim.sign_momentum=0.5"]
        assert load(path, overrides).config.optim.kind == "sign"
        # what is accepted is read from the schema of now
        with pytest.raises(ConfigError, match=r"optim.sign_momentum: .* \(a number"):
            load(path, [*overrides, "optim.sign_momentum=[]"])
    finally:
        unregister(RULES["sign"])
