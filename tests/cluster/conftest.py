"""Fixtures of the tests that need several hosts."""

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts, hosts


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts for all tests of a file."""
    with hosts(tmp_path_factory.mktemp("hosts"), 2) as found:
        yield found
