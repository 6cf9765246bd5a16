"""Compiled runs inside a test's workers: how many graphs there were, and what cut them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from tests import training

# Follows the code and divides forward from backward as Inductor does, and leaves out the minute in which that
# writes C++.
QUICK = "aot_eager_decomp_partition"


@contextmanager
def graphs_counted(backend: str = QUICK) -> Iterator[dict[str, Any]]:
    """Modules are compiled by `backend` while entered.

    It then holds `graphs`, how many there were, and `breaks`, why any ended early.
    """
    torch._dynamo.reset()
    counters.clear()
    found: dict[str, Any] = {}
    as_it_is = nn.Module.compile
    try:
        with mock.patch.object(nn.Module, "compile", lambda self, **_: as_it_is(self, backend=backend)):
            yield found
        found["graphs"] = counters["stats"]["unique_graphs"]
        found["breaks"] = [reason.splitlines()[0] for reason in counters["graph_break"]]
    finally:
        torch._dynamo.reset()


def compiled_rank(
    config: str, overrides: list[str], log_dir: str, backend: str = QUICK
) -> tuple[int, list[str]]:
    """One rank's whole run; returns how many graphs its blocks are, and why any ended early."""
    with graphs_counted(backend) as found:
        assert training.run_rank(config, [*overrides, "train.compile=true"], log_dir) == 0
    return found["graphs"], found["breaks"]
