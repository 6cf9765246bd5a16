"""Windows and caps of attention's scores: in parts, in training and where text is written, against
the formula on whole sequences.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.context_parallel import attention, scored
from megacore.context_parallel.attention import Sequences
from megacore.context_parallel.scored import Scoring, scored_parts
from megacore.context_parallel.sharding import Documents, Run, runs_by_rank
from megacore.distributed.communicator import SOLO
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.model.stage import Stage
from megacore.tools.choices.flops import block_flops, seen_pairs
from megacore.tools.choices.measured import cost_of
from megacore.tools.text.cache import KeyValueCache
from tests.attention_checks import HEADS, KV_HEADS, SCALE, inputs
from tests.unit.test_model_settings import built, config_of

SEQ = 24
DOCUMENTS = ((0, 1, 3, SEQ), (0, SEQ - 1, SEQ))
SCORINGS = [Scoring(5), Scoring(1), Scoring(99), Scoring(cap=0.5), Scoring(7, 0.5)]


def seen_pairwise(documents: Documents | None, window: int | None) -> Tensor:
    """Which token sees which, written out pair by pair: ``[batch, 1, seq, seq]``."""
    seen = torch.zeros(2, 1, SEQ, SEQ, dtype=torch.bool)
    for row in range(2):
        bounds = documents[row] if documents else (0, SEQ)
        for q in range(SEQ):
            first = max(bound for bound in bounds if bound <= q)
            for k in range(max(first, q - (window or SEQ) + 1), q + 1):
                seen[row, 0, q, k] = True
    return seen


def by_formula(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, scoring: Scoring) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * SCALE
    if scoring.cap is not None:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    return scores.masked_fill(~seen_pairwise(documents, scoring.window), float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("step", [1, 4, 512])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_parts_equal_the_formula(
    scoring: Scoring, documents: Documents | None, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the queries of a part are few, so that windows end in other parts."""
    monkeypatch.setattr(scored, "STEP", step)
    *whole, grad = inputs(2, SEQ, 8)
    ours, right = ([x.clone().requires_grad_() for x in whole] for _ in range(2))
    out = attention.attend(*ours, Sequences(SEQ, SOLO, "gather", documents), SCALE, scoring)
    expected = by_formula(*right, documents, scoring)
    out.backward(grad)
    expected.backward(grad)
    for a, b in [(out, expected), *((a.grad, b.grad) for a, b in zip(ours, right, strict=True))]:
        assert float((a - b).detach().abs().max()) < 1e-13  # type: ignore[operator]


@dataclass(frozen=True)
class Alone:
    """What a ring of one rank gets from the rank before: its own."""

    received: Tensor

    def take(self) -> Tensor:
        return self.received


