"""The process of a rank: `python -m megacore.tools.verify.worker` reads a task from each line of
stdin as JSON, and answers on stdout.

It runs the code of the checkout in which it is started, so that two versions can be compared.
"""

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError, UserError
from megacore.tools.cli import exit_with

PROTOCOL = 1  # both sides of the pipe must agree on it; they may be of different versions of the code


def serve(argv: list[str]) -> None:
    """Answers tasks until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the model must not be taken for an answer
    import torch

    # These imports take seconds: now rather than in the first task.
    from megacore.tools.verify import record, reference  # noqa: F401
    from megacore.tools.verify.self_check import run  # noqa: F401

    torch.set_num_threads(1)
    print(json.dumps({"protocol": PROTOCOL}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        os.environ.update(task["environment"])
        # so that draws from PyTorch's generator are the same in another version of the code
        torch.manual_seed(0)
        try:
            with planted(task["plant"]):
                perform(task)
            answer: dict[str, Any] = {"error": None, "finished": time.monotonic()}
        except UserError as error:
            answer = {
                "error": str(error),
                "mistake": [error.where, error.wrong, error.right],
                "finished": time.monotonic(),
            }
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            answer = {"error": reason, "traceback": traceback.format_exc(), "finished": time.monotonic()}
        # before the group is destroyed: the peers' errors come after the cause
        print(json.dumps(answer), file=answers, flush=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def perform(task: dict[str, Any]) -> None:
    """Runs a task."""
    from megacore.tools.settings.load import load
    from megacore.tools.verify.coordinate_statistics import run_measured
    from megacore.tools.verify.record import run_layout
    from megacore.tools.verify.reference import PLAIN, run_reference
    from megacore.tools.verify.self_check.case import EXACT
    from megacore.tools.verify.self_check.export import check_export
    from megacore.tools.verify.self_check.run import CHECKS, self_check

    out = Path(task["out"])
    if task["kind"] == "coordinates":
        run_measured(task["config"], task["overrides"], out)
    elif task["kind"] in ("self_check", "export_check"):
        checks = CHECKS if task["kind"] == "self_check" else (check_export,)
        self_check(load(task["config"], [*EXACT]).config, out, checks).write(out)
    elif task["kind"] == "reference":
        config, unmoved = load(task["config"], [*PLAIN]).config, task["unmoved"]
        run_reference(
            config,
            out,
            task["rounding"],
            task["traced_step"],
            None if unmoved is None else Path(unmoved),
            with_untouched=task["with_untouched"],
        )
    else:
        run_layout(task["config"], task["overrides"], out, task["traced_step"], Path(task["reference"]))


def planted(plant: str | None) -> contextlib.AbstractContextManager[Any]:
    """The context manager that `module:function` makes. Around a task it plants a mistake on purpose.

    Raises `ConfigError` if there is no such function.
    """
    if plant is None:
        return contextlib.nullcontext()
    module, _, function = plant.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        wrong = f"{plant} cannot be found: {error}"
        raise ConfigError(
            "--plant", wrong, "module:function, such as tests.faults.tensor:embedding_unsummed"
        ) from error
    return make()


if __name__ == "__main__":
    exit_with(serve)
