"""Reads and writes plans as JSON: any order of a step's work, made by hand or by `launch/plan.py --output`.

    {"version": 1, "placement": [[0, 3], [1, 2]], "actions": [["F0.0", "F0.1", "B0.1", "B0.0"], ["F0.0",
    "F0.1", "B0.1", "B0.0"]]}

`placement` has the stages that each rank holds, one for each of its chunks. `actions` has for each rank what
it computes, in order: a letter, the microbatch, a dot and the chunk. F is a forward and B a backward; of a
split backward I is that of the input, and W that of the weights. Transfers and reductions follow from these
(`schedule.lower`). `validate` refuses a plan that cannot be run.
"""

import json
import re
from functools import lru_cache
from typing import Any

from megacore.config.implied import ends_apart
from megacore.config.schema import Config
from megacore.errors import ConfigError
from megacore.files import read_json, read_text, write_json
from megacore.pipeline.schedule import COMPUTE, Action, Op, Plan, lower
from megacore.tools.schedules.validate import validate

VERSION = 1
LETTERS = {"F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}
RIGHT = "a plan as launch/plan.py --output writes it"


def plan_from_file(config: Config) -> Plan:
    """The compute actions that ``parallel.schedule=file:…`` names.

    Raises `ConfigError` if they cannot be run.
    """
    plan = read_plan(
        path := config.parallel.schedule.removeprefix("file:"),
        config.parallel.pipeline,
        config.num_microbatches,
    )
    if ends_apart(config) and any({0, plan.stages - 1} <= set(own) for own in plan.placement if len(own) > 1):
        wrong = f"{path} gives one rank both ends, and fsdp cannot divide the embedding that they share"
        raise ConfigError(
            "parallel.schedule",
            wrong,
            "a plan with the ends apart, model.tie_embeddings=false, or engine.kind=native",
        )
    return plan


@lru_cache(maxsize=4)
def read_plan(path: str, ranks: int, microbatches: int) -> Plan:
    """The compute actions of a plan file, which must fit the run.

    Raises `ConfigError` with rank, action and reason.
    """
    try:
        content = read_json(read_text(path))
        plan = parse(content)
    except OSError as error:
        raise ConfigError("parallel.schedule", f"cannot read {path}: {error.strerror}", RIGHT) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("parallel.schedule", f"{path} is no plan: {error}", RIGHT) from None
    if len(plan.actions) != ranks:
        raise ConfigError(
            "parallel.schedule",
            f"{path} is for {len(plan.actions)} ranks, not {ranks}",
            f"{len(plan.actions)} stages",
        )
    try:
        validate(lower(plan), microbatches)
    except ValueError as error:
        right = f"a plan of {microbatches} microbatches that runs to its end"
        raise ConfigError("parallel.schedule", f"{path}: {error}", right) from None
    return plan


def parse(content: Any) -> Plan:
    """A plan from its JSON value. Raises `ValueError`, which says what is wrong."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"it must be an object with version {VERSION}")
    placement, actions = (_lists(name, content.get(name)) for name in ("placement", "actions"))
    if not all(type(stage) is int for row in placement for stage in row):
        raise ValueError("placement must have stages, which are whole numbers")
    held = sorted(stage for row in placement for stage in row)
    if (
        not held
        or held != list(range(len(held)))
        or len({len(row) for row in placement}) != 1
        or len(placement) != len(actions)
    ):
        raise ValueError("each of the stages 0, 1, 2, … must have one place, and each rank as many")
    rows = (
        tuple(_action(rank, text, len(placement[rank])) for text in row) for rank, row in enumerate(actions)
    )
    return Plan(tuple(rows), tuple(map(tuple, placement)))


def _lists(name: str, rows: Any) -> list[list[Any]]:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{name} must be a list of a list for each rank")
    return rows


def _action(rank: int, text: Any, chunks: int) -> Action:
    found = re.fullmatch(r"([FBIW])(\d{1,6})\.(\d{1,6})", text, re.ASCII) if isinstance(text, str) else None
    if found is None or int(found[3]) >= chunks:
        raise ValueError(
            f"pp rank {rank} has the action {json.dumps(text)}, which is none like F0.0 (F, B, I or W; "
            "microbatch; chunk)"
        )
    return Action(LETTERS[found[1]], int(found[2]), int(found[3]))


def write_plan(option: str, path: str, plan: Plan) -> None:
    """Writes the compute actions of a plan.

    Raises `ConfigError`, naming the option, if the path cannot be written.
    """
    letters = {op: letter for letter, op in LETTERS.items()}
    rows = [
        [f"{letters[a.op]}{a.microbatch}.{a.chunk}" for a in actions if a.op in COMPUTE]
        for actions in plan.actions
    ]
    write_json(option, path, {"version": VERSION, "placement": plan.placement, "actions": rows})
