"""The schema of a run's config, its validation and its overrides."""

from megacore.config.load import Resolved, load
from megacore.config.schema import Config
