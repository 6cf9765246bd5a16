"""The batch as every pipeline stage has it: named fields, each made from whole samples
before context ranks divide them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megacore.context_parallel.sharding import Documents


@dataclass(frozen=True)
class Samples:
    """Some whole samples on the host, int64 ``[batch, seq]``. A target that does not count is `IGNORED`."""

    tokens: np.ndarray
    targets: np.ndarray
    documents: Documents | None = None  # if attention stays within them: where they begin in each sample


# A field's values, ``[batch, seq, …]``, of which context ranks get those of their tokens; of any other length
# they all get all. A source of `targets` takes the place of those that samples have.
FieldSource = Callable[[Samples], np.ndarray]


@dataclass(frozen=True, eq=False)
class Microbatch(Mapping[str, Tensor]):
    """A microbatch's fields ``[batch, tokens of this rank]`` by name, on the device, and
    the key of its random numbers.

    Every batch has `tokens`, and `targets` but where text is generated; `positions` only if attention stays
    within documents, each token's in its own. Layers may declare others (`Layer.fields`).
    """

    tokens: Tensor
    targets: Tensor | None = None
    key: int = 0
    documents: Documents | None = None  # where they begin in each sequence
    positions: Tensor | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Tensor]:
        """All that it has."""
        usual = {"tokens": self.tokens, "targets": self.targets, "positions": self.positions}
        return {name: value for name, value in usual.items() if value is not None} | dict(self.more)

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)
