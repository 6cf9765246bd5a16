"""A model and the plain module that it is compared with: whatever does not correspond is named, and what the
module cannot give is listed.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megacore.config import Config
from megacore.errors import ConfigError
from megacore.model.batch import Microbatch
from megacore.model.plain.exact import in_fp64
from megacore.tools.interchange.mapped import Mapped, renamed, transposed
from megacore.tools.verify.reference import PLAIN
from megacore.tools.verify.untouched import Untouched, UntouchedReference, plain_logits, untouched_of
from tests.build import model_of, run_of
from tests.forks import ROOT

SMALL = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.vocab_size=24",
    "train.seq_len=8",
    "train.micro_batch_size=2",
)
TENSOR_NAMES = {
    "embedding.weight": "embed.weight",
    "blocks.0.norm1.weight": "norm1",
    "blocks.0.norm2.weight": "norm2",
    "norm.weight": "norm",
}


def config_of(*overrides: str) -> Config:
    return run_of(ROOT / "configs/gpt_tiny.json", *SMALL, *PLAIN, *overrides)


class Plain(nn.Module):
    """A module with the model's parameters that computes little: bigrams of a tied embedding."""

    def __init__(self, config: Config, *, is_tied: bool = True) -> None:
        super().__init__()
        size, vocab_size = config.model.hidden_size, config.model.vocab_size
        self.embed = nn.Embedding(vocab_size, size)
        self.unembed = nn.Linear(size, vocab_size, bias=False)
        if is_tied:
            self.unembed.weight = self.embed.weight
        for name, shape in shapes(config).items():
            if name not in TENSOR_NAMES:
                self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.ones(shape)))
        for name in ("norm1", "norm2", "norm"):
            self.register_parameter(name, nn.Parameter(torch.ones(size)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.unembed(self.embed(tokens) * self.norm)  # type: ignore[no-any-return]


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model_of(config, "meta").named_parameters()}


def records(config: Config) -> list[Mapped]:
    return [
        renamed(name, shape, TENSOR_NAMES.get(name, name.replace(".", "_")))
        for name, shape in shapes(config).items()
    ]


def plain_of(config: Config) -> Untouched:
    with in_fp64():
        module = Plain(config)
    return Untouched(module, module, records(config))


def test_weights_and_gradients_go_through_the_records() -> None:
    """Split, transposed and tied: what a record maps one way must come back the other."""
    config = config_of()
    model, plain = model_of(config), plain_of(config)
    assert plain.tensors is not None
    del plain.module.embed, plain.module.unembed
    table = nn.Parameter(torch.zeros(16, 24, dtype=torch.float64))
    plain.module.register_parameter("table", table)
    turned = transposed("embedding.weight", (24, 16), "table")
    call: Callable[[Tensor], Tensor] = lambda tokens: table.t()[tokens] @ table  # noqa: E731
    reference = UntouchedReference(Untouched(plain.module, call, [turned, *plain.tensors[1:]]), model)
    weight = dict(model.named_parameters())["embedding.weight"]
    assert torch.equal(table, weight.t())

    tokens = torch.arange(16).view(2, 8)
    with reference.computing():
        reference.sums(Microbatch(tokens, tokens + 1))["cross_entropy"].backward()
    weight.grad = torch.ones_like(weight)  # of a loss that the module does not give
    expected = 1 + table.grad.t()  # type: ignore[union-attr]
    reference.add_gradients()
    assert torch.equal(weight.grad, expected) and table.grad is None

    dict(model.named_parameters())["norm.weight"].data.fill_(3.0)
    reference.copy_weights()
    assert plain.module.norm.eq(3.0).all()  # type: ignore[union-attr]


def without(name: str) -> Callable[[Untouched], Untouched]:
    return lambda plain: replace(plain, tensors=[t for t in plain.tensors or () if t.name != name])


def extra(plain: Untouched) -> Untouched:
    plain.module.register_parameter("scale", nn.Parameter(torch.ones(())))
    return plain


def other(parameter: str, **changes: object) -> Callable[[Untouched], Untouched]:
    def changed(plain: Untouched) -> Untouched:
        tensors = [
            replace(t, **changes) if t.name == parameter else t  # type: ignore[arg-type]
            for t in plain.tensors or ()
        ]
        return replace(plain, tensors=tensors)

    return changed


WRONG: dict[str, tuple[Callable[[Untouched], Untouched], str]] = {
    "of the model alone": (without("norm.weight"), "norm.weight of the model is no parameter of tests.Plain"),
    "of the module alone": (extra, "scale of tests.Plain is no parameter of the model"),
    "an unknown name of the model": (
        other("norm.weight", name="norm.wait"),
        "norm.wait is not a parameter of the model",
    ),
    "an unknown name of the module": (
        other("norm.weight", peers={"gain": (16,)}),
        "gain, for the model's norm.weight, is not a parameter of tests.Plain",
    ),
    "two for one that is tied": (
        other("blocks.0.norm1.weight", peers={"norm": (16,)}),
        "norm.weight and blocks.0.norm1.weight of the model are two parameters, and one of tests.Plain, norm",
    ),
    "another shape": (
        other("norm.weight", shape=(4, 4)),
        "norm.weight has the shape [16], not [4, 4]",
    ),
    "a split that does not fit": (
        other("norm.weight", split=lambda ours: {"norm": ours[:8]}),
        "norm of the module has the shape [16], and split gives it [8] of norm.weight",
    ),
    "a join that is not the reverse": (
        other("norm.weight", join=lambda theirs: 2 * theirs["norm"]),
        "join does not reverse split for norm.weight",
    ),
    "by its own names": (
        lambda plain: replace(plain, tensors=None),
        "embedding.weight of the model is no parameter of tests.Plain",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_correspond_is_named(kind: str) -> None:
    """A parameter that is left out would keep the module's first value, and be equal by chance or not."""
    change, complaint = WRONG[kind]
    config = config_of()
    with pytest.raises(ConfigError) as raised:
        UntouchedReference(change(plain_of(config)), model_of(config))
    assert complaint in raised.value.wrong, raised.value.wrong


def test_a_frozen_parameter_gets_the_weight_and_no_gradient() -> None:
    config = config_of()
    model, plain = model_of(config), plain_of(config)
    weight = dict(model.named_parameters())["embedding.weight"].requires_grad_(False)
    reference = UntouchedReference(plain, model)
    assert torch.equal(plain.module.embed.weight, weight)  # type: ignore[union-attr, arg-type]
    assert not plain.module.unembed.weight.requires_grad  # type: ignore[union-attr]
    reference.add_gradients()
    assert weight.grad is None


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda tokens: {"logits": tokens}, "call returns dict, not logits [batch, seq, vocab]"),
        (lambda tokens: torch.zeros(16, 24), "call returns [16, 24] for tokens [2, 8], not logits"),
        (
            lambda tokens: (torch.zeros(2, 8, 24), {"balance": torch.zeros(())}),
            "call returns a loss balance, and those of the model are cross_entropy",
        ),
        (
            lambda tokens: (torch.zeros(2, 8, 24), {"cross_entropy": torch.zeros(2)}),
            "call returns a loss cross_entropy that is no scalar tensor",
        ),
    ],
)
def test_what_call_returns_is_checked(call: Callable[[Tensor], Tensor], complaint: str) -> None:
    config = config_of()
    reference = UntouchedReference(replace(plain_of(config), call=call), model_of(config))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(RuntimeError) as raised:
        reference.sums(Microbatch(tokens, tokens))
    assert complaint in str(raised.value), raised.value


