"""Checkpoints staged from a real GPU: copied beside the device's work, and before the next update."""

import pytest
import torch

from megacore.checkpoint import Reader, Saver
from megacore.distributed.shard import Shard
from tests.checkpoints import Alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_what_is_saved_is_what_was_there_before_the_update(tmp_path):
    """The update is queued right behind the save: with nothing to hold it, it
    would overtake the copy of 1 GiB.
    """
    device = torch.device("cuda")
    whole = torch.randn(2**28, device=device)
    expected = whole.cpu()
    saver = Saver(tmp_path, Alone(), background=True, device=device)
    for step in (1, 2):
        saver.start(step, {"w": (whole, Shard((2**28,)))}, {})
        saver.hold_update()
        whole.mul_(2.0)
        saved = saver.finish()
        assert torch.equal(Reader(saved.path).read("w", Shard((2**28,))), expected)
        expected *= 2.0


def test_staging_memory_is_pinned_and_the_host_does_not_wait():
    from megacore.checkpoint.saver import Staging

    device = torch.device("cuda")
    staging, tensor = Staging(device), torch.randn(2**28, device=device)
    staging.copy([tensor])
    staging.wait()
    assert staging.buffer.is_pinned()
    torch.cuda._sleep(10**9)  # the device is busy for a while
    copied = staging.copy([tensor])
    assert not staging.copied.query(), "the host waited for the copy"
    staging.wait()
    assert torch.equal(copied[0], tensor.cpu())
