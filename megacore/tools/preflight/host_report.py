"""The verdict on the hosts, as a table for people and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megacore.checkpoint.disk import size_text
from megacore.tools.preflight.judge import CHECKS, Facts, HostFinding, excluded, judge

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 24  # of hosts in the table; of more, those alone in which something was found
COLUMNS = CHECKS[:-1]  # links are between hosts
MOST_KINDS = 8  # of network settings
TITLES = {"reached": "ssh", "disk": "log.dir", "devices": "GPUs, cores"}


def table(hosts: Mapping[str, Facts], findings: Sequence[HostFinding]) -> "Table":
    """A row a host and a column a check: a measured figure, or ✓, where all is well."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    drawn.add_column("host", no_wrap=True)
    for check in COLUMNS:
        drawn.add_column(TITLES.get(check, check), no_wrap=True)
    noted = {(finding.host, finding.check): finding.fatal for finding in reversed(findings)}
    noted |= {(finding.host, finding.check): True for finding in findings if finding.fatal}
    found = {finding.host for finding in findings}
    shown = [host for host in hosts if host in found or len(hosts) <= MOST_ROWS][:MOST_ROWS]
    for host in shown:
        row = [Text(host)]
        for check in COLUMNS:
            fatal, text = noted.get((host, check)), figure(hosts[host], check)
            mark, colour = {None: ("", "green"), True: ("✗ ", "red"), False: ("! ", "yellow")}[fatal]
            row.append(Text(mark + (text if text != "✓" or fatal is None else ""), colour))
        drawn.add_row(*row)
    if len(shown) < len(hosts):
        drawn.caption, drawn.caption_justify = f"and {len(hosts) - len(shown)} more", "left"
    return drawn


def figure(about: Facts, check: str) -> str:
    """What a cell says when nothing is wrong."""
    if about.get("unreached"):
        return "" if check != "reached" else "✓"
    devices = about["devices"]
    if check == "code":
        return about["code"]["commit"][:7] or about["code"]["files"][:7]
    if check == "versions":
        return f"torch {about['versions'].get('torch', '')}"
    if check == "clock":
        return f"{about['ahead']:+.1f} s"
    if check == "disk":
        disk = about.get("log_dir")
        return (
            f"{size_text(disk['free'])}{', ' + size_text(int(disk['write'])) + '/s' if disk['write'] else ''}"
            if disk
            else ""
        )
    if check == "memory":
        return size_text(about["memory"]["available"])
    if check == "devices" and devices.get("gpus"):
        return f"{len(devices['gpus'])} × {min(gpu['tflops'] for gpu in devices['gpus']):.0f} TFLOP/s"
    if check == "devices" and devices.get("cores"):
        return f"{len(devices['cores'])} × {min(devices['cores'].values()):.0f} GFLOP/s"
    return "✓"


def readable(about: Facts, slots: int) -> dict[str, Any]:
    """A host's facts; or, where they cannot be judged or shown, why not: those of another version
    must not hide all other hosts.
    """
    if about.get("unreached"):
        return dict(about)
    two = {"host": about, "other": about}
    try:
        judge(two, dict.fromkeys(two, slots), need_sharing=True)
        "".join([*(figure(about, check) for check in COLUMNS), network_text(about)])
    except Exception as error:
        return {
            "unreached": f"answers, but its answer cannot be judged: {type(error).__name__}: "
            f"{str(error)[:200]}"
        }
    return dict(about)


def settings_lines(hosts: Mapping[str, Facts]) -> list[str]:
    """What decides the networks, in the words of a line for all hosts that have it alike."""
    alike: dict[str, list[str]] = {}
    for host, about in hosts.items():
        if not about.get("unreached"):
            alike.setdefault(network_text(about), []).append(host)
    ordered = sorted(alike.items(), key=lambda item: -len(item[1]))
    return [f"{names(found)}: {text}" for text, found in ordered[:MOST_KINDS]]


def network_text(about: Facts) -> str:
    """The variables that are set, and what is chosen where none is."""
    net, env = about["network"], about["settings"]
    interfaces = ", ".join(
        f"{name} ({speed / 1000:g} Gbit/s)" if speed else name for name, speed in net["interfaces"].items()
    )
    devices = ", ".join(net["infiniband"])
    own = (
        "the address of the host's own name"
        if net["own"] and not net["own"].startswith("127.")
        else net["own"] or "nothing"
    )
    parts = [f"gloo takes {env.get('GLOO_SOCKET_IFNAME') or own}"]
    parts.append(f"interfaces {env.get('NCCL_SOCKET_IFNAME') or interfaces or 'none'}")
    parts.append(f"InfiniBand {env.get('NCCL_IB_HCA') or devices or 'none'}")
    return "; ".join(
        [
            *parts,
            " ".join(f"{name}={value}" for name, value in env.items())
            or "no setting of NCCL, gloo or threads",
        ]
    )


def names(hosts: Sequence[str], most: int = 4) -> str:
    """Some hosts in words."""
    return ", ".join(hosts[:most]) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")


def lines(findings: Sequence[HostFinding]) -> list[str]:
    """A line for each finding; those that hosts are left out for come first."""
    ordered = sorted(findings, key=lambda finding: not finding.fatal)
    return [f"{'✗' if f.fatal else '!'} {f.host}: {TITLES.get(f.check, f.check)}: {f.text}" for f in ordered]


def verdict(hosts: Mapping[str, Facts], findings: Sequence[HostFinding], before: str) -> str:
    """One line. `before`: hosts that were left out already."""
    bad = {finding.host for finding in findings if finding.fatal}
    if not bad:
        return "this host passes" if len(hosts) == 1 else f"all {len(hosts)} hosts pass"
    if not (bad := bad & set(hosts)):
        return "each host passes by itself, and all together do not"
    if len(bad) == len(hosts):
        return "no host passes"
    return f"{len(bad)} of {len(hosts)} hosts should be left out: --exclude {excluded(findings, before)}"


def together_lines(result: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """What the groups and links have, a line for each kind."""
    found = [f"mesh: {result['mesh']}"]
    for axis in dict.fromkeys(group["axis"] for group in result["groups"]):
        own = sorted(
            (group for group in result["groups"] if group["axis"] == axis), key=lambda group: group["seconds"]
        )
        usual, last = own[len(own) // 2], own[-1]
        text = (
            f"{axis}: {len(own)} groups of {len(last['ranks'])} ranks sum 1 MiB in "
            f"{usual['seconds'] * 1e3:.2f} ms (median)"
        )
        slowest = (
            f"; the slowest, ranks {', '.join(map(str, last['ranks'][:8]))}, in "
            f"{last['seconds'] * 1e3:.2f} ms"
        )
        found.append(text + (slowest if len(own) > 1 else ""))
    if result["links"]:
        rates = sorted(
            (link["bytes_per_second"], names[link["from"]], names[link["to"]]) for link in result["links"]
        )
        least, usual_rate = rates[0], rates[len(rates) // 2][0]
        text = f"{len(rates)} links between machines: {size_text(int(usual_rate))}/s (median)"
        found.append(f"{text}; the slowest, {least[1]} to {least[2]}, {size_text(int(least[0]))}/s")
    return found


def as_json(
    hosts: Mapping[str, Facts],
    findings: Sequence[HostFinding],
    before: str,
    together: Mapping[str, Any] | str,
) -> dict[str, Any]:
    """All of it, for programs."""
    found = [asdict(finding) for finding in findings]
    passed = not any(finding.fatal for finding in findings)
    return {
        "passed": passed,
        "exclude": excluded(findings, before),
        "findings": found,
        "hosts": dict(hosts),
        "together": together,
    }
