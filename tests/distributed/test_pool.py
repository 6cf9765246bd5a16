"""The worker pool itself: a fault in a rank must reach the test, and must not reach the next test."""

import os
import time

import pytest
import torch

from megacore.tools.verify import line_workers
from tests.pool import MAX_WORLD, PATIENCE, RankError, RankTimeout


def summed_rank(offset: int) -> tuple[int, torch.Tensor, int]:
    torch.distributed.init_process_group("gloo")
    total = torch.tensor([float(torch.distributed.get_rank() + offset)])
    torch.distributed.all_reduce(total)
    return int(os.environ["LOCAL_RANK"]), total, os.getpid()  # the group is left behind on purpose


def raise_on(bad_rank: int) -> None:
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == bad_rank:
        raise ZeroDivisionError("planted")
    torch.distributed.barrier()


def hang_on(bad_rank: int) -> None:
    while int(os.environ["RANK"]) == bad_rank:
        time.sleep(1)


def die_on(bad_rank: int) -> None:
    if int(os.environ["RANK"]) == bad_rank:
        os._exit(7)


def dirty_the_process() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)


def state_of_process() -> tuple[bool, str, torch.dtype, int, bool]:
    return (
        "LEFT_BEHIND" in os.environ,
        os.getcwd(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.distributed.is_initialized(),
    )


def unpicklable() -> object:
    return lambda: None


def test_results_come_by_rank_and_workers_are_reused(run_ranks):
    """If a worker were restarted for each test, or kept its group, the second
    call would differ in pids or fail.
    """
    first, second = run_ranks(3, summed_rank, 1), run_ranks(2, summed_rank, 10)
    assert [(rank, total.item()) for rank, total, _ in first] == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert [(rank, total.item()) for rank, total, _ in second] == [(0, 21.0), (1, 21.0)]
    assert [pid for *_, pid in second] == [pid for *_, pid in first[:2]]


def test_a_raising_rank_gives_its_own_traceback(run_ranks):
    """Planted fault: the cause is reported, not the peers that lost their connection because of it."""
    with pytest.raises(
        RankError, match=r"rank 1 failed:(?s:.*)in raise_on(?s:.*)ZeroDivisionError: planted"
    ) as caught:
        run_ranks(3, raise_on, 1)
    assert caught.value.rank == 1
    assert [total.item() for _, total, _ in run_ranks(3, summed_rank, 0)] == [3.0] * 3


def test_a_hanging_rank_is_named(run_ranks, monkeypatch):
    """Planted fault: without the timeout the whole suite would stand still, and
    without the name nobody knew where.
    """
    wait = line_workers.wait

    def wait_until_late(workers, seconds):
        """Waits for the first answer however late it is, and finds the time over after it."""
        if seconds > 2.0:  # for workers to start
            return wait(workers, seconds)
        return wait(workers, PATIENCE) if len(workers) > 1 else []

    monkeypatch.setattr(line_workers, "wait", wait_until_late)
    with pytest.raises(RankTimeout, match=r"ranks \[1\] of 2 did not return within 2 s"):
        run_ranks(2, hang_on, 1, timeout=2)
    assert len(run_ranks(2, summed_rank, 0)) == 2


def test_a_dead_worker_is_a_failure(run_ranks):
    """Planted fault: a rank that dies without a word (out of memory, segmentation
    fault) must not look like success.
    """
    with pytest.raises(RankError, match="rank 0 failed:\nthe process ended with exit code 7"):
        run_ranks(2, die_on, 0)


def test_a_result_that_cannot_travel_is_a_failure_of_its_rank(run_ranks):
    with pytest.raises(RankError, match=r"(?i)pickle"):
        run_ranks(1, unpicklable)


def test_one_test_does_not_reach_the_next(run_ranks):
    """Environment, folder, default dtype and process group are as before for the
    next test in the same process.
    """
    before = run_ranks(1, state_of_process)
    run_ranks(1, dirty_the_process)
    assert run_ranks(1, state_of_process) == before
    assert before[0][2:] == (torch.float32, 1, False)


def test_world_beyond_the_pool_is_refused(run_ranks):
    with pytest.raises(AssertionError, match="at most"):
        run_ranks(MAX_WORLD + 1, state_of_process)
