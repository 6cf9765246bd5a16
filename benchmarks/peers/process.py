"""What megacore sets for its own process on a CPU: given to a peer's process too where settings
are to be equal, and read back.

What a process has is not taken from what was called, but from how the process behaves. So a setting that is
missing in one contender, or that comes to one which should not have it, is seen.
"""

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import torch

from megacore.tools.crowd import spin_while_cores_are_free
from megacore.tools.machine.cpu import divide_cores, keep_freed_memory, multiply_with_onednn

OWN, EQUAL = "own", "equal"  # as its users get a contender; with the settings of megacore's process
SETTINGS = {OWN: "as its users get it", EQUAL: "with equal process settings"}
# bytes of a block larger than any that glibc keeps by itself; never written, so it takes no memory
UNTOUCHED = 1 << 30


MALLOC_INFO = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLOC_INFO]


def equalise(local_world_size: int) -> None:
    """Gives this process what megacore gives its own."""
    divide_cores(local_world_size)
    spin_while_cores_are_free()  # of which nothing is seen on a quiet machine
    multiply_with_onednn()
    keep_freed_memory()


def observed() -> dict[str, Any]:
    """What this process has: which settings make a peer's process equal to
    megacore's is decided by these alone.
    """
    return {
        "threads": torch.get_num_threads(),
        "fp32 products": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "keeps freed memory": keeps_freed_memory(),
    }


def keeps_freed_memory() -> bool | None:
    """Whether the allocator takes a large block from its heap, and keeps it there when it is freed.

    None where it is not glibc's.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):  # glibc 2.33
        return None
    library.mallinfo2.restype, library.malloc.restype, library.malloc.argtypes = (
        MallocInfo,
        ctypes.c_void_p,
        [ctypes.c_size_t],
    )
    library.free.argtypes = [ctypes.c_void_p]
    before = library.mallinfo2()
    block = library.malloc(UNTOUCHED)
    held = library.mallinfo2()
    library.free(block)
    after = library.mallinfo2()
    return bool(held.hblks == before.hblks and after.arena >= held.arena)


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """What a process has otherwise than it should have, in words; None where nothing is."""
    wrong = [
        f"{name}: {found.get(name)} in place of {value}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    return "its process is not set as it should be: " + "; ".join(wrong) if wrong else None


def expected(threads: int) -> dict[str, dict[str, Any]]:
    """By `SETTINGS`: what a process of so many threads has by itself, and what it has once it is `equalise`d.

    Takes two processes.
    """
    states = {}
    for settings in (OWN, EQUAL):
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "benchmarks.peers.process", settings]
        states[settings] = json.loads(
            subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
        )
    return states


if __name__ == "__main__":
    if sys.argv[1:] == [EQUAL]:
        equalise(1)
    print(json.dumps(observed()))
