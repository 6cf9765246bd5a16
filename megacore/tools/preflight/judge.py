"""Decides from the facts of all machines which of them a run should leave out, and why.

Pure: no machine is asked here.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Any

from megacore.checkpoint.disk import size_text

Facts = Mapping[str, Any]

CLOCK_SECONDS = 2.0  # that clocks may differ: records and file times of one run are then still in order
# of the median of equals: GPUs of one kind differ by a few percent, cores that others use too by more
SLOW_GPU, SLOW_CORE = 0.85, 0.5
SLOW_DISK, SLOW_LINK = 0.25, 0.5  # of the median
OPEN_FILES, SHARED_MEMORY = 1024, 1 << 30  # below which sockets of many ranks, and NCCL's buffers, do not fit
LEAST_FREE = 256 << 20  # on a disk that holds records alone
UNEQUAL_MEMORY = 0.9  # of the median


@dataclass(frozen=True)
class HostFinding:
    """Something about a host that is not as it should be."""

    host: str
    check: str
    text: str
    fatal: bool = True  # whether the host is left out for it; a person should know of the others


CHECKS = (
    "reached",
    "code",
    "versions",
    "config",
    "clock",
    "disk",
    "shared",
    "memory",
    "limits",
    "ports",
    "network",
    "devices",
    "links",
)


def judge(hosts: Mapping[str, Facts], slots: Mapping[str, int], *, need_sharing: bool) -> list[HostFinding]:
    """What is wrong with the hosts of a job, in the order of `CHECKS`.

    `hosts`: each one's facts (`facts.py`), with the keys `unreached` (why there are none) or `ahead` (seconds
    of its clock before this machine's) beside them. `slots`: ranks that each is to have. `need_sharing`:
    whether log.dir must be one folder for all.
    """
    found = [
        HostFinding(host, "reached", about["unreached"])
        for host, about in hosts.items()
        if about.get("unreached")
    ]
    there = {host: about for host, about in hosts.items() if not about.get("unreached")}
    if not there:
        return found
    found += differing(there, "code", code_text)
    for package in next(iter(there.values()))["versions"]:
        found += differing(
            there,
            "versions",
            lambda about, name=package: f"{name} {about['versions'].get(name)}",  # type: ignore[misc]
        )
    found += [
        HostFinding(host, "config", about["config"]["error"])
        for host, about in there.items()
        if "error" in about["config"]
    ]
    readable = {host: about for host, about in there.items() if "digest" in about["config"]}
    found += differing(readable, "config", lambda about: f"digest {about['config']['digest']}")
    found += [
        *clocks(there),
        *disks(readable),
        *sharing(readable, need_sharing),
        *memories(there, slots),
        *others(there, len(hosts)),
    ]
    found += devices(there, slots)
    return found


def differing(hosts: Mapping[str, Facts], check: str, of: Callable[[Facts], str]) -> list[HostFinding]:
    """The hosts whose value is not that of most; of the first host, where two values are as frequent."""
    values = {host: of(about) for host, about in hosts.items()}
    if not values:
        return []
    usual, count = Counter(values.values()).most_common(1)[0]
    example = next(host for host, value in values.items() if value == usual)
    where = example if count == 1 else f"{example} and {count - 1} more"
    return [
        HostFinding(h, check, f"{value}, and {usual} on {where}")
        for h, value in values.items()
        if value != usual
    ]


def code_text(about: Facts) -> str:
    """The commit and the sources' digest in words."""
    commit, files = about["code"]["commit"], about["code"]["files"]
    return f"commit {commit} (sources {files})" if commit else f"sources {files}"


def clocks(hosts: Mapping[str, Facts]) -> list[HostFinding]:
    """Clocks that differ from most; this machine's own counts as one."""
    usual = median_low([0.0, *(about["ahead"] for about in hosts.values())])
    apart = {host: about["ahead"] - usual for host, about in hosts.items()}
    late = {host: seconds for host, seconds in apart.items() if abs(seconds) > CLOCK_SECONDS}
    words = {
        host: f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} the others"
        for host, seconds in late.items()
    }
    return [HostFinding(host, "clock", text) for host, text in words.items()]


