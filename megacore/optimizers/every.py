"""Imports every optimizer of this folder, so that all are registered."""

import pkgutil
from importlib import import_module
from pathlib import Path

for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
    import_module(f"{__package__}.{found.name}")
