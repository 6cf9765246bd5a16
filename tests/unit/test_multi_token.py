"""configs/forks/multi_token.py: which tokens are learned, the loss by plain PyTorch,
and texts written with guesses.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.forks import speculate
from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.config.source import source_of
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch, Samples
from megacore.model.stage import Stage
from megacore.tools.text.cache import KeyValueCache
from megacore.tools.text.decoding import Decoder
from megacore.tools.text.sampling import Sampler
from tests import forks, training
from tests.build import mesh_of, run_of
from tests.conversion import random_run

CPU = torch.device("cpu")
KINDS = {"module": {}, "heads": {"ahead_kind": "heads", "ahead": 2}}
WORDS, LENGTH = training.VOCAB_SIZE, 64


def config_of(folder: Path, kind: str, **model: object) -> Config:
    sizes = {"source": speculate.SOURCE, "position": "rope", **KINDS[kind], **model}
    path = training.write_config(
        folder, "unused", model=sizes, train={"precision": "fp64", "seq_len": LENGTH}
    )
    return run_of(path)


def stage_of(config: Config) -> Stage:
    """Drawn with large numbers, so that a text has many words."""
    return forks.perturbed(config, 0.3)


def test_no_target_is_in_another_document(tmp_path: Path) -> None:
    """A target that is rolled on across the end of a document, or of the sample: token by token,
    by what the next documents are.
    """
    source = source_of(config_of(tmp_path, "module"))
    assert source is not None
    text = np.arange(100, 117)
    document = np.repeat([0, 1, 2, 3], [5, 1, 7, 4])  # of the 17 tokens, of which the last is only a target
    bounds = (0, 5, 6, 13, 16)
    targets = np.where(document[1:] == document[:-1], text[1:], IGNORED)
    targets[8] = IGNORED  # what is not to be learned is no end of a document
    for count in (1, 2, 5):
        found = source.module.token_ahead(count, Samples(text[None, :-1], targets[None], (bounds,)))[0]
        for t in range(16):
            at = t + 1 + count
            learned = at < 17 and document[at] == document[t] and at != 9
            assert found[t] == (text[at] if learned else IGNORED), (count, t)
    assert (source.module.next_token(Samples(text[None, :-1], targets[None]))[0, :-1] == text[1:-1]).all()


def plain_loss(stage: Stage, hidden: Tensor, following: Tensor, wanted: Tensor) -> Tensor:
    """Of the module, with the weights of `stage`; its block is megacore's own, which other tests compare."""
    layer: Any = stage.inner[-1]
    x, e = hidden.flatten(0, 1), stage.before[0].embedding.weight[following.flatten()]
    x, e = (
        F.layer_norm(part, part.shape[-1:], norm.weight, norm.bias, norm.eps)
        for part, norm in zip((x, e), layer.norms, strict=True)
    )
    size = x.shape[1]
    x = x @ layer.mix[:, :size].T + e @ layer.mix[:, size:].T
    x = layer.block(x, stage.context(Microbatch(following)))
    x = F.layer_norm(x, x.shape[-1:], layer.norm.weight, layer.norm.bias, layer.norm.eps)
    return F.cross_entropy(
        x @ stage.before[0].embedding.weight.T, wanted.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def test_the_loss_of_the_module_is_the_papers(tmp_path: Path) -> None:
    """Token and hidden states swapped, a norm left out, a vector of the wrong token."""
    stage = stage_of(config_of(tmp_path, "module"))
    tokens, targets = torch.randint(WORDS, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    following, wanted = targets.clone(), torch.cat((targets[:, 1:], torch.full((3, 1), IGNORED)), 1)
    batch = Microbatch(tokens, targets, more={"next_token": following, "ahead_1": wanted})
    losses = stage({}, batch)[1]
    hidden = stage({}, Microbatch(tokens))[0]["hidden"].view(3, 16, -1)
    expected = plain_loss(stage, hidden, following, wanted)
    assert losses.keys() == {"ahead_1", "cross_entropy"}
    torch.testing.assert_close(losses["ahead_1"], expected, rtol=1e-12, atol=0)
    assert abs(plain_loss(stage, hidden, tokens, wanted) - expected) > 1


class KeepsAll(KeyValueCache):
    """The planted fault: what a wrong guess left is kept."""

    @property
    def length(self) -> int:  # type: ignore[override]
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        self._length = max(value, getattr(self, "_length", 0))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_do_not_change_the_text(
    tmp_path: Path, kind: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong guess that stays in the text or in a cache, also in one of a window;
    and a right one that is read twice.
    """
    config = config_of(tmp_path, kind, window=window)
    stage = stage_of(config).eval()
    prompt = [3, 1, 4, 1, 5]
    plain = list(Decoder([stage], mesh_of(config)).generate(prompt, 40, Sampler(0.0, WORDS, 1.0, 0, WORDS)))
    found = speculate.write(stage, prompt, 40)
    assert found.tokens[:40] == plain and len(set(plain)) > 3
    assert len(found.tokens) == found.passes + found.right and found.guessed == found.passes - 1
    layer: Any = next(layer for layer in stage.inner if hasattr(layer, "guess"))
    guesses = iter([*plain[1:], 0, 0])  # an oracle: every guess is right
    monkeypatch.setattr(layer, "logits", lambda x: F.one_hot(torch.tensor([oracle(guesses)]), WORDS))
    best = speculate.write(stage, prompt, 40)
    assert best.tokens[:40] == plain and best.right == best.guessed and best.passes <= 21
    monkeypatch.undo()
    monkeypatch.setattr(speculate, "KeyValueCache", KeepsAll)
    assert speculate.write(stage, prompt, 40).tokens[:40] != plain


def oracle(rest: Any) -> int:
    """The next token of the text, and one more is skipped: the model chooses it itself."""
    guess = next(rest)
    next(rest, None)
    return int(guess)


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    for model, told in (
        ({"ahead": 2}, "with one module"),
        ({"ahead_kind": "heads", "ahead": 5}, "leaves no block"),
    ):
        with pytest.raises(Exception, match=told):
            config_of(tmp_path, "module", **model)


@pytest.mark.parametrize("prompt", ["", "x" * 16])
def test_a_prompt_without_room_is_one_line(tmp_path: Path, prompt: str) -> None:
    """Of no token the model made a traceback, and of too many it silently wrote none."""
    random_run(
        tmp_path / "run", {"tokenizer": "bytes"}, source=speculate.SOURCE, vocab_size=256, num_layers=2
    )
    with pytest.raises(
        ConfigError,
        match=rf"--prompt: has {len(prompt)} tokens, and the model 16 positions \(1 to 15 tokens\)",
    ):
        speculate.main(["--checkpoint", str(tmp_path / "run"), "--prompt", prompt])
