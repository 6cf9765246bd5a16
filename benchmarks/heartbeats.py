"""What the heartbeats of many hosts cost the one that answers them, and how soon it names one that falls
silent. The others are sockets.

python -m benchmarks.heartbeats --hosts 4096
"""

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time

from megacore.distributed.processes import stat_fields
from megacore.tools.cli import Parser, count, exit_with
from megacore.tools.diagnosis import heartbeat
from megacore.tools.diagnosis.beats import Beat

TOKEN = "benchmark"
EXAMPLE = "python -m benchmarks.heartbeats --hosts 4096"


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    return sum(map(int, stat_fields(pid)[11:13])) / 100


def run(argv: list[str]) -> int:
    """Prints the figures."""
    parser = Parser(
        "Measure the CPU time that answering the heartbeats of many hosts takes.",
        example=EXAMPLE,
        page="benchmarks/README.md",
    )
    parser.add_argument("--hosts", type=count, default=4096, metavar="N", help="number of hosts")
    parser.add_argument(
        "--heartbeat-seconds",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="parallel.heartbeat_seconds of the run",
    )
    parser.add_alias("--seconds", "--heartbeat-seconds")
    args = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    hub = subprocess.Popen(
        [sys.executable, "-m", heartbeat.__name__], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert hub.stdin is not None and hub.stdout is not None
    settings = {
        "name": "node0",
        "token": TOKEN,
        "seconds": args.heartbeat_seconds,
        "world_size": 8 * args.hosts + 1,
        "note": None,
    }
    hub.stdin.write(json.dumps(settings) + "\n")
    hub.stdin.close()
    rank = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    rank.connect("\0" + hub.stdout.readline().strip())
    rank.send(f"{TOKEN}{json.dumps({'rank': 0, 'pid': 0})}\n".encode())
    answer, _, verdict = rank.recv(4096).partition(b"\n")
    port = json.loads(answer)["port"]
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(args.hosts)]
    for each in sockets:
        each.setblocking(False)
    ranks = [list(range(8 * i, 8 * i + 8)) for i in range(args.hosts + 1)]
    messages = [
        Beat(f"node{i}", "", False, ranks[i], ranks[i]).packed(TOKEN.encode())
        for i in range(1, args.hosts + 1)
    ]
    answers, sent, silent, rounds = 0, 0, args.hosts // 3, 2 * heartbeat.BEATS
    began, computed = time.monotonic(), cpu_seconds(hub.pid)
    for number in range(rounds):
        for i, (each, message) in enumerate(zip(sockets, messages, strict=True)):
            each.sendto(message, ("127.0.0.1", port))
            sent += 1
            due = began + (number + i / args.hosts) * args.heartbeat_seconds / heartbeat.BEATS
            while (left := due - time.monotonic()) > 0:  # hosts beat at times of their own
                time.sleep(min(left, 0.05))
            if number:
                with contextlib.suppress(BlockingIOError):
                    answers += bool(each.recv(65536))
    share = (cpu_seconds(hub.pid) - computed) / (time.monotonic() - began)
    print(
        f"{args.hosts} hosts: the process that answers them needs {share:.1%} of a core; {answers} of "
        f"{sent - args.hosts} answers came"
    )
    struck = time.monotonic()
    rank.setblocking(False)
    while b"verdict" not in verdict:
        for i, (each, message) in enumerate(zip(sockets, messages, strict=True)):
            if i != silent:
                each.sendto(message, ("127.0.0.1", port))
        time.sleep(args.heartbeat_seconds / heartbeat.BEATS / 2)
        with contextlib.suppress(BlockingIOError):
            verdict += rank.recv(65536)
    print(f"one that fell silent was named after {time.monotonic() - struck:.1f} s")
    hub.kill()
    hub.wait()
    return 0


if __name__ == "__main__":
    exit_with(run)
