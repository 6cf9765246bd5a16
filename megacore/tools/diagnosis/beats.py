"""What hosts send each other as heartbeats, and ranks to their host's process; and that
nothing of a stranger's is read.

All of it begins with the run's token, which is compared before anything else is looked at. Behind it a
datagram has a fixed layout of
numbers and lengths: there is nothing in it to parse, and what does not fit exactly is an error. Standard
library only, as `heartbeat`.
"""

import contextlib
import ctypes
import hmac
import os
import socket
import struct
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

TOKEN_BYTES = 16  # of chance; the token is their hexadecimal digits, because lines of text begin with it
MOST_BYTES = 65536  # more than any datagram has
# whether the host parts; bytes of its texts; lengths of its lists of ranks
HEAD = struct.Struct("!?9H")
VERDICT_BYTES = 1024
QUIET = "quiet"  # the state of a rank whose host is not heard
MOST_LISTED = 256  # ranks of a list that may grow with the run: a datagram that is too long would not be sent
# Of Linux's socket filters (its documentation, networking/filter): the option, three instructions, and where
# a datagram's content begins.
SO_ATTACH_FILTER, LOAD_WORD, GO_ON_IF_EQUAL, RETURN, UDP_HEADER = 26, 0x20, 0x15, 0x06, 8
PEER = struct.Struct("iII")  # process, user and group at the other end of a connection


@dataclass(frozen=True)
class Failure:
    """Why a rank has ended, as it reported it; or what is guessed of one that reported nothing."""

    reason: str = ""
    ranks: list[int] = field(default_factory=list)  # the ranks that the reason blames


@dataclass(frozen=True)
class RankStates:
    """The ranks of all hosts that are not known to run. All others do, unless a list is full."""

    gone: list[int] = field(default_factory=list)  # ended without a farewell
    stopped: list[int] = field(default_factory=list)  # by a signal or a debugger
    quiet: list[int] = field(default_factory=list)  # on hosts that are not heard

    def state(self, rank: int) -> str:
        """The state of a rank's process as `process_state` has it; `QUIET`; or ? if it is not known."""
        if rank in self.gone:
            return "gone"
        if rank in self.stopped:
            return "T"
        if rank in self.quiet:
            return QUIET
        is_full = max(len(self.gone), len(self.stopped), len(self.quiet)) >= MOST_LISTED
        return "?" if is_full else "R"


@dataclass(frozen=True)
class Beat:
    """A host's message to another one."""

    name: str
    verdict: str
    parting: bool
    ranks: list[int]
    open: list[int]  # those of them that have not ended
    # Of this host's ranks; in the answers of rank 0's host, of the ranks of all hosts.
    states: RankStates = field(default_factory=RankStates)
    failure: Failure = field(default_factory=Failure)  # the first that a rank of this host has reported

    def packed(self, token: bytes) -> bytes:
        """The datagram."""
        texts = [self.name.encode()]
        texts += [text.encode()[:VERDICT_BYTES] for text in (self.verdict, self.failure.reason)]
        may_grow = (self.states.gone, self.states.stopped, self.states.quiet, self.failure.ranks)
        lists = [self.ranks, self.open, *(ranks[:MOST_LISTED] for ranks in may_grow)]
        numbers = [number for each in lists for number in each]
        head = HEAD.pack(self.parting, *map(len, (*texts, *lists)))
        return token + head + b"".join(texts) + struct.pack(f"!{len(numbers)}I", *numbers)


def unpacked(data: bytes) -> Beat:
    """The beat in a datagram behind its token.

    Raises `struct.error` for one that does not fit its lengths.
    """
    parting, *lengths = HEAD.unpack_from(data)
    text_bytes, counts = lengths[:3], lengths[3:]
    texts, offset = [], HEAD.size
    for size in text_bytes:
        texts.append(data[offset : offset + size].decode(errors="replace"))
        offset += size
    name, verdict, reason = texts
    numbers = iter(struct.unpack(f"!{sum(counts)}I", data[offset:]))
    ranks, still_open, gone, stopped, quiet, blamed = (list(islice(numbers, count)) for count in counts)
    states, failure = RankStates(gone, stopped, quiet), Failure(reason, blamed)
    return Beat(name, verdict, parting, ranks, still_open, states, failure)


def behind_token(data: bytes, token: bytes) -> bytes | None:
    """What follows the run's token; None of a stranger's message.

    The time that this takes does not tell where the two differ.
    """
    return data[len(token) :] if hmac.compare_digest(data[: len(token)], token) else None


def same_user(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket belonged to this process's user when it
    connected, as the kernel says.
    """
    _, user, _ = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return bool(user == os.geteuid())


def open_datagrams() -> socket.socket:
    """A socket for datagrams of IPv6 and IPv4, or of IPv4 alone where the kernel has no other."""
    try:
        found = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind(("::", 0))
    except OSError:
        found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        found.bind(("", 0))
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)  # thousands of hosts may beat at a time
    return found


def keep_out(datagrams: socket.socket, token: bytes) -> None:
    """Lets the kernel drop what does not begin with the token, so that no flood takes the places of beats
    that wait to be read. It only saves work: a kernel without such filters leaves it to `behind_token`.
    """
    words = struct.unpack(f"!{len(token) // 4}I", token[: len(token) // 4 * 4])
    code = []
    for i, word in enumerate(words):
        code.append((LOAD_WORD, 0, 0, UDP_HEADER + 4 * i))
        code.append((GO_ON_IF_EQUAL, 0, 2 * (len(words) - i) - 1, word))  # else to the last line
    code += [(RETURN, 0, 0, MOST_BYTES), (RETURN, 0, 0, 0)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    with contextlib.suppress(OSError):
        datagrams.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(code), ctypes.addressof(program))
        )


def resolve(name: str, port: int, family: socket.AddressFamily) -> Any:
    """The address of a host, for a socket of `open_datagrams`."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)
    for kind, *_, address in found:
        if kind == socket.AF_INET:
            return address if family == kind else (f"::ffff:{address[0]}", port, 0, 0)
    return found[0][4]
