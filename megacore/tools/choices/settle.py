"""Settles a config for stages without a run: for generation, evaluation, or steps by hand."""

from megacore.config.schema import Config
from megacore.tools.choices.partition import partitioned
from megacore.tools.choices.resolve_auto import context_method_of


def settled_alone(config: Config) -> Config:
    """A resolved config with what stages need to be built: how context ranks attend, by the device that the
    config names, and the cut into stages. Alike on every rank, and nobody is asked: a run settles by the
    device that is there (`compiling.settled`).
    """
    if config.parallel.context > 1 and config.parallel.context_method == "auto":
        parallel = config.parallel.model_copy(update={"context_method": context_method_of(config)})
        config = config.model_copy(update={"parallel": parallel})
    return partitioned(config)
