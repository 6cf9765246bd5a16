"""The plain GPT that benchmarks race against computes what megacore's model does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import plain_gpt
from benchmarks.peers.plain_gpt import GPT, PlainGPTLoop
from benchmarks.peers.transformers_loop import gpt2
from benchmarks.training import Training, random_batch
from megacore.config import Config
from megacore.tools.interchange.mapped import Mapped, gpt2_tensors
from megacore.tools.interchange.nanogpt import nanogpt_tensors
from tests.build import mesh_of, model_of, run_of

FP32 = 1e-5  # relative: sums of some hundred terms in another order


def small_gpt(*overrides: str) -> Config:
    """A config of GPT-2's blocks; every size off the others, several microbatches."""
    sections = {
        "model": {"num_layers": 2, "hidden_size": 24, "num_heads": 3, "vocab_size": 61, "ffn_size": 40},
        "train": {
            "seq_len": 16,
            "micro_batch_size": 2,
            "global_batch_size": 6,
            "precision": "fp32",
            "device": "cpu",
        },
        "optim": {"lr": 1e-2, "schedule": "constant", "weight_decay": 0.5},
    }
    return run_of(sections, *overrides)


def farthest_from_megacore(model: nn.Module, config: Config, mapping: list[Mapped]) -> float:
    """The largest relative difference of the loss and of each gradient from those of megacore's
    model, with `model`'s own weights.
    """
    (microbatch, *_) = random_batch(config, torch.device("cpu"))
    ours = model_of(config)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in mapping:
            dict(ours.named_parameters())[tensor.name].copy_(tensor.join(theirs))  # type: ignore[arg-type]
    loss = (
        ours.loss(ours.hidden(microbatch.tokens, microbatch.key), microbatch.targets)
        / microbatch.targets.numel()
    )
    loss.backward()
    other = model(microbatch.tokens, microbatch.targets)
    other.backward()
    found = float((other - loss).detach().abs() / loss.detach())
    gradients = {name: parameter.grad for name, parameter in theirs.items()}
    for tensor in mapping:
        ours_gradient = dict(ours.named_parameters())[tensor.name].grad
        assert ours_gradient is not None
        difference = (tensor.join(gradients) - ours_gradient).abs().max() / ours_gradient.abs().max()  # type: ignore[arg-type]
        found = max(found, float(difference))
    return found


def perturbed_gpt(config: Config) -> GPT:
    """With biases and norms off zero and one, so that none can be left out unseen."""
    model, generator = GPT(config), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def test_the_plain_gpt_is_megacores_model() -> None:
    """With equal weights the loss and every gradient are equal; a contender with
    another model would prove nothing.
    """
    config = small_gpt()
    assert farthest_from_megacore(perturbed_gpt(config), config, nanogpt_tensors(config)) < FP32


def exact_gelu(block: plain_gpt.FeedForward, x: Tensor) -> Tensor:
    return block.c_proj(F.gelu(block.c_fc(x)))


def no_mask(block: plain_gpt.Attention, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(2, (block.heads, -1)).transpose(1, 2) for part in block.c_attn(x).chunk(3, 2))
    return block.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def no_second_residual(block: plain_gpt.Block, x: Tensor) -> Tensor:
    return block.mlp(block.ln_2(x + block.attn(block.ln_1(x))))


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (plain_gpt.FeedForward, exact_gelu),
        (plain_gpt.Attention, no_mask),
        (plain_gpt.Block, no_second_residual),
    ],
    ids=lambda value: value.__name__,
)
def test_another_model_shows(monkeypatch: pytest.MonkeyPatch, part: type, fault: Any) -> None:
    monkeypatch.setattr(part, "forward", fault)
    config = small_gpt()
    assert farthest_from_megacore(perturbed_gpt(config), config, nanogpt_tensors(config)) > 10 * FP32


def losses(loop: Any, steps: int = 4) -> list[float]:
    found = []
    for _ in range(steps):
        loop.step()
        found.append(loop.loss())
    return found


def test_the_plain_gpt_trains_as_megacore_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps from the same initial weights: accumulation, clipping, AdamW and what decays.

    One that does less would be faster.
    """
    # which would take a minute, and is not what is looked at
    monkeypatch.setattr(torch, "compile", lambda model: model)
    config = small_gpt()
    ours = losses(Training(config, mesh_of(config)))
    assert ours[-1] < ours[0] - 0.1
    assert losses(PlainGPTLoop(config)) == pytest.approx(ours, rel=1e-5)
    for difference in ("optim.weight_decay=0", "optim.grad_clip=0.01", "train.seed=5"):
        assert losses(PlainGPTLoop(small_gpt(difference))) != pytest.approx(ours, rel=1e-4), difference


def test_the_model_of_transformers_starts_with_megacores_weights() -> None:
    """Losses of contenders could only be compared roughly."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")
    config = small_gpt()
    peer, mapping = gpt2(config), gpt2_tensors(config)

    class WithLoss(nn.Module):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(peer(tokens).logits.flatten(0, 1), targets.flatten())

        def named_parameters(self, *_: Any, **__: Any) -> Any:
            return peer.named_parameters()

    theirs = dict(peer.named_parameters())
    ours = dict(model_of(config).named_parameters())
    assert all(torch.equal(tensor.join(theirs), ours[tensor.name]) for tensor in mapping)  # type: ignore[arg-type]
    assert farthest_from_megacore(WithLoss(), config, mapping) < FP32
