"""Model FLOPs utilisation: which part of the devices' peak a run uses."""

import platform

import torch

from megacore.config import Config
from megacore.tools.choices.devices import peak_flops
from megacore.tools.choices.flops import model_flops


class Utilisation:
    """MFU (Chowdhery et al. 2022, PaLM): model FLOPs a second over the devices'
    dense peak at the run's precision.

    None if the device's peak is not known and no `peak` is given (operations a second of all ranks together).
    `full` counts attention over all pairs of positions, as is usual, or of positions in one document.
    `causal` counts the half that a causal model needs. Both are None where a model of the user's own cannot
    be counted so.
    """

    def __init__(
        self, config: Config, device: torch.device, world_size: int, peak: float | None = None
    ) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        listed = peak_flops(name, config.train.precision)
        self.config, self.available = config, peak or (None if listed is None else listed * world_size)

    def full(self, tokens_per_second: float, pairs: float = 1.0) -> float | None:
        """The usual MFU, as a fraction. `pairs`: the part of all pairs that attention needs (`PairsSeen`)."""
        return self.of(self._model_flops(tokens_per_second, False, pairs))

    def causal(self, tokens_per_second: float, pairs: float = 1.0) -> float | None:
        """MFU with causal attention counted as half."""
        return self.of(self._model_flops(tokens_per_second, True, pairs))

    def both(self, tokens_per_second: float, pairs: float) -> tuple[float | None, float | None]:
        """`full` and `causal`, which a run's reports have."""
        return self.full(tokens_per_second, pairs), self.causal(tokens_per_second, pairs)

    def of(self, flops_per_second: float | None) -> float | None:
        """Some operations a second, as a fraction of the peak."""
        return (
            None if self.available is None or flops_per_second is None else flops_per_second / self.available
        )

    def _model_flops(self, tokens_per_second: float, causal: bool, pairs: float) -> float | None:
        """The model's operations a second; None if they are not known, or nobody needs them."""
        flops = None if self.available is None else model_flops(self.config, causal, pairs)
        return None if flops is None else flops * tokens_per_second
