"""configs/forks/vision.py: its pictures and those of a file, whose positions are learned,
and attention by plain PyTorch.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megacore.config import Config
from megacore.config.schema import IGNORED
from megacore.errors import ConfigError, DataError
from megacore.model.batch import Microbatch, Samples
from megacore.model.choose import layers_of
from megacore.model.layers import fields_of
from megacore.tools.text.cache import KeyValueCache
from tests import training
from tests.build import run_of, step_of
from tests.forks import perturbed

FORK = Path(__file__).parents[2] / "configs/forks/vision.py"
SIZES: dict[str, Any] = {
    "source": str(FORK),
    "norm": "rmsnorm",
    "position": "rope",
    "patches": 4,
    "patch_size": 8,
    "sight_layers": 2,
}


def config_of(folder: Path, **model: object) -> Config:
    return run_of(training.write_config(folder, "unused", model=SIZES | model, train={"precision": "fp64"}))


def batch_of(config: Config, tokens: np.ndarray, targets: np.ndarray | None = None) -> Microbatch:
    samples = Samples(tokens, np.roll(tokens, -1, 1) if targets is None else targets)
    more = {
        name: torch.from_numpy(np.ascontiguousarray(source(samples)))
        for name, source in fields_of(layers_of(config)).items()
    }
    return Microbatch(torch.from_numpy(tokens), more.pop("targets"), more=more)


def random_tokens(rows: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, training.VOCAB_SIZE, (rows, 16))


def test_pictures_show_the_digits_of_the_text(tmp_path: Path) -> None:
    """A picture of another text, mirrored digits, and text that is shorter than the picture."""
    config = config_of(tmp_path, patches=9)
    text = np.frombuffer(b"---------1702345", np.uint8).astype(np.int64)[None]
    picture = batch_of(config, text)["pixels"].view(9, 8, 8)
    assert picture.unique().tolist() == [0, 255] and not picture[7:].any()
    assert len({tuple(patch.flatten().tolist()) for patch in picture[:7]}) == 7
    seven = (picture[1] > 0).int()
    assert seven.any(1).nonzero().flatten()[0] < seven.any(1).nonzero().flatten()[-1]
    top, bottom = (seven[seven.any(1)][at].nonzero().flatten() for at in (0, -1))
    # a bar above, and a foot that is not to the right
    assert len(top) > len(bottom) and bottom.max() < top.max()


@pytest.mark.parametrize(
    "fault", [None, (" = found[:, -1] = IGNORED", " = IGNORED"), ("found[:, : model.patches - 1] = ", "")]
)
def test_no_target_is_a_token_of_an_image(tmp_path: Path, fault: tuple[str, str] | None) -> None:
    """Image positions that are counted in the loss, or in its mean: those of this sample, and
    of the next one behind its end.
    """
    text = FORK.read_text(encoding="utf-8")
    assert fault is None or text.count(fault[0]) == 1
    (tmp_path / "vision.py").write_text(text.replace(*fault) if fault else text, encoding="utf-8")
    config = config_of(tmp_path, source=str(tmp_path / "vision.py"))
    batch = batch_of(config, random_tokens())
    learned = batch["targets"][:, 3:-1]
    assert (learned == batch.tokens[:, 4:]).all()  # the last patch says the first token
    step = step_of(config)
    mean = float(step.loss_weights([batch])["cross_entropy"])
    assert (mean == 1 / learned.numel() and int((batch["targets"] != IGNORED).sum()) == learned.numel()) == (
        fault is None
    )


def test_the_loss_is_that_of_what_is_seen(tmp_path: Path) -> None:
    """Pixels that reach no text, tokens of the image that do, and a picture that another sample sees."""
    config, tokens = config_of(tmp_path, init_std=0.2), random_tokens()
    stage, batch = perturbed(config, 0.1), batch_of(config_of(tmp_path), random_tokens())
    with torch.no_grad():
        hidden = stage({}, Microbatch(batch.tokens, more=batch.more))[0]["hidden"]
        other = tokens.copy()
        other[:, :4] = (other[:, :4] + 1) % training.VOCAB_SIZE
        same = stage({}, Microbatch(torch.from_numpy(other), more=batch.more))[0]["hidden"]
        torch.testing.assert_close(hidden, same)
        pixels = batch["pixels"].clone()
        pixels[1] = 255 - pixels[1]
        changed = stage({}, Microbatch(batch.tokens, more=batch.more | {"pixels": pixels}))[0]["hidden"]
    assert (changed - hidden).view(3, 16, -1).abs().amax((1, 2)).gt(1e-3).tolist() == [False, True, False]


def test_patches_see_each_other_as_in_plain_pytorch(tmp_path: Path) -> None:
    """A mask where there is none, heads or images mixed up, and pixels that are not scaled."""
    stage, batch = perturbed(config_of(tmp_path), 0.3), batch_of(config_of(tmp_path), random_tokens())
    first, block = stage.before[0], stage.inner[0]
    weights: dict[str, Any] = dict(block.attention.named_parameters())  # type: ignore[union-attr]
    context = stage.context(batch)
    with torch.no_grad():
        _, patches = first(context)
        expected = batch["pixels"].double() / 255 @ first.patch.T + first.patch_position
        torch.testing.assert_close(patches, expected.transpose(0, 1), rtol=1e-12, atol=1e-12)
        x = torch.randn(4, 3, 32, dtype=torch.float64)
        found = block.attention(x.flatten(0, 1), context).view(4, 3, 32)  # type: ignore[operator]
        for image in range(3):
            q, k, v = (
                torch.einsum("ti,hpei->phte", x[:, image], weights["qkv.weight"])
                + weights["qkv.bias"].transpose(0, 1)[:, :, None]
            )
            y = torch.softmax(q @ k.mT / 8**0.5, -1) @ v
            y = F.linear(y.transpose(0, 1).flatten(1), weights["output.weight"], weights["output.bias"])
            torch.testing.assert_close(found[:, image], y, rtol=1e-10, atol=1e-10)


def test_a_text_about_an_image_is_written_as_a_whole_pass_would(tmp_path: Path) -> None:
    """The image is read with the first tokens; without one they are text."""
    stage, batch = perturbed(config_of(tmp_path), 0.2).eval(), batch_of(config_of(tmp_path), random_tokens(1))
    for more in (batch.more, {}):
        cache, parts, at = KeyValueCache(1, 16), [], 0
        with torch.no_grad():
            whole = stage({}, Microbatch(batch.tokens, more=more))[0]["hidden"]
            for new in (6, 1, 1, 3, 5):
                given = {"pixels": more["pixels"], "place": more["place"][:, :new]} if more and not at else {}
                parts.append(
                    stage({}, Microbatch(batch.tokens[:, at : at + new], more=given), cache)[0]["hidden"]
                )
                at += new
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-10, atol=1e-10)


def test_images_of_a_file_are_those_that_samples_name(tmp_path: Path) -> None:
    """Patches in the wrong order, colours and pixels mixed up, a number beyond the vocabulary;
    what does not fit is one line.
    """
    images = np.random.default_rng(0).integers(0, 256, (70, 4, 16, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    config = config_of(tmp_path, images=str(tmp_path / "images.npy"), patch_size=4, channels=3)
    tokens = random_tokens(2)
    tokens[:, :2] = [[3, 0], [2, 1]]
    pixels = batch_of(config, tokens)["pixels"]
    for row, number in enumerate((3, training.VOCAB_SIZE + 2)):
        for patch in range(4):
            assert (
                pixels[row, patch].view(4, 4, 3).numpy() == images[number][:, 4 * patch : 4 * patch + 4]
            ).all()
    tokens[1, :2] = [6, 1]
    with pytest.raises(
        DataError, match=r"images.npy: has 70 images, and a sample begins with number 71 \(a smaller one\)"
    ):
        batch_of(config, tokens)
    with pytest.raises(
        DataError,
        match=r"is uint8 \[70, 4, 16, 3\] \(uint8 \[images, height, width, 1\], cut into 4 patches of 4 x "
        r"4\)",
    ):
        batch_of(config_of(tmp_path, images=str(tmp_path / "images.npy"), patch_size=4), tokens)
    with pytest.raises(DataError, match="none.npy: cannot be read"):
        batch_of(config_of(tmp_path, images="none.npy"), tokens)


@pytest.mark.parametrize(
    ("model", "told"),
    [({"sight_layers": 5}, "leaves no block"), ({"patches": 16}, "less than train.seq_len")],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, model: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        layers_of(config_of(tmp_path, **model))
