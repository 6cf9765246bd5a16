"""A run's settings: schema, what follows from open values, and the rules that sections must keep together.

In: sections of values, as `megacore.tools.settings` reads them. Out: a `Config` whose values are all set and fit together.
"""

from megacore.config.schema import Config
