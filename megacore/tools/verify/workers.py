"""The ranks of a proof, which run the code of one checkout; see `tools.verify.line_workers`."""

import os
import sys
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError
from megacore.tools.local_ranks import free_port, rank_environment
from megacore.tools.verify import line_workers as workers
from megacore.tools.verify.worker import PROTOCOL


class RankFailed(RuntimeError):
    """A rank raised, died or hung; the message is one line, `report` its traceback."""

    def __init__(self, rank: int, reason: str, report: str = "") -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.report = report


# the second in checkouts of November 2026 and before
WORKER = "megacore.tools.verify.worker", "megacore.verify.worker"


class ProofWorkers(workers.Workers):
    """Processes that run the code of one checkout. There are as many as the largest layout so far needs."""

    def __init__(self, checkout: Path) -> None:
        module = next(
            (name for name in WORKER if (checkout / f"{name.replace('.', '/')}.py").is_file()), None
        )
        if module is None:
            raise ConfigError(
                "--against",
                f"{checkout} is no checkout of megacore that has launch/verify.py",
                "the root of one",
            )
        self.checkout = checkout
        path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", module]
        super().__init__(lambda rank: workers.LineWorker(command, checkout, environment))

    def run(self, world: int, task: dict[str, Any], timeout: float = 300.0) -> None:
        """Gives `task` to ranks 0 … world − 1 and waits for all. Raises `RankFailed` with the first failure.

        Raises `ConfigError` if that is the user's mistake, such as a key that the checkout does not know.
        """
        try:
            for hello in self.grow(world):
                if hello["protocol"] != PROTOCOL:
                    wrong = (
                        f"{self.checkout} speaks version {hello['protocol']} of verify's protocol, "
                        f"and this one version {PROTOCOL}"
                    )
                    raise ConfigError("--against", wrong, "a checkout with the same version")
            port = free_port()
            # Ranks take turns on two hosts, so that data ranks of one host are no neighbours.
            hosts = [{"MEGACORE_HOST": f"host {rank // task.get('tensor', 1) % 2}"} for rank in range(world)]
            self.ask(
                [
                    task | {"environment": rank_environment(rank, world, port) | hosts[rank]}
                    for rank in range(world)
                ],
                timeout,
            )
        except BaseException as error:
            self.close()  # the others may wait for the one that failed
            if isinstance(error, workers.WorkerFailed):
                raise self._explained(error, world) from None
            raise

    def _explained(self, failure: workers.WorkerFailed, world: int) -> Exception:
        answer, silent = failure.answer, failure.silent
        if answer is None:
            return RankFailed(failure.rank, f"no answer in time, from {len(silent)} of {world} ranks")
        if "mistake" in answer:
            where, wrong, right = answer["mistake"]
            return ConfigError(where, f"{wrong}, says {self.checkout}", right)
        besides = f" (no answer from ranks {', '.join(map(str, silent))})" if silent else ""
        return RankFailed(failure.rank, answer["error"] + besides, answer.get("traceback", ""))
