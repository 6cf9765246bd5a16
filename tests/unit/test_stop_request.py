"""Which signals let a run save, and which end it: without processes, so that the times are exact."""

import os
import signal
import time
from unittest.mock import Mock

import pytest

from megacore.config import Config
from megacore.config.schema import TrainConfig
from megacore.tools.monitoring.first_step import StartUp
from megacore.tools.stop_request import StopRequest


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended."""
    exit_statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", exit_statuses.append)
    return exit_statuses


@pytest.mark.parametrize(
    ("signals", "torchrun", "expected"),
    [
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.2)], False, []),  # the terminal's and the launcher's
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 1.5)], False, [130]),
        ([(signal.SIGINT, 0.0), (signal.SIGTERM, 1.5)], False, []),  # a scheduler's, while the run saves
        ([(signal.SIGINT, 0.0), (signal.SIGTERM, 1.5)], True, [143]),  # how torchrun passes on the second
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 1.5)], True, []),
        ([(signal.SIGTERM, 0.0), (signal.SIGINT, 1.5)], False, []),
    ],
)
def test_only_a_second_ctrl_c_ends_a_run_that_saves(
    signals: list[tuple[signal.Signals, float]],
    torchrun: bool,
    expected: list[int],
    statuses: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint would be lost, or a run that hangs could not be ended."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    request = StopRequest()
    request.begin()
    for number, when in signals:
        monkeypatch.setattr(time, "monotonic", lambda when=when: when)
        request._react(number)
    assert statuses == expected


@pytest.mark.parametrize(
    ("compiles", "events", "begun"),
    [
        (False, ["step"], True),
        (True, ["step"], False),  # it compiles, for minutes
        (True, ["step", "step"], True),
        (True, ["step", "aside"], True),  # the only step is saved
        (True, ["aside"], False),  # all steps are done already, and a validation compiles
    ],
)
def test_when_there_is_something_to_save(compiles: bool, events: list[str], begun: bool) -> None:
    """A signal would wait for a compilation, or end a run that could have saved its step."""
    request = StopRequest()
    listener = StartUp(request)
    listener.on_start(Config(train=TrainConfig(compile=compiles)), mesh=Mock())
    for event in events:
        if event == "step":
            listener.on_step_begin(1, True)
        else:
            listener.on_pause_begin("saving")
    assert request.begun == begun
