"""What the kernel knows of other processes of this machine (Linux)."""

from pathlib import Path

ENDED, STOPPED = ("gone", "Z", "X"), ("T", "t")  # states of a process: its parent may not have noticed yet; stopped by a signal, or traced


def process_state(pid: int) -> str:
    """The state of a process of this machine as Linux writes it (R, S, D, T, Z, …), or gone; ? elsewhere."""
    if not Path("/proc/self/stat").exists():
        return "?"
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have (Linux): launchers give ranks sessions of their own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]
