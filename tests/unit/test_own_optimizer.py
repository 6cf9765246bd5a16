"""The optimizer of docs/blocks.md, written to a file as a reader would do: configs can then select it."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from megacore.optimizers.rule import RULES, unregister
from megacore.tools.settings.load import load
from tests.pool import ROOT
from tests.training import write_config

PAGE = (ROOT / "docs/blocks.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Your own optimizer\n")[2].partition("\n## ")[0]


def test_importing_the_example_registers_its_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `optim.kind=sign` would be an unknown optimizer for a reader who copies the example."""
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    (tmp_path / "my_rule.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write_config(tmp_path, "unused")
    with pytest.raises(ConfigError, match=r"optim.lr: .* \(a number"):
        load(path, ["optim.lr=[]"])
    import_module("my_rule")
    try:
        overrides = ["optim.kind=sign", "optim.sign_momentum=0.5"]
        assert load(path, overrides).config.optim.kind == "sign"
        # accepted settings come from the current schema, not from the one at import
        with pytest.raises(ConfigError, match=r"optim.sign_momentum: .* \(a number"):
            load(path, [*overrides, "optim.sign_momentum=[]"])
    finally:
        unregister(RULES["sign"])
