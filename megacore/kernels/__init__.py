"""The import name of the repository's `kernels/` folder:
`from megacore.kernels.softmax import causal_softmax`.

`kernels/` itself is no package, because it would shadow the package of that name on PyPI. A wheel puts its
modules in place of this file (setup.py); in a checkout, also one installed in editable mode, this file finds
them.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2] / "kernels"
if (_checkout / "README.md").is_file():  # our own folder, not somebody else's `kernels`
    __path__.append(str(_checkout))
