"""nanoGPT's checkpoints come in as they are, and nothing in such a file is ever run."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.errors import CheckpointError, UserError
from tests.conversion import assert_nothing_written, imported_model, logits, relative, take_in

ARGUMENTS = {
    "n_layer": 2,
    "n_head": 3,
    "n_embd": 24,
    "block_size": 16,
    "vocab_size": 61,
    "bias": True,
    "dropout": 0.1,
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2)
        )
        scores = queries @ keys.mT / queries.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        return self.c_proj((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        return self.c_proj(0.5 * x * (1 + torch.erf(x / 2**0.5)))


class Peer(nn.Module):
    """A GPT written anew for this test, with nanoGPT's names for its parameters."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        width, bias = arguments["n_embd"], arguments["bias"]
        block = lambda: nn.ModuleDict(  # noqa: E731
            {
                "ln_1": nn.LayerNorm(width, bias=bias),
                "attn": Attention(width, arguments["n_head"], bias),
                "ln_2": nn.LayerNorm(width, bias=bias),
                "mlp": Mlp(width, bias),
            }
        )
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(arguments["vocab_size"], width),
                "wpe": nn.Embedding(arguments["block_size"], width),
                "h": nn.ModuleList([block() for _ in range(arguments["n_layer"])]),
                "ln_f": nn.LayerNorm(width, bias=bias),
            }
        )
        self.lm_head = nn.Linear(width, arguments["vocab_size"], bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)

    @torch.no_grad()
    def forward(self, rows: Tensor) -> Tensor:
        x = self.transformer["wte"](rows) + self.transformer["wpe"](torch.arange(rows.shape[1]))
        for block in self.transformer["h"]:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        return F.linear(self.transformer["ln_f"](x), self.lm_head.weight)


def write(path: Path, peer: nn.Module, arguments: dict[str, Any], prefix: str = "", **more: Any) -> Path:
    """The file as nanoGPT's train.py leaves it."""
    weights = {prefix + name: tensor for name, tensor in peer.state_dict().items()}
    optimizer = torch.optim.AdamW(peer.parameters()).state_dict()
    entries = {
        "model": weights,
        "optimizer": optimizer,
        "model_args": arguments,
        "iter_num": 7,
        "best_val_loss": torch.tensor(3.5),
    }
    torch.save(entries | {"config": {"out_dir": "out", "init_from": "scratch"}} | more, path)
    return path


@pytest.mark.parametrize("bias, prefix", [(True, ""), (False, "_orig_mod.")])
def test_logits_are_the_peers(bias, prefix, tmp_path, capsys):
    """With biases and without, of a compiled model too; erf's gelu, which tanh's
    misses by more than the tolerance.
    """
    arguments = ARGUMENTS | {"bias": bias}
    peer = Peer(arguments)
    rows = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(1))
    file = write(tmp_path / "ckpt.pt", peer, arguments, prefix)
    model = imported_model(take_in(file, tmp_path / "run", kind="nanogpt"))
    assert relative(logits(model, rows), peer(rows)) < 1e-5  # fp32
    assert (model.config.model.dropout, model.config.model.tie_embeddings, model.config.max_positions) == (
        0.1,
        True,
        16,
    )
    assert "every bit" in capsys.readouterr().out
    old = imported_model(take_in(file, tmp_path / "old", "model.activation=gelu", kind="nanogpt"))
    assert relative(logits(old, rows), peer(rows)) > 1e-4


def test_a_head_of_its_own_is_kept(tmp_path):
    peer = Peer(ARGUMENTS)
    peer.lm_head.weight = nn.Parameter(torch.randn(61, 24))
    rows = torch.arange(16)[None]
    model = imported_model(
        take_in(write(tmp_path / "ckpt.pt", peer, ARGUMENTS), tmp_path / "run", kind="nanogpt")
    )
    assert not model.config.model.tie_embeddings and relative(logits(model, rows), peer(rows)) < 1e-5


def test_the_mask_of_an_old_pytorch_is_passed_over(tmp_path):
    peer = Peer(ARGUMENTS)
    for block in peer.transformer["h"]:
        block["attn"].register_buffer("bias", torch.ones(16, 16).tril()[None, None])
    take_in(write(tmp_path / "ckpt.pt", peer, ARGUMENTS), tmp_path / "run", kind="nanogpt")


class Malicious:
    """Unpickled, it would make a folder."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.victim),)


def test_code_in_the_file_is_not_run(tmp_path):
    victim = tmp_path / "made by the file"
    file = write(tmp_path / "ckpt.pt", Peer(ARGUMENTS), ARGUMENTS, best_val_loss=Malicious(victim))
    with pytest.raises(
        CheckpointError, match=r"ckpt\.pt: is damaged, or holds more .* could run code, and is not loaded"
    ) as caught:
        take_in(file, tmp_path / "run", kind="nanogpt")
    assert "\n" not in str(caught.value) and not victim.exists()
    assert_nothing_written(tmp_path / "run")
    torch.load(file, weights_only=False)
    assert victim.exists(), "the file was harmless, and proved nothing"


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def without_a_storage(file: Path) -> None:
    """A zip as torch writes it, one of its tensors' bytes gone."""
    content = io.BytesIO(file.read_bytes())
    with zipfile.ZipFile(content) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            if not name.endswith("data/0"):
                new.writestr(name, old.read(name))


@pytest.mark.parametrize(
    "damage",
    [truncated, without_a_storage, lambda file: file.write_text("text"), lambda file: file.write_bytes(b"")],
)
def test_damaged_files(damage, tmp_path):
    file = write(tmp_path / "ckpt.pt", Peer(ARGUMENTS), ARGUMENTS)
    damage(file)
    with pytest.raises(CheckpointError, match=r"ckpt\.pt: is damaged"):
        take_in(file, tmp_path / "run", kind="nanogpt")
    assert_nothing_written(tmp_path / "run")


STRANGE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"n_layer": 3}, {}, r"has no tensor transformer\.h\.2\."),
    ({"n_layer": 1}, {}, r"holds the tensor transformer\.h\.1\."),
    ({"n_embd": 48}, {}, r"tensor transformer\.wte\.weight has shape \(61, 24\), not \(61, 48\)"),
    ({"n_embd": 0}, {}, "model_args has n_embd=0"),
    ({"n_head": "3"}, {}, "model_args has n_head='3'"),
    ({"bias": None}, {}, "model_args has bias=None"),
    ({"use_rmsnorm": True}, {}, "model_args has use_rmsnorm=True, which nanoGPT does not know"),
    ({}, {"model": [1]}, "holds no model"),
    ({}, {"model_args": None}, "holds no model_args"),
    (
        {},
        {"model": {"transformer.wte.weight": "text"}},
        "model holds something else than floating-point tensors",
    ),
]


@pytest.mark.parametrize("arguments, entries, message", STRANGE)
def test_strange_contents(arguments, entries, message, tmp_path):
    file = write(tmp_path / "ckpt.pt", Peer(ARGUMENTS), ARGUMENTS | arguments, **entries)
    with pytest.raises(UserError, match=message):
        take_in(file, tmp_path / "run", kind="nanogpt")
    assert_nothing_written(tmp_path / "run")
