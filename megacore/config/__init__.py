"""A run's settings, and what follows from several of them together.

In: sections of values, as `megacore.tools.settings` reads, completes and checks them. Out: a `Config` that
all rooms read.
"""

from megacore.config.schema import Config
