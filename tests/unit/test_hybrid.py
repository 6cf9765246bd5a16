"""configs/forks/hybrid.py against the recurrence a token at a time, which knows nothing of
chunks; and texts that it writes.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.data.packing import document_positions
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.tools.text.cache import DividedCache, KeyValueCache
from tests import training
from tests.build import run_of
from tests.forks import perturbed
from tests.unit.test_generate import worst_logits

FORK = Path(__file__).parents[2] / "configs/forks/hybrid.py"
SIZES = {"norm": "rmsnorm", "position": "rope", "bias": False, "attention_every": 3, "chunk": 5}
DOCUMENTS = ((0, 1, 7, 16), (0, 4, 5, 16), (0, 16))
TOLERANCE = 1e-10  # fp64, relative to the largest number of a tensor: some thousand terms in another order
LEAKS = (
    # from chunk to chunk
    ("of_state = total.where(document == 0, -torch.inf).exp()", "of_state = total.exp()"),
    # within a chunk
    ("seen = (document == document.mT).tril()", "seen = torch.ones_like(total @ total.mT).tril() > 0"),
    ("shifted.where(places >= back - i, 0.0)", "shifted"),  # by the convolution
)


def config_of(folder: Path, *edits: tuple[str, str], **model: object) -> Config:
    text = FORK.read_text(encoding="utf-8")
    for before, after in edits:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "hybrid.py").write_text(text, encoding="utf-8")
    sizes = {"source": str(folder / "hybrid.py"), **SIZES, **model}
    return run_of(training.write_config(folder, "unused", model=sizes, train={"precision": "fp64"}))


def plain(w: dict[str, Tensor], x: Tensor, heads: int, documents: tuple[tuple[int, ...], ...]) -> Tensor:
    """``[batch, tokens, hidden]`` → what a gated DeltaNet adds, by the paper's formula, a
    head and a token after the other.
    """
    head, found = x.shape[2] // heads, []
    for row, bounds in zip(x, documents, strict=True):
        for begin, end in pairwise(bounds):
            of_heads = []
            for h in range(heads):
                state, weight, read = torch.zeros(head, head, dtype=x.dtype), w["into.weight"][h], []
                rows = row[begin:end] @ weight.T
                for t in range(end - begin):
                    taps = [
                        rows[t - 3 + i, : 3 * head] * w["mix"][h, :, i] for i in range(4) if t - 3 + i >= 0
                    ]
                    q, k, v = F.silu(torch.stack(taps).sum(0)).split(head)
                    q, k = q / q.norm() / head**0.5, k / k.norm()
                    write = rows[t, -2].sigmoid()
                    keep = torch.exp(-w["rate"][h].exp() * (1 + (rows[t, -1] + w["rest"][h]).exp()).log())
                    state = keep * (
                        state @ (torch.eye(head, dtype=x.dtype) - write * torch.outer(k, k))
                    ) + write * torch.outer(v, k)
                    y = state @ q
                    y = y / (y.square().mean() + 1e-5).sqrt() * w["norm.weight"]
                    read.append(y * F.silu(rows[t, 3 * head : 4 * head]))
                of_heads.append(torch.stack(read))
            found.append(torch.cat(of_heads, 1) @ w["output.weight"].T)
    return torch.cat(found).view(x.shape)


def worst(folder: Path, *edits: tuple[str, str], documents: tuple[tuple[int, ...], ...] = DOCUMENTS) -> float:
    """The largest difference of outputs and gradients from the plain formula."""
    config = config_of(folder, *edits)
    stage = perturbed(config, 0.5)
    layer: Any = stage.inner[0]
    positions = torch.stack([torch.from_numpy(document_positions(bounds)) for bounds in documents])
    batch = Microbatch(torch.zeros(3, 16, dtype=torch.int64), documents=documents, positions=positions)
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, 3, 16, 32, generator=generator, dtype=torch.float64)
    names = ("x", *dict(layer.attention.named_parameters()))
    tensors = [x, *layer.attention.parameters()]
    one, other = ([t.detach().clone().requires_grad_() for t in tensors] for _ in range(2))
    whole = torch.func.functional_call(
        layer.attention,
        dict(zip(names[1:], one[1:], strict=True)),
        (one[0].flatten(0, 1), stage.context(batch)),
    )
    expected = plain(
        dict(zip(names[1:], other[1:], strict=True)), other[0], config.model.num_heads, documents
    ).flatten(0, 1)
    pairs = [(whole, expected)]
    for y, taken in ((whole, one), (expected, other)):
        (y * grad.flatten(0, 1)).sum().backward()
        assert all(t.grad is not None and t.grad.abs().max() > 1e-3 for t in taken)
    pairs += [(a.grad, b.grad) for a, b in zip(one, other, strict=True)]  # type: ignore[misc]
    return max(float((a.detach() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)


def test_chunks_are_the_recurrence(tmp_path: Path) -> None:
    """A chunk's last tokens, which fill none; a decay counted twice; documents of one token, and
    those that begin within a chunk.
    """
    assert worst(tmp_path) < TOLERANCE


@pytest.mark.parametrize("leak", LEAKS)
def test_a_state_that_leaks_over_documents_is_caught(tmp_path: Path, leak: tuple[str, str]) -> None:
    assert worst(tmp_path, leak) > 1e-3
    assert worst(tmp_path, leak, documents=((0, 16),) * 3) < TOLERANCE


def test_a_text_is_written_as_a_whole_pass_would(tmp_path: Path) -> None:
    """A prompt, single tokens, and several at once, which are no whole chunk."""
    assert worst_logits(config_of(tmp_path, init_std=0.2), (5, 1, 1, 3, 1, 1)) < 1e-12


def test_a_state_needs_no_more_memory_for_a_longer_text(tmp_path: Path) -> None:
    """Four of five blocks keep a state; it cannot take a token back, and no padding
    of a divided prompt may be in it.
    """
    config = config_of(tmp_path)
    stage, cache, held = perturbed(config, 0.2).eval(), KeyValueCache(1, 16), []
    with torch.no_grad():
        for new in (3, 1, 12):
            stage({}, Microbatch(torch.zeros(1, new, dtype=torch.int64)), cache)
            states = [
                cache.state(layer.attention) for layer in stage.inner if hasattr(layer.attention, "mix")
            ]  # type: ignore[union-attr]
            held.append([x.untyped_storage().nbytes() for state in states if state for x in state])
    assert held[0] == held[1] == held[2] == [4 * 3 * 24 * 8, 4 * 8 * 8 * 8] * 4  # heads of 8
    cache.length -= 1
    with pytest.raises(AssertionError, match="taken back"):
        stage({}, Microbatch(torch.zeros(1, 1, dtype=torch.int64)), cache)
    with pytest.raises(ConfigError, match="one context rank"):
        DividedCache(1, 16, stage.cp, "gather").state(stage)
