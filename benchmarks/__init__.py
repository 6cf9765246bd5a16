"""How fast megacore is, beside other ways to do the same, on the machine at hand."""

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)
