"""Random numbers depend on what they are for: any rank draws the part of a tensor, or
the mask, that one process would.
"""

import pytest
import torch

from megacore import rng
from megacore.rng import key_of, normal_runs


# At and around the size of a run, where the last one may be shorter than the 16 numbers that are made
# together.
@pytest.mark.parametrize("size", [1, 15, 16, 17, 32, 63, 64, 79, 80, 81, 100, 1000])
@pytest.mark.parametrize("run", [16, 64])
def test_runs_are_the_bits_of_one_tensor(monkeypatch: pytest.MonkeyPatch, size: int, run: int) -> None:
    """Weights would depend on how much memory a rank draws with; and those of every
    run so far are of whole blocks.
    """
    monkeypatch.setattr(rng, "RUN", run)
    whole = torch.empty(size).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(key_of("w")))
    for stop in {1, size // 2 + 1, size}:
        runs = list(normal_runs(("w",), size, 0.02, stop))
        drawn = torch.cat([numbers for _, numbers in runs])
        assert [first for first, _ in runs] == [
            0,
            *torch.tensor([len(numbers) for _, numbers in runs]).cumsum(0).tolist(),
        ][:-1]
        assert stop <= len(drawn) < max(stop + run + 16, 32)
        assert torch.equal(drawn, whole[: len(drawn)])


def test_keys_do_not_run_together() -> None:
    """("a", 12) and ("a1", 2), or 1 and "1", would share their numbers if parts were only joined."""
    parts: list[tuple[object, ...]] = [("a", 12), ("a1", 2), ("a", 1, 2), ("a", "12"), (("a", 12),), ("a12",)]
    keys = [key_of(*p) for p in parts]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys), "a generator's seed must fit"


def test_a_key_is_the_same_in_every_process() -> None:
    """Python's own `hash` of a string is another in each process: ranks would draw different masks.

    The value is fixed for ever, or an old run would resume with other dropout.
    """
    assert key_of(0, "embedding.weight", 64) == 201941048195853859
