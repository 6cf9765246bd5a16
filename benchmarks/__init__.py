"""How fast megacore is, beside other ways to do the same, on the machine at hand."""

import megacore.tools.cli  # noqa: F401  (Ctrl-C counts from here on, and torch takes seconds to import)
