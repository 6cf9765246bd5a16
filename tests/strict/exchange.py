"""How ranks meet in an operation: they compare headers, and then exchange bytes, over
gloo's messages alone.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HEADER = 512  # bytes
PAIRED = {"send": "receive", "receive": "send"}


class Mismatch(Exception):
    """Two ranks enqueued different operations."""


class Gloo:
    """Messages among the ranks of a group; threads with tags of their own do not disturb each other."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self.group = dist.ProcessGroupGloo(
            dist.PrefixStore("messages", store), rank, size, timedelta(seconds=timeout)
        )


def swap(gloo: Gloo, tag: int, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> dict[int, Tensor]:
    """Sends a tensor to each of some ranks and receives one from each of some,
    all at once; returns what arrived.
    """
    arrived = {peer: torch.empty(x.shape, dtype=x.dtype) for peer, x in incoming.items()}
    leaving = {peer: x.detach().clone(memory_format=torch.contiguous_format) for peer, x in outgoing.items()}
    if gloo.rank in arrived:
        arrived[gloo.rank].copy_(leaving.pop(gloo.rank))
    receives = [
        gloo.group.recv([_bytes(x)], peer, tag)
        for peer, x in arrived.items()
        if peer != gloo.rank and x.numel()
    ]
    sends = [gloo.group.send([_bytes(x)], peer, tag) for peer, x in leaving.items() if x.numel()]
    for work in (*receives, *sends):
        work.wait()
    return arrived


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def agree(gloo: Gloo, tag: int, header: dict[str, Any], peers: Sequence[int], where: str) -> None:
    """Compares what this rank has enqueued with what its peers have.

    Raises `Mismatch` that says what both sides want.
    """
    own = json.dumps(header).encode()
    assert len(own) <= HEADER, header
    sheet = torch.zeros(HEADER, dtype=torch.uint8)
    sheet[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    others = [peer for peer in peers if peer != gloo.rank]
    found = swap(gloo, tag, dict.fromkeys(others, sheet), dict.fromkeys(others, sheet))
    for peer, answer in found.items():
        theirs = json.loads(bytes(answer.tolist()).rstrip(b"\0"))
        expected = header | {"operation": PAIRED.get(header["operation"], header["operation"])}
        if "sends" in header and "sends" in theirs:  # what one sends the other must expect, and the reverse
            expected |= {"sends": header["receives"][peer], "receives": header["sends"][peer]}
            theirs |= {"sends": theirs["sends"][gloo.rank], "receives": theirs["receives"][gloo.rank]}
        differing = [key for key in expected.keys() | theirs.keys() if expected.get(key) != theirs.get(key)]
        if differing:
            own_text, their_text = (
                ", ".join(f"{key} {value}" for key, value in side.items()) for side in (header, theirs)
            )
            raise Mismatch(
                f"{where}, this rank has {own_text}, and its peer {peer} {their_text}, differing in "
                f"{' and '.join(sorted(differing))}"
            )
