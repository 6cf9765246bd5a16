"""The import name of the repository's `launch/` folder: `from megacore.launch.samples import table`.

A wheel puts the scripts in place of this file (setup.py); in a checkout, also one installed in editable mode,
this file finds them.
"""

from megacore.files import LAUNCH

__path__.append(str(LAUNCH))
