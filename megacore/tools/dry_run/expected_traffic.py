"""Holds what a dry rank sent against the traffic formulas."""

from collections import defaultdict
from collections.abc import Sequence

from megacore.tools.dry_run.compare_traffic import named
from megacore.tools.dry_run.dry_step import DryRank
from megacore.tools.planner.traffic import Transfer

# [calls, elements], by ranks, operation and bytes of an element
Sent = dict[tuple[tuple[int, ...], str, int], list[int]]


def differences(dry: DryRank, transfers: Sequence[Transfer]) -> list[str]:
    """One line for each communicator, operation and size of elements that differ
    between a dry rank and the formulas.
    """
    counted: Sent = defaultdict(lambda: [0, 0])
    for call in dry.calls:
        if call.operation != "recv":  # that is the other rank's send
            _add(counted[call.ranks, call.operation, call.dtype.itemsize], 1, call.elements)
    predicted: Sent = defaultdict(lambda: [0, 0])
    for transfer in transfers:
        ranks = dry.groups["world" if transfer.group in ("loss", "norm") else transfer.group]
        _add(predicted[ranks, transfer.operation, transfer.element_bytes], transfer.calls, transfer.elements)
    found = []
    for key in sorted(counted.keys() | predicted.keys()):
        (calls, elements), (expected_calls, expected) = counted.get(key, [0, 0]), predicted.get(key, [0, 0])
        if (calls, elements) != (expected_calls, expected):
            does = f"{elements:,} elements of {key[2]} bytes in {calls:,} calls"
            found.append(
                f"does {key[1]} over {named(key[0])}: {does}, and by formula {expected:,} in "
                f"{expected_calls:,}"
            )
    return found


def _add(row: list[int], calls: int, elements: int) -> None:
    row[0] += calls
    row[1] += elements
