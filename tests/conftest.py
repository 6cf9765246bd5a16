"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.kernel_checks import interpret
from tests.pool import CONTEXT, Pool


def pytest_collection_finish(session: pytest.Session) -> None:
    """DeepSpeed takes five seconds to import: once for all workers, where they will need it."""
    if any("deepspeed" in item.nodeid for item in session.items):
        CONTEXT.set_forkserver_preload(["tests.preload", "deepspeed"])


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Worker processes that live as long as a test file: engines leave threads behind that would slow down whoever comes after them."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(pool: Pool) -> Callable[..., list[Any]]:
    """`run_ranks(world, function, *args, timeout=120)`: the results of a module-level function on that many ranks."""
    return pool.run


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, *args)`: its result where Triton kernels are interpreted on the CPU, for the kernels' tests."""
    pool = Pool(bare=True)
    yield partial(interpret, pool)
    pool.close()
