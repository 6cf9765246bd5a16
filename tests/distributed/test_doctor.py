"""The hang doctor on real ranks: they hang for some seconds, and what it would have ended them with is what the test reads."""

import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from megacore.config import load
from megacore.distributed import comm
from megacore.distributed.mesh import SOLO, Mesh, pick_device
from megacore.distributed.place import place_from_environment
from megacore.survive import doctor as doctor_module
from megacore.survive.ledger import Ledger, line_of
from megacore.survive.noting import note_loader, note_mesh
from megacore.survive.verdict import Verdict
from megacore.train.loader import Loader
from tests import training

WATCH = 1.0  # seconds that are a hang here


def hanging_rank(config_path: str, fault: str, folder: str) -> dict[str, Any] | None:
    """Steps of tensor and world sums, in which the last rank does as `fault` says; returns the verdict that this rank was to end with."""
    place = place_from_environment()
    config = load(config_path, ["parallel.tensor=2"], place.world_size).config
    mesh = Mesh(config, place, pick_device(config, place))
    verdicts: list[Verdict] = []

    def end(self: doctor_module.Doctor, verdict: Verdict) -> None:
        verdicts.append(verdict)
        self.closed.set()

    doctor_module.Doctor._end = end  # type: ignore[method-assign]
    doctor_module.START_UP = 1.0
    dying = Path(folder) / "dying"

    def state_of(pid: int) -> str:
        return "Z" if dying.exists() and str(pid) == dying.read_text() and time.time() - dying.stat().st_mtime > 2 * WATCH else "S"

    doctor_module.process_state = state_of  # type: ignore[assignment]
    ledger = note_mesh(mesh)
    doctor = doctor_module.Doctor(mesh, ledger, WATCH, Path(folder))
    last = place.rank == place.world_size - 1
    x = torch.ones(3)
    for step in range(1, 4):
        ledger.step = step
        ledger.mark("forward", 0)
        if last and step == 2:
            if fault == "hang":
                time.sleep(3 * WATCH)
            elif fault == "dying":  # a killed process is not dead at once: it has memory to give back
                dying.write_text(str(os.getpid()))
                doctor.closed.set()
                time.sleep(4 * WATCH)
            elif fault == "slow":
                for _ in range(8):  # longer than the watch, but always on the way
                    time.sleep(WATCH / 4)
                    ledger.mark("forward", 1)
        comm.all_reduce(x, mesh.tp)
        comm.all_reduce(x, mesh.world)
    doctor.close()
    mesh.close()
    return asdict(verdicts[0]) if verdicts else None


def test_ranks_agree_on_who_holds_them_up(pool: Any, tmp_path: Path) -> None:
    config = training.write_config(tmp_path, "nothing")
    found = pool.run(4, hanging_rank, config, "hang", str(tmp_path))
    assert found[0] == found[1] == found[2] == found[3] and found[0] is not None, "all end with one verdict"
    assert (found[0]["cause"], found[0]["ranks"], found[0]["fatal"]) == ("python", [3], True)
    assert "(host " in found[0]["text"] and "pp 0, dp 1, tp 1) never entered tp all_reduce #2 of [3] float32" in found[0]["text"]
    assert "test_doctor.py" in found[0]["text"] and "(hanging_rank)" in found[0]["text"] and "rank 2 waits there" in found[0]["text"]


def test_a_slow_rank_is_left_alone(pool: Any, tmp_path: Path) -> None:
    """The others stand still for longer than the watch, because of a rank that does not."""
    config = training.write_config(tmp_path, "nothing")
    assert pool.run(4, hanging_rank, config, "slow", str(tmp_path)) == [None] * 4
    assert pool.run(4, hanging_rank, config, "none", str(tmp_path)) == [None] * 4


def test_a_rank_that_takes_its_time_to_die_is_dead(pool: Any, tmp_path: Path) -> None:
    """The others lose it, and publish how its process is, before it has given back its memory."""
    found = pool.run(4, hanging_rank, training.write_config(tmp_path, "nothing"), "dying", str(tmp_path))
    assert [(verdict["cause"], verdict["ranks"]) for verdict in found[:3]] == [("dead", [3])] * 3


def test_a_hung_reader_is_named_by_its_own_line(tmp_path: Path) -> None:
    """The main thread only waits for it, in a line that says nothing of the file system or the data source at fault."""
    config = load(training.write_config(tmp_path, "nothing"), [], 1).config
    mesh, ledger = SimpleNamespace(sample_group=SOLO, device=torch.device("cpu")), Ledger()
    gone = threading.Event()

    class Remote:
        def samples(self, indices: np.ndarray) -> np.ndarray:
            if indices[0] >= config.train.global_batch_size:  # of the step read ahead
                gone.wait(30)
            return np.zeros((len(indices), config.train.seq_len + 1), dtype=np.int64)

    loader = Loader(config, cast(Mesh, mesh), Remote())
    note_loader(loader, ledger)
    loader.step(1)
    main = threading.Thread(target=loader.step, args=(2,))
    main.start()
    deadline = time.monotonic() + 10
    while ledger.worker is None and time.monotonic() < deadline:
        time.sleep(0.01)
    where = line_of(ledger.worker or 0)
    gone.set()
    main.join()
    assert "test_doctor.py" in where and where.endswith("(samples)")
    assert ledger.worker is None
