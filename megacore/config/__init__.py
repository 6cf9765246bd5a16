"""A run's settings: schema, validation, loading with overrides, and what `auto` stands for.

In: a JSON file and `section.key=value`. Out: a `Config` whose values are all set and fit together, or one line that says what is wrong.
"""

from megacore.config.load import Resolved, load
from megacore.config.schema import Config
