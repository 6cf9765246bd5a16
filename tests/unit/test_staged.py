"""Sums in stages on a GPU: the stages follow each other beside the computation, which waits
for none of them before the end.

A model of streams stands for the device: a stream knows what it has waited for, and an operation what its
stream had when it began.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.distributed import communicator as wire
from megacore.distributed.communicator import Group, Staged
from megacore.distributed.hierarchical_reduce import Levels
from megacore.engine import param_all_gather as gather
from megacore.engine import reduce


class Stream:
    """What a stream has waited for."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.behind: set[str] = set()

    def wait_stream(self, other: "Stream") -> None:
        """Waits for all that another has waited for by now."""
        self.behind |= other.behind


class Device:
    """Streams, of which one is current, and the operations that began, in order, with what each is behind."""

    def __init__(self) -> None:
        self.compute = self.current = Stream()
        self.began: dict[str, set[str]] = {}

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def operation(self, name: str) -> "Operation":
        self.began[name] = set(self.current.behind)
        return Operation(self, name)


class Operation:
    """The handle of a collective."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait(self) -> None:
        """The current stream waits."""
        self.device.current.behind.add(self.name)


class Wire:
    """Notes what begins over a group, and moves nothing."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.key = device, name

    def __getattr__(self, operation: str) -> Any:
        def start(x: Tensor, *rest: Tensor) -> Operation:
            return self.device.operation(f"{operation} {self.key}")

        return start


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda at: device.compute)
    for module in (reduce, gather):
        monkeypatch.setattr(module, "side_stream", lambda at: Stream())
    return device


def levels_of(device: Device, within: int) -> Levels:
    groups = [
        Group(name, tuple(range(n)), 0, Wire(device, name) if n > 1 else None)
        for name, n in (("within", within), ("between", 2))
    ]  # type: ignore[arg-type]
    return Levels(*groups)


KINDS = [
    (2, None, True),
    (2, None, False),
    (2, torch.bfloat16, True),
    (2, torch.bfloat16, False),
    (1, torch.bfloat16, True),
]


@pytest.mark.parametrize(("within", "narrow", "whole"), KINDS)
def test_backward_waits_for_no_stage_of_a_sum(
    device: Device, within: int, narrow: torch.dtype | None, whole: bool
) -> None:
    """Else every bucket that begins holds up the backward pass until the bucket
    before has crossed the network once.
    """
    device.compute.behind.add("the last gradient")
    work = reduce.start_sum(torch.zeros(8), levels_of(device, within), narrow, whole=whole)
    while work.left:
        work.advance()
    assert device.compute.behind == {"the last gradient"}
    work.wait()
    began = list(device.began)
    assert len(began) >= 2 and device.compute.behind == {"the last gradient", *began}
    for i, behind in enumerate(device.began.values()):
        assert behind == {"the last gradient", *began[:i]}, (
            "a stage would read what the one before has not brought"
        )


def test_so_it_is_where_parameters_are_gathered(device: Device) -> None:
    work = gather.start_gather(torch.zeros(8), levels_of(device, 2))
    assert isinstance(work, Staged)
    work.advance()
    assert not device.compute.behind and list(device.began.values()) == [set(), {"start_all_gather between"}]


def test_on_the_stream_that_computes_it_would_wait(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was; on a CPU it is right."""
    monkeypatch.setattr(reduce, "side_stream", lambda at: None)
    work = reduce.start_sum(torch.zeros(8), levels_of(device, 2), None, whole=True)
    work.advance()
    assert device.compute.behind


def test_streams_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps what it has freed, for itself."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(wire, "_side_streams", {})
    assert len({id(wire.side_stream(Stream.device)) for _ in range(20)}) == wire.SIDE_STREAMS
    assert wire.side_stream(torch.device("cpu")) is None
