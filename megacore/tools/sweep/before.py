"""What is settled before trials start: how many run at a time, and whether their data are there."""

import os
from collections.abc import Sequence

from megacore.distributed.processes import available_cores
from megacore.errors import ConfigError, UserError
from megacore.tools.sweep.trials import Trial, named


def places(wanted: int | None, trials: Sequence[Trial]) -> tuple[int, list[str], str | None]:
    """How many trials run at a time here (`wanted`, if that can be), the GPUs that they share out among
    themselves, and what torch calls these. Raises `ConfigError`.
    """
    import torch

    ranks = max(trial.ranks for trial in trials)
    gpus: list[str] = []
    if torch.cuda.is_available() and any(trial.config.train.device != "cpu" for trial in trials):
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    there = len(gpus) or available_cores()
    if wanted is None:
        return max(1, there // ranks), gpus, torch.cuda.get_device_name(0) if gpus else None
    if gpus and wanted * ranks > there:
        raise ConfigError(
            "--at-once", f"{wanted} × {ranks} ranks need more than {there} GPUs", f"at most {there // ranks}"
        )
    return wanted, gpus, torch.cuda.get_device_name(0) if gpus else None


def check_data(trials: Sequence[Trial]) -> None:
    """Opens what trials read, each corpus once for a vocabulary. Raises `UserError`, naming the trial."""
    from megacore.tools.inputs import Inputs

    seen = set()
    for trial in trials:
        config = trial.config
        key = (
            config.data.model_dump_json(),
            config.model.vocab_size,
            config.train.seq_len,
            config.model.custom_name,
        )
        if key in seen:
            continue
        seen.add(key)
        try:
            Inputs(config, rank=1)  # what is rank 0's, a checkpoint and a folder, is the trial's own
        except UserError as error:
            raise named(trial, error) from None
