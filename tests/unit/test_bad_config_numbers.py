"""Every number of the schema at its extremes: refused in one line, or a run that
starts and steps once, in seconds.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import Config
from megacore.errors import UserError
from megacore.tools.choices.run import within_memory
from megacore.tools.settings.load import referred
from megacore.tools.stop_request import StopRequest
from megacore.train.trainer import Trainer
from tests.bad_inputs import SCRIPTS, bounded

EXTREMES: list[Any] = [
    10**12,
    5e-324,
    0,
    -1,
    1e300,
    -1e300,
    10**400,
    float("nan"),
    float("inf"),
    True,
    "1",
    [1],
]
SCHEMA = Config.model_json_schema()


def numbers(schema: dict[str, Any]) -> bool:
    """Whether a part of the schema takes a number."""
    return schema.get("type") in ("integer", "number") or any(map(numbers, schema.get("anyOf", [])))


def sections(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The kinds of object that a part of the schema takes."""
    options = schema.get("anyOf", []) + schema.get("oneOf", [])
    return (
        [referred(schema, SCHEMA)]
        if "$ref" in schema
        else [found for option in options for found in sections(option)]
    )


def keys() -> list[tuple[str, dict[str, Any]]]:
    """Every number's key, and for one inside an object the object with right numbers beside it."""
    found = []
    for name, part in SCHEMA["properties"].items():
        for key, schema in referred(part, SCHEMA)["properties"].items():
            found += [(f"{name}.{key}", {})] if numbers(schema) else []
            for inner in sections(schema):
                right = {
                    k: s.get("const", 2 ** -(i % 3))
                    for i, (k, s) in enumerate(inner["properties"].items())
                    if k in inner["required"]
                }
                right = {k: 16 if k.startswith("original") else value for k, value in right.items()}
                found += [
                    (f"{name}.{key}", {"": k, **right}) for k, s in inner["properties"].items() if numbers(s)
                ]
    return found


KEYS = keys()


@pytest.mark.parametrize(
    ("key", "beside"), KEYS, ids=[" ".join([key, beside.get("", "")]) for key, beside in KEYS]
)
def test_a_number_at_its_extremes(
    key: str,
    beside: dict[str, Any],
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A script that hangs, takes all memory or ends in a traceback, or a run that computes with
    infinities from its first step on.
    """
    monkeypatch.setattr(Trainer, "save", lambda trainer: None)
    monkeypatch.setattr(Trainer, "must_stop", property(lambda trainer: trainer.step > 0))
    # which would end this process
    monkeypatch.setattr("megacore.tools.diagnosis.guardians.fail", lambda error, *rest: None)
    monkeypatch.setattr(StopRequest, "__enter__", lambda request: request)
    monkeypatch.setattr(StopRequest, "__exit__", lambda request, *_: None)
    name, ran = beside.get(""), False
    for number, value in enumerate(EXTREMES):
        given = value if name is None else {k: v for k, v in beside.items() if k} | {name: value}
        words = [f"{key}={json.dumps(given)}", f"log.dir={tmp_path / str(number)}", "log.tensorboard=false"]
        # where there are many steps, `auto` measures for seconds whether that pays
        words += ["train.compile=false"]
        # one of those that are taken is enough to run
        words += ["model.position=rope"] * bool(name) + ["--print-config"] * ran

        try:
            with bounded():
                status = SCRIPTS["pretrain"](["--config", str(tree / "config.json"), *words])
        except UserError as error:
            # The longest lists the keys of all kinds of model.rope_scaling.
            assert "\n" not in str(error) and len(str(error)) < 700
        else:
            assert status in (0, 75)
            ran = True


def test_a_model_that_no_memory_holds(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the bound of a tensor's elements, and beyond what any process can address: it
    ended in the allocator's traceback.
    """
    # which would end this process
    monkeypatch.setattr("megacore.tools.diagnosis.guardians.fail", lambda error, *rest: None)
    with pytest.raises(
        UserError,
        match=r"config error: model: a rank has no memory for \d{15,} bytes more \(smaller sizes, or a "
        r"layout",
    ):
        huge = [f"model.hidden_size={2**20}", f"model.ffn_size={2**27}"]
        SCRIPTS["pretrain"](["--config", str(tree / "config.json"), *huge, f"log.dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match="no memory for 20.00 GiB more"), within_memory():
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
        )
    with pytest.raises(RuntimeError, match="^another$"), within_memory():
        raise RuntimeError("another")
