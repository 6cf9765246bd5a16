"""The import name of the repository's `kernels/` folder: import its leaf modules from here.

`kernels/` itself is no package, because a package of that name on PyPI would be shadowed by it.
Installed, the modules lie beside this file; in a checkout they are found in `kernels/` two levels up.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2] / "kernels"
if (_checkout / "README.md").is_file():  # our own folder, not somebody else's `kernels`
    __path__.append(str(_checkout))