@pytest.mark.parametrize("method", attention.METHODS)
def test_gradients_of_many_parts_are_added_up_in_fp32(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is in a part for every few queries: added up in bf16, its gradient would lose a
    digit with the length of the text.
    """
    monkeypatch.setattr(scored, "STEP", 2)
    monkeypatch.setattr(attention, "pass_on", lambda x, group: Alone(x))
    for name in ("by_heads", "by_tokens"):
        monkeypatch.setattr(attention, name, lambda x, sequences: x)
    monkeypatch.setattr(attention, "gathered", lambda k, v, sequences: (k, v))
    monkeypatch.setattr(attention, "reduce_scatter", lambda x, group: x)
    drawn = [x.bfloat16() for x in inputs(1, 384, 8)]

    def gradients(apply: Any, dtype: torch.dtype) -> list[Tensor]:
        own = [x.to(dtype).requires_grad_() for x in drawn[:3]]
        out = apply(*own, Sequences(384, SOLO, method), SCALE, Scoring(cap=5.0))
        return [gradient.float() for gradient in torch.autograd.grad(out, own, drawn[3].to(dtype))]

    exact = gradients(attention.attend, torch.float32)
    errors = [
        [float((a - b).norm() / b.norm()) for a, b in zip(gradients(f, torch.bfloat16), exact, strict=True)]
        for f in (attention.METHODS[method].apply, attention.attend)
    ]
    assert all(own < 1.2 * usual for own, usual in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("step", [1, 4, 512])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_each_pair_is_in_one_part(
    documents: Documents | None, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every rank's queries and every rank's keys, as a ring meets them: a key lost at a shard's
    edge, or counted twice, shows here.
    """
    monkeypatch.setattr(scored, "STEP", step)
    met = torch.zeros(2, 1, SEQ, SEQ, dtype=torch.int64)
    shards = runs_by_rank(SEQ, 3, None)
    for queries in shards:
        for keys in shards:
            for part in scored_parts(queries, keys, documents, Scoring(5)):
                at = [positions(runs)[own] for runs, own in ((queries, part.queries), (keys, part.keys))]
                behind = torch.arange(part.shift, part.shift + len(at[0]))[:, None] - torch.arange(len(at[1]))
                assert torch.equal(behind, at[0][:, None] - at[1]), (
                    "a part counts from its first query and key"
                )
                seen = part.scoring.sees(behind)
                assert seen.any(1).all(), "a query without a key has no softmax"
                rows = range(2) if part.row is None else [part.row]
                for row in rows:
                    met[row, 0, at[0][:, None], at[1]] += seen.long()
    assert torch.equal(met, seen_pairwise(documents, 5).long())


def positions(runs: tuple[Run, ...]) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


MODELS: dict[str, dict[str, Any]] = {
    "window": {"window": 4},
    "one token": {"window": 1, "global_every": 2},
    "every second block global": {"window": 3, "global_every": 2, "position": "rope"},
    "two rotary tables": {"window": 3, "global_every": 2, "position": "rope", "window_rope_theta": 3.0},
    "cap": {"attention_cap": 0.05},
    "all": {"window": 4, "global_every": 3, "attention_cap": 0.05, "logit_cap": 0.5, "num_kv_heads": 1},
}


@torch.no_grad()
def written(stage: Stage, tokens: Tensor, prompt: int) -> tuple[Tensor, KeyValueCache]:
    """The logits of every token, the first ones read together and the others one by one."""
    cache, found = KeyValueCache(1, 12), []
    for piece in tokens.split([prompt, *[1] * (tokens.shape[1] - prompt)], 1):
        found.append(stage.logits(stage({}, Microbatch(piece), cache)[0]["hidden"]))
    return torch.cat(found), cache


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_text_is_written_as_it_is_read(name: str, attention: str) -> None:
    """A cap or a window that decoding forgets gives other text than the model that was trained."""
    stage = built(attention=attention, **MODELS[name]).eval()
    tokens = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole = stage.logits(stage.hidden(tokens))
    for prompt in (1, 7, 12):
        found, cache = written(stage, tokens, prompt)
        torch.testing.assert_close(found, whole, rtol=1e-11, atol=1e-11)
    sizes = [cache._layers[block.attention][0].shape[2] for block in stage.inner]  # type: ignore[index, union-attr, unused-ignore]
    windows = [stage.config.model.window_of(block) for block in range(3)]
    assert sizes == [12 if window is None else window for window in windows], (
        "the next token's window, and one that may be taken back"
    )


def test_windows_grow_with_the_steps() -> None:
    """Each block with a window computes, and writes text, as a model with the window of that step;
    behind the schedule with the last.
    """
    growing = {"window_schedule": [[2, 1], [5, 3]], "window": 6, "global_every": 2}
    stage, tokens = built(**growing).eval(), torch.arange(12)[None]
    for step, window in ((1, 1), (2, 1), (3, 3), (5, 3), (6, 6), (99, 6)):
        stage.at_step(step)
        plain = built(window=window, global_every=2).eval()
        for found in (stage.logits(stage.hidden(tokens)), written(stage, tokens, 4)[0]):
            torch.testing.assert_close(found, plain.logits(plain.hidden(tokens)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("name", "forgotten"), [("cap", "cap"), ("window", "window")])
def test_a_cap_or_window_missing_in_decoding_shows(
    name: str, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the comparison above would notice."""
    stage = built(**MODELS[name]).eval()
    tokens = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(3))
    right = written(stage, tokens, 5)[0]
    for block in stage.inner:
        monkeypatch.setattr(block.attention, "scoring", None)
    wrong = written(stage, tokens, 5)[0]
    assert float((right - wrong).abs().max()) > 1e-4 * float(right.abs().max())


def test_logits_are_capped() -> None:
    tokens = torch.arange(12)[None]
    plain, capped = (built(**own) for own in ({}, {"logit_cap": 0.3}))
    expected = 0.3 * torch.tanh(plain.logits(plain.hidden(tokens)) / 0.3)
    torch.testing.assert_close(capped.logits(capped.hidden(tokens)), expected, rtol=1e-12, atol=1e-12)


def test_masked_pairs_are_no_work() -> None:
    """Counted by the formula, and by the products that a block of a long sequence really executes."""
    assert [seen_pairs(6, window) for window in (None, 9, 3, 1)] == [21, 21, 15, 6]
    without, windowed, mixed = (
        block_flops(config_of(**own), True) for own in ({}, {"window": 4}, {"window": 4, "global_every": 3})
    )
    assert without - windowed == 3 / 2 * (without - mixed) > 0

    def products(**model: Any) -> int:
        config = config_of(attention="sdpa", **model)
        train = config.train.model_copy(update={"seq_len": 8192, "precision": "bf16"})
        config = config.model_copy(
            update={"train": train, "model": config.model.model_copy(update={"max_positions": 8192})}
        )
        return sum(
            2 * n * a * b * c
            for work in cost_of(config, 1).work.values()
            for (a, b, c), n in work.products.items()
        )

    everything, narrow = (products(window=window) for window in (8192, 512))
    assert narrow < everything / 4


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"window_schedule": [[3, 2]]}, "model.window_schedule"),
        ({"window_schedule": [[3, 4]], "window": 4}, "model.window_schedule"),
        ({"window_schedule": [[3, 2], [2, 3]], "window": 4}, "model.window_schedule"),
        ({"head_bias": True, "chunked_loss": True}, "model.head_bias"),
        ({"head_bias": True, "logit_scale": 0.5}, "model.head_bias"),
        ({"qk_norm_heads": "all"}, "model.qk_norm_heads"),
        ({"position": "rope", "window_rope_theta": 500.0}, "model.window_rope_theta"),
        ({"global_every": 2}, "model.global_every"),
        ({"logit_cap": 3.0, "chunked_loss": True}, "model.chunked_loss"),
    ],
)
def test_refusals(model: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(**model)
    assert error.value.where == key