def test_every_document_is_a_sequence_of_its_own() -> None:
    """A module that reads across a document's end would need a mask to be right."""
    config = config_of()
    lengths = []
    plain = plain_of(config)

    def call(tokens: Tensor) -> Tensor:
        lengths.append(tuple(tokens.shape))
        return plain.module(tokens)  # type: ignore[no-any-return]

    reference = UntouchedReference(replace(plain, call=call), model_of(config))
    tokens = torch.arange(16).view(2, 8)
    batch = Microbatch(tokens, tokens, documents=((0, 3, 8), (0, 8)), positions=tokens)
    logits = reference.logits(batch)
    assert lengths == [(1, 3), (1, 5), (1, 8)]
    assert torch.allclose(logits, reference.logits(Microbatch(tokens, tokens)), rtol=1e-12)


@pytest.mark.parametrize(("ignored", "listed"), [(False, []), (True, ["z_loss"])])
def test_a_loss_over_targets_is_the_module_s_if_all_count(ignored: bool, listed: list[str]) -> None:
    """`call` does not know which targets are masked, so its sum would be another, and a false alarm."""
    config = config_of("model.z_loss=0.1")
    plain = plain_of(config)

    def call(tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = plain.module(tokens)
        return logits, {"z_loss": logits.logsumexp(-1).square().sum()}

    reference = UntouchedReference(replace(plain, call=call), model_of(config))
    targets = torch.arange(16).view(2, 8)
    if ignored:
        targets[0, 0] = -100
    sums = reference.sums(Microbatch(torch.zeros_like(targets), targets))
    assert reference.comparison().not_compared == listed
    assert list(sums) == (["cross_entropy"] if ignored else ["z_loss", "cross_entropy"])


def test_dropout_cannot_be_compared() -> None:
    """Masks of the module are drawn otherwise; every gradient would differ, and none be wrong."""
    config = config_of("model.dropout=0.1")
    with pytest.raises(ConfigError, match=r"model.dropout: 0.1 is not 0"):
        UntouchedReference(plain_of(config), model_of(config))
    config = config_of()
    plain = plain_of(config)
    plain.module.drop = nn.Dropout(0.2)
    with pytest.raises(ConfigError, match=r"drop of tests.Plain has dropout 0.2"):
        UntouchedReference(plain, model_of(config))


def source(folder: Path, text: str) -> Config:
    path = folder / "model.py"
    path.write_text(f"from megacore.model.block import Block\n\n\ndef untouched(config):\n    {text}\n")
    return config_of(f"model.source={path}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("return config.unknown", r"model.py, line 5, untouched: AttributeError"),
        ("return config", r"model.py, untouched: TypeError: it returns Config, not megacore.*Untouched"),
    ],
)
def test_a_wrong_function_is_blamed(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        untouched_of(source(tmp_path, text))


def test_what_asks_for_fp32_computes_in_fp64(tmp_path: Path) -> None:
    """Norms and rotary tables of transformers do; a proof would be off by fp32's rounding."""
    text = (
        "import torch; from megacore.tools.verify.untouched import Untouched; "
        "module = torch.nn.Linear(2, 2); "
        "module.register_buffer('table', torch.arange(3, dtype=torch.float32) / 7); "
        "return Untouched(module, lambda tokens: tokens)"
    )
    untouched = untouched_of(source(tmp_path, text))
    assert untouched is not None
    third = torch.arange(3, dtype=torch.float64) / 7
    assert torch.equal(untouched.module.table, third)  # type: ignore[arg-type]
    assert untouched.module.weight.dtype == torch.float64  # type: ignore[union-attr]
    assert torch.get_default_dtype() == torch.float32


class Output:
    """What a class of transformers returns."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Keeping(nn.Module):
    """A module that fills a cache unless it is told not to."""

    def forward(self, tokens: Tensor, use_cache: bool = True) -> Output:
        assert not use_cache
        return Output(tokens)


@pytest.mark.parametrize("module", [Keeping(), nn.Identity()])
def test_a_plain_module_is_called_as_its_users_do(module: nn.Module) -> None:
    tokens = torch.arange(3)
    assert plain_logits(module, tokens) is tokens
