"""configs/forks/speedrun.py against the same model in a page of plain PyTorch,
which knows nothing of megacore.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import Config
from megacore.model.batch import Microbatch
from tests import training
from tests.build import run_of
from tests.forks import perturbed
from tests.unit.test_generate import worst_logits

FORK = Path(__file__).parents[2] / "configs/forks/speedrun.py"
SIZES = {"source": str(FORK), "norm": "rmsnorm", "position": "rope", "bias": False, "tie_embeddings": False}
WINDOWS = {"window": 5, "full_every": 3, "valued": 2, "logit_cap": 2.0}
# fp64, relative to the largest gradient of the parameter: some thousand terms in another order
TOLERANCE = 1e-10


def config_of(folder: Path, **model: object) -> Config:
    path = training.write_config(
        folder, "unused", model={**SIZES, **WINDOWS, **model}, train={"precision": "fp64"}
    )
    return run_of(path)


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def turned(x: Tensor, theta: float) -> Tensor:
    """``[batch, heads, tokens, head]``, each pair of features (i, i + half) turned as a complex number."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), -1)


def plain_loss(
    w: dict[str, Tensor], config: Config, tokens: Tensor, targets: Tensor, forget_skips: bool = False
) -> Tensor:
    """The mean loss of the weights `w`, written from the papers. `forget_skips`: a mistake."""
    model, count = config.model, config.model.num_layers
    heads, head = model.num_heads, model.hidden_size // model.num_heads
    x = first = rms(w["embedding.weight"][tokens])
    behind = torch.arange(tokens.shape[1])[:, None] - torch.arange(tokens.shape[1])
    kept: list[Tensor] = []
    for i in range(count):
        own = {
            name.removeprefix(f"blocks.{i}."): value
            for name, value in w.items()
            if name.startswith(f"blocks.{i}.")
        }
        x = own["scales.0"] * x + own["scales.1"] * first
        if i >= count - count // 2:
            skip = kept.pop()
            x = x if forget_skips else x + own["scales.2"] * skip
        q, k, v = torch.einsum("bth,dpeh->pbdte", rms(x), own["attention.qkv.weight"])
        if i < 2 or i >= count - 2:
            v = own["attention.mix"][0] * v + own["attention.mix"][1] * own["attention.values"][
                tokens
            ].transpose(1, 2)
        scores = (
            turned(rms(q), model.rope_theta) @ turned(rms(k), model.rope_theta).transpose(2, 3) / head**0.5
        )
        seen = (behind >= 0) & ((behind < 5) | (i % 3 == 2))
        y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        x = x + y.transpose(1, 2).reshape(*x.shape[:2], heads * head) @ own["attention.output.weight"].T
        x = (
            x
            + (rms(x) @ own["feed_forward.up.weight"].T).clamp(min=0).pow(2)
            @ own["feed_forward.down.weight"].T
        )
        if i < count // 2:
            kept.append(x)
    x = x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * w["norm.weight"]
    logits = 2.0 * torch.tanh(x @ w["head.weight"].T / 2.0)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("layers", [5, 6])
def test_gradients_are_those_of_plain_pytorch(tmp_path: Path, layers: int) -> None:
    """A skip from the wrong block, a window one too wide, a value mixed after the norm; an odd count
    has a block without a partner.
    """
    config = config_of(tmp_path, num_layers=layers)
    stage = perturbed(config, 0.2)
    tokens, targets = torch.randint(
        training.VOCAB_SIZE, (2, 3, 16), generator=torch.Generator().manual_seed(0)
    )
    loss = stage({}, Microbatch(tokens, targets, 0))[1]["cross_entropy"] / targets.numel()
    loss.backward()
    for mistake in (False, True):
        w = {
            name: parameter.detach().clone().requires_grad_() for name, parameter in stage.named_parameters()
        }
        other = plain_loss(w, config, tokens, targets, mistake)
        other.backward()
        worst = max(
            float((p.grad - (0 if w[name].grad is None else w[name].grad)).abs().max() / p.grad.abs().max())
            for name, p in stage.named_parameters()
            if p.grad is not None
        )
        assert (
            (worst > 1e-3) if mistake else (worst < TOLERANCE and abs(loss.item() - other.item()) < TOLERANCE)
        )
    assert all(parameter.grad is not None for parameter in stage.parameters())


def test_a_text_is_written_as_a_whole_pass_would(tmp_path: Path) -> None:
    """The cap, the window and the tokens' vectors in decoding: a prompt, single tokens,
    and several at once.
    """
    assert worst_logits(config_of(tmp_path), (5, 1, 1, 3, 1, 1)) < 1e-12