def disks(hosts: Mapping[str, Facts]) -> list[HostFinding]:
    """Folders that cannot be written, have no room for a checkpoint, or are slow."""
    found = []
    usual = usual_of(about["log_dir"]["write"] for about in hosts.values())
    for host, about in hosts.items():
        disk, least = about["log_dir"], max(LEAST_FREE, about["needs"]["disk"])
        if disk["error"]:
            found.append(HostFinding(host, "disk", f"cannot write in {disk['path']}: {disk['error']}"))
        if disk["free"] < least:
            why = "a checkpoint" if least > LEAST_FREE else "a run"
            found.append(
                HostFinding(
                    host,
                    "disk",
                    f"{size_text(disk['free'])} free in {disk['path']}, and {why} needs {size_text(least)}",
                )
            )
        elif disk["write"] and disk["write"] < SLOW_DISK * usual:
            text = (
                f"{size_text(int(disk['write']))}/s written in {disk['path']}, and "
                f"{size_text(int(usual))}/s on most hosts"
            )
            found.append(HostFinding(host, "disk", text, fatal=False))
    return found


def sharing(hosts: Mapping[str, Facts], needed: bool) -> list[HostFinding]:
    """Hosts that do not see the files which most others see in log.dir."""
    groups = Counter(
        frozenset(about["log_dir"]["seen"]) for about in hosts.values() if not about["log_dir"]["error"]
    )
    if len(hosts) < 2 or not groups:
        return []
    # the first host's, where several are as frequent
    common = max(groups, key=lambda seen: (groups[seen], len(seen)))
    found = []
    for host, about in hosts.items():
        if frozenset(about["log_dir"]["seen"]) != common and not about["log_dir"]["error"]:
            who = ", ".join(sorted(common)[:3]) + (f" and {len(common) - 3} more" if len(common) > 3 else "")
            text = (
                f"{about['log_dir']['path']} is not the folder that {who} "
                f"{'have' if len(common) > 1 else 'has'}"
            )
            text += "" if needed else "; this run saves no checkpoints, so it needs none that is shared"
            found.append(HostFinding(host, "shared", text, fatal=needed))
    return found


def memories(hosts: Mapping[str, Facts], slots: Mapping[str, int]) -> list[HostFinding]:
    """Hosts with less memory than their ranks need, or than the others have."""
    found = []
    usual = usual_of(about["memory"]["total"] for about in hosts.values())
    for host, about in hosts.items():
        has, needs = about["memory"], about.get("needs", {}).get("memory", 0)
        gpus = about["devices"].get("gpus") or []
        room = min((gpu.get("free", 0) for gpu in gpus), default=has["available"])
        needs = needs // max(1, slots[host]) if gpus else needs
        if room < needs:
            where = "on a GPU" if gpus else f"for {slots[host]} ranks"
            text = f"{size_text(room)} free {where}, and the run needs {size_text(needs)}"
            found.append(HostFinding(host, "memory", text))
        if has["total"] < UNEQUAL_MEMORY * usual:
            found.append(
                HostFinding(
                    host,
                    "memory",
                    f"{size_text(has['total'])}, and {size_text(int(usual))} on most hosts",
                    fatal=False,
                )
            )
        if has["shared"] < SHARED_MEMORY:
            text = (
                f"/dev/shm has {size_text(has['shared'])}: NCCL and ranks on one CPU exchange data "
                "through it (1 GiB or more)"
            )
            found.append(HostFinding(host, "memory", text, fatal=False))
    return found


def others(hosts: Mapping[str, Facts], count: int) -> list[HostFinding]:
    """Limits of the shell, ports that are taken, names that lead nowhere."""
    found = []
    for host, about in hosts.items():
        files, locked = about["limits"]["open files"], about["limits"]["locked memory"]
        if files is not None and files < OPEN_FILES:
            found.append(
                HostFinding(
                    host,
                    "limits",
                    f"ulimit -n is {files}: too few for the sockets of many ranks ({OPEN_FILES} or more)",
                )
            )
        if locked is not None and about["network"]["infiniband"]:
            found.append(
                HostFinding(
                    host,
                    "limits",
                    f"ulimit -l is {size_text(locked)}: InfiniBand registers memory (unlimited)",
                )
            )
        found += [
            HostFinding(host, "ports", f"port {port} is taken")
            for port, taken in about["ports"].items()
            if taken
        ]
        own, first = about["network"]["own"], about["network"]["first"]
        if first is None and count > 1:
            found.append(
                HostFinding(host, "network", "does not know the first host's name, where ranks meet")
            )
        if (
            count > 1
            and (own or "127.").startswith("127.")
            and not about["settings"].get("GLOO_SOCKET_IFNAME")
        ):
            text = (
                f"its own name leads to {own or 'no address'}: gloo would offer that to other hosts "
                "(set GLOO_SOCKET_IFNAME)"
            )
            found.append(HostFinding(host, "network", text, fatal=False))
    addresses = differing(
        {
            host: about
            for host, about in hosts.items()
            if not (about["network"]["first"] or "127.").startswith("127.")
        },
        "network",
        lambda about: f"the first host's address is {about['network']['first']}",
    )
    return found + addresses


