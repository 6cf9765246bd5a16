"""What ranks write for each other into the store in which they met, and how one of them
reads what thousands have written.

A question to the store takes some ten microseconds on one machine and a hundred between machines, so nothing
is asked rank by rank: one question tells whether all of some keys are there, and halves are asked about only
where one is missing.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

AT_ONCE = 512  # values in one answer: others, too, want the store


class StoreKV:
    """A connection to the store, of one thread's own.

    Values are JSON. What it raises are errors of `torch.distributed`.
    """

    def __init__(self, store: dist.Store) -> None:
        """`store`: the one in which the ranks met.

        The main thread may be waiting over its connection, so this one is another.
        """
        self.store = dist.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self.answers = 0  # of the store

    def write(self, key: str, value: Any) -> None:
        """Writes a value, over one that is there."""
        self.store.set(key, json.dumps(value))

    def note(self, key: str, number: int) -> None:
        """Adds a number to those under a key."""
        self.store.append(key, f"{number} ")  # type: ignore[attr-defined]

    def noted(self, key: str) -> list[int]:
        """The numbers under a key, of which there is one at least."""
        found = [int(number) for number in self.store.get(key).split()]
        self.answers += 1
        return found

    def is_there(self, key: str) -> bool:
        """Whether the store has a key."""
        return self._all_there([key])

    def there(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that the store has."""
        if not keys or self._all_there(keys):
            return list(keys)
        if len(keys) == 1:
            return []
        middle = len(keys) // 2
        return self.there(keys[:middle]) + self.there(keys[middle:])

    def read(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of those of `keys` that the store has."""
        there, found = self.there(keys), dict[str, Any]()
        for first in range(0, len(there), AT_ONCE):
            part = there[first : first + AT_ONCE]
            found |= dict(zip(part, map(json.loads, self.store.multi_get(part)), strict=True))
            self.answers += 1
        return found

    def is_first(self, key: str, name: str) -> bool:
        """Whether of all who ask this of a key, each with a name of its own, this one came first."""
        return self.first(key, name) == name

    def first(self, key: str, name: str) -> str:
        """The name of whoever asked first for a key."""
        found: bytes = self.store.compare_set(key, "", name)
        return found.decode()

    def _all_there(self, keys: Sequence[str]) -> bool:
        there: bool = self.store.check(list(keys))
        self.answers += 1
        return there
