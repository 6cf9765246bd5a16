"""What the first pass of a plain module's layer shows about its code.

A mistake in the code is the user's, and is reported with the place of the module whose code it is. What would
be computed otherwise in another layout, or by the next pass, is rejected.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.source import blaming
from megacore.errors import UserError
from megacore.model.plain.pieces import LinearPiece


class FirstPass:
    """The checks of one layer; they are made once, in its first pass with gradients."""

    def __init__(self, config: Config, place: str, modules: Mapping[str, nn.Module]) -> None:
        """`place`: of the layer, for messages. `modules`: those whose code it runs, by their places."""
        self.config, self.place = config, place
        self.names = {
            inner: f"{prefix}.{name}".removesuffix(".")
            for prefix, module in modules.items()
            for name, inner in module.named_modules()
        }
        self.is_over = False

    @contextmanager
    def watch(self, device: torch.device) -> Iterator[None]:
        """A context for a pass. Raises `ConfigError` for mistakes."""
        if self.is_over or torch.compiler.is_compiling():
            yield
            return
        state, buffers = generator_state(device), self._copy_buffers()
        try:
            yield
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not is_of_communication(error):
                place = self._place_of(error)
                whole = self._whole_in(place)
                with blaming(self.config, f", {place}" + (f" (in which {whole} is whole)" if whole else "")):
                    raise
            raise
        with blaming(self.config, f", {self.place}"):
            if not torch.equal(state, generator_state(device)):
                raise ValueError("it draws random numbers, such as dropout's, which differ between layouts")
            self._check_buffers(buffers)
            self._check_kept()
        self.is_over = torch.is_grad_enabled()

    def _place_of(self, error: Exception) -> str:
        """Return the place of the innermost module whose code raised an exception."""
        place, trace = self.place, error.__traceback__
        while trace is not None:
            names = trace.tb_frame.f_locals
            for module in (names.get("self"), names.get("module")):
                if isinstance(module, nn.Module):
                    place = self.names.get(module, place)
            trace = trace.tb_next
        return place

    def _whole_in(self, place: str) -> str:
        """Return the linear modules at a place that the table leaves whole, next to divided ones."""
        is_divided = any(
            isinstance(module, LinearPiece) for module, name in self.names.items() if name.startswith(place)
        )
        names = [
            name.removeprefix(f"{place}.")
            for module, name in self.names.items()
            if isinstance(module, nn.Linear) and name.rpartition(".")[0] == place
        ]
        return ", ".join(names) if is_divided else ""

    def _copy_buffers(self) -> dict[str, Tensor]:
        return {
            f"{place}.{name}": buffer.clone()
            for module, place in self.names.items()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _check_buffers(self, before: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` if the pass changed a buffer: each rank of a layout would have another one."""
        for name, buffer in self._copy_buffers().items():
            if name in before and not torch.equal(buffer, before[name]):
                raise ValueError(f"its forward changes the buffer {name}, which would differ between layouts")

    def _check_kept(self) -> None:
        """Raise `ValueError` if a module keeps what the pass computed for the next one."""
        for module, place in self.names.items():
            for name, value in vars(module).items():
                if name != "_modules" and has_graph(value):
                    raise ValueError(
                        f"{place}.{name} keeps tensors of a pass with their graph, for the next pass to find"
                    )


def generator_state(device: torch.device) -> Tensor:
    """Return the state of PyTorch's generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def is_of_communication(error: Exception) -> bool:
    """Whether an exception is another rank's, which a collective reports."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "/distributed/" in trace.tb_frame.f_code.co_filename


def has_graph(value: Any) -> bool:
    """Whether a value is, or is a collection with, a tensor that backward would go through."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(has_graph, value))
    return isinstance(value, Tensor) and value.grad_fn is not None