def devices(hosts: Mapping[str, Facts], slots: Mapping[str, int]) -> list[HostFinding]:
    """GPUs that are missing, wrong or slow, and slow cores where there is no GPU."""
    found = []
    with_gpus = [host for host, about in hosts.items() if about["devices"].get("gpus")]
    speeds: dict[str, list[float]] = {}  # of each kind of device
    for about in hosts.values():
        for kind, _, fast in speeds_of(about):
            speeds.setdefault(kind, []).append(fast)
    for host, about in hosts.items():
        if error := about["devices"].get("error"):
            found.append(HostFinding(host, "devices", f"cannot be tried: {error}"))
            continue
        gpus = about["devices"]["gpus"]
        if with_gpus and len(gpus) < slots[host]:
            found.append(
                HostFinding(
                    host,
                    "devices",
                    f"{len(gpus)} GPUs are visible, and the run has {slots[host]} ranks there",
                )
            )
        for number, gpu in enumerate(gpus):
            if gpu["error"] or not gpu["right"]:
                wrong = gpu["error"] or "computes a wrong product"
                found.append(HostFinding(host, "devices", f"GPU {number} ({gpu['name']}): {wrong}"))
        least, unit = (SLOW_GPU, "TFLOP/s") if gpus else (SLOW_CORE, "GFLOP/s")
        for kind, name, fast in speeds_of(about):
            if fast < least * (usual := median_high(speeds[kind])):
                found.append(
                    HostFinding(
                        host,
                        "devices",
                        f"{name} is slow: {fast:.3g} {unit}, and {usual:.3g} is usual ({kind})",
                    )
                )
    return found


def speeds_of(about: Facts) -> list[tuple[str, str, float]]:
    """Kind, name and speed of each device that was measured."""
    gpus = [
        (gpu["name"], f"GPU {i}", gpu["tflops"])
        for i, gpu in enumerate(about["devices"].get("gpus") or [])
        if gpu["tflops"]
    ]
    cores = about["devices"].get("cores") or {}
    return gpus + [(about["devices"]["model"], f"core {core}", fast) for core, fast in cores.items()]


def usual_of(values: Iterable[float | None]) -> float:
    """The median of what is known; 0 of nothing."""
    known = [value for value in values if value]
    return float(median_high(known)) if known else 0.0


def excluded(findings: Iterable[HostFinding], before: str = "") -> str:
    """The hosts to leave out, as the deepspeed launcher's `--exclude` takes them; empty if none.

    `before`: those that are already.
    """
    return "@".join(
        dict.fromkeys(
            [
                *filter(None, before.split("@")),
                *(finding.host for finding in findings if finding.fatal and " " not in finding.host),
            ]
        )
    )


def judge_together(result: Facts, names: Sequence[str]) -> list[HostFinding]:
    """What is wrong between machines, by what `links.together` has measured. `names`: those of its machines.

    A machine is named if each of its links in one direction is slow, of two or more; else the link is.
    """
    found = []
    for group in result["groups"]:
        if not group["right"]:
            text = (
                f"an all-reduce over ranks {', '.join(map(str, group['ranks']))} ({group['axis']}) "
                "gave a wrong sum"
            )
            hosts = [
                name
                for name, ranks in zip(names, result["machines"], strict=True)
                if set(ranks) & set(group["ranks"])
            ]
            found += [HostFinding(host, "links", text) for host in hosts]
    usual = usual_of(link["bytes_per_second"] for link in result["links"])
    slow = [link for link in result["links"] if link["bytes_per_second"] < SLOW_LINK * usual]
    for way in ("from", "to"):
        for number, name in enumerate(names):
            tried = [link for link in result["links"] if link[way] == number]
            if len(tried) > 1 and all(link in slow for link in tried):
                rate = size_text(int(usual_of(link["bytes_per_second"] for link in tried)))
                found.append(
                    HostFinding(name, "links", f"{rate}/s {way} it, and {size_text(int(usual))}/s is usual")
                )
    named = {finding.host for finding in found}
    for link in slow:
        ends = [names[link["from"]], names[link["to"]]]
        if not named & set(ends):
            text = (
                f"{size_text(int(link['bytes_per_second']))}/s to {ends[1]}, and "
                f"{size_text(int(usual))}/s is usual"
            )
            found.append(HostFinding(ends[0], "links", text, fatal=False))
    return found
