"""Somebody who can reach what a run listens on and does not know its token: floods,
garbage, idle and slow connections.

python -m tests.strangers 60 udp:node0:4321 tcp:node0:9400 unix:0000a
"""

import contextlib
import itertools
import os
import random
import socket
import sys
import time
from collections.abc import Iterator

NESTED = b"[" * 3000  # a parser of JSON runs out of its stack
SEED = random.Random(0)
GARBAGE = [
    b"",
    b"\n",
    NESTED,
    NESTED + b"\n",
    b'{"token": "theirs", "verdict": "end", "parting": true}\n',
    b"\xff\xfe{",
    b"\0" * 60000,
    b'{"rank": 0, "pid": -1}\n',
    b"GET / HTTP/1.1\r\nX: " + b"a" * 20000,
    b"GET /metrics HTTP/1.1\r\n",
    b"\x16\x03\x01" + b"\1" * 500,
    *(SEED.randbytes(size) for size in (1, 32, 44, 1400, 9000)),
]
IDLE = 125  # connections to each listener, held open


def datagrams(address: tuple[str, int]) -> Iterator[int]:
    """Sends as fast as it can."""
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for message in itertools.cycle(GARBAGE):
        with contextlib.suppress(OSError):
            yield out.sendto(message, address)


def connections(family: int, address: tuple[str, int] | str) -> Iterator[int]:
    """Holds connections open, of which some say nothing, some a byte at a time, some garbage; opens new
    ones for those that are closed.
    """
    held: list[socket.socket] = []
    for number in itertools.count():
        if len(held) < IDLE:
            new = socket.socket(family, socket.SOCK_STREAM)
            new.settimeout(0.2)
            with contextlib.suppress(OSError):
                new.connect(address)
            new.setblocking(False)
            held.append(new)
        one = held[number % len(held)]
        message = (b"", b"x", GARBAGE[number // 3 % len(GARBAGE)])[number % 3]
        try:
            yield one.send(message) if message else 0
            if not one.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError
        except BlockingIOError:
            continue
        except OSError:
            one.close()
            held.remove(one)


def work(seconds: float, targets: list[str]) -> dict[str, int]:
    """Does all that to `targets` for so long; returns how often each was tried."""
    at: dict[str, Iterator[int]] = {}
    for target in targets:
        kind, where = target.split(":", 1)
        host, _, port = where.rpartition(":")
        if kind == "udp":
            at[target] = datagrams((host, int(port)))
        elif kind == "tcp":
            at[target] = connections(socket.AF_INET, (host, int(port)))
        else:
            at[target] = connections(socket.AF_UNIX, "\0" + where)
    done, deadline = dict.fromkeys(targets, 0), time.monotonic() + seconds
    while time.monotonic() < deadline:
        for target, strike in at.items():
            next(strike)
            done[target] += 1
        if sum(done.values()) % 512 < len(targets):
            time.sleep(0.005)
    return done


if __name__ == "__main__":
    if os.geteuid() == 0 and "--nobody" in sys.argv:
        os.setuid(65534)
    print(work(float(sys.argv[1]), [word for word in sys.argv[2:] if ":" in word]), flush=True)
