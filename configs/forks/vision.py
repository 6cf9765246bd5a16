"""A GPT that sees: every sample begins with an image, and its text says something
about it (Liu et al. 2023, LLaVA).

The first `model.patches` tokens of a sample are an image, cut into patches (Dosovitskiy et al. 2021). The
first layer makes vectors of their pixels, `model.sight_layers` blocks let patches see each other, and the
next block puts them where the image's tokens stand. No target is a token of an image.

Without `model.images` the picture shows digits: patch number i the last digit of the text's token number i.
So a text of digits can be read, and not guessed. To bring images, give a `.npy` of uint8, ``[images, height,
width]`` or ``[images, height, width, channels]``. In the corpus, each sample's first two tokens are its
image's number, n % vocab_size and n // vocab_size; any others fill its patches.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from megacore.config import Config
from megacore.config.model import ModelConfig
from megacore.config.schema import IGNORED
from megacore.distributed.collectives import enter_tensor_parallel, own_part
from megacore.distributed.shard import LogicalMatrix, Shard, new_parameter, replicated
from megacore.distributed.topology import Topology
from megacore.errors import DataError
from megacore.model.batch import Samples
from megacore.model.context import Context
from megacore.model.embedding import Embedding
from megacore.model.flow import Flow
from megacore.model.gpt import gpt
from megacore.model.layers import Layers, LayerSpec
from megacore.section import Count
from megacore.tensor_parallel.linear import ColumnLinear, RowLinear

FONT = "75557 26227 71747 71717 55711 74717 74757 71122 75757 75717"  # of each digit five rows of three bits


class Settings(ModelConfig):
    patches: Count = Field(
        16, ge=2, description="number of patches per image, each of which takes the place of one token"
    )
    patch_size: Count = Field(8, description="side of a patch in pixels")
    channels: Count = Field(1, description="numbers per pixel: 1 for grey, 3 for colour")
    sight_layers: Count = Field(
        1, description="number of blocks in which patches attend to each other; they count in `num_layers`"
    )
    images: str | None = Field(
        None, description="path of a .npy file of images; null: generated pictures of digits"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sight_layers >= self.num_layers:
            raise ValueError(
                f"model.num_layers={self.num_layers} leaves no block besides {self.sight_layers} of sight "
                "(right: more)"
            )
        return self

    @property
    def pixels(self) -> int:
        """The numbers of a patch."""
        return self.patch_size**2 * self.channels


def drawn(model: Any, samples: Samples) -> np.ndarray:
    """Pictures of the digits of each sample's text, ``[batch, patches, pixels]``."""
    bits = (
        np.array([[int(row) for row in glyph] for glyph in FONT.split()], np.uint8)[:, :, None]
        >> np.arange(3)[::-1]
        & 1
    )
    size = np.arange(model.patch_size)
    glyphs = (
        np.pad(bits, ((0, 1), (1, 1), (1, 1)))[:, size * 7 // model.patch_size][
            :, :, size * 5 // model.patch_size
        ]
        * 255
    )
    text = samples.tokens[:, model.patches : 2 * model.patches]
    digits = np.pad(
        (text - ord("0")) % 10, ((0, 0), (0, model.patches - text.shape[1])), constant_values=len(bits)
    )
    return np.repeat(glyphs[digits].reshape(*digits.shape, -1), model.channels, 2).astype(np.uint8)


@lru_cache(maxsize=8)
def opened(path: str, patches: int, size: int, channels: int) -> np.ndarray:
    """The images of a file, of which only what is used is read, ``[images, rows,
    size, columns, size, channels]``.
    """
    right = f"uint8 [images, height, width, {channels}], cut into {patches} patches of {size} x {size}"
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(path, f"cannot be read: {error}", right) from None
    found = found[..., None] if found.ndim == 3 else found
    count, height, width, own = found.shape if found.ndim == 4 else (0, 0, 0, 0)
    if (
        found.dtype != np.uint8
        or own != channels
        or height % size
        or width % size
        or height * width != patches * size**2
    ):
        raise DataError(path, f"is {found.dtype} {list(found.shape)}", right)
    return found.reshape(count, height // size, size, width // size, size, channels)


def read(model: Any, samples: Samples) -> np.ndarray:
    """The images whose numbers the samples begin with, ``[batch, patches, pixels]``."""
    images = opened(model.images, model.patches, model.patch_size, model.channels)
    numbers = samples.tokens[:, 0] + model.vocab_size * samples.tokens[:, 1]
    if numbers.max() >= len(images):
        raise DataError(
            model.images,
            f"has {len(images)} images, and a sample begins with number {numbers.max()}",
            "a smaller one",
        )
    return images[numbers].swapaxes(2, 3).reshape(len(numbers), model.patches, -1)


def place(model: Any, samples: Samples) -> np.ndarray:
    """Which patch stands at each token, ``[batch, seq]``; -1 in the text."""
    every = np.arange(samples.tokens.shape[1])
    return np.tile(np.where(every < model.patches, every, -1), (len(samples.tokens), 1))


def text_targets(model: Any, samples: Samples) -> np.ndarray:
    """The targets that are text; the last is the beginning of another sample's image."""
    found = samples.targets.copy()
    found[:, : model.patches - 1] = found[:, -1] = IGNORED
    return found


class Sight(Embedding):
    """The embedding, and a vector for each patch; tensor ranks with sequence
    parallelism divide the patches.
    """

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, mesh, dtype, device)
        model: Any = config.model
        shape, along = (
            (model.hidden_size, model.pixels),
            (replicated(mesh.tp, partial=config.parallel.sequence),),
        )
        table = Shard(
            (model.patches, model.hidden_size), along, decay=True, init_std=model.init_std, table=True
        )
        self.patch = new_parameter(Shard(shape, along, decay=True, init_std=shape[1] ** -0.5), dtype, device)
        self.patch_position = new_parameter(table, dtype, device)

    def forward(self, context: Context) -> Any:
        """→ hidden states ``[tokens, hidden]``, and patches ``[patches, batch, hidden]``; zeros where
        a text is written without one.
        """
        x, positions = super().forward(context), self.patch_position
        pixels = context.batch.get("pixels")
        if pixels is None:
            return x, x.new_zeros(len(positions), context.batch_size, x.shape[1])
        own = partial(own_part, group=context.group) if context.sequence else lambda x: x
        return x, F.linear(own(pixels.transpose(0, 1)).to(x.dtype) / 255, self.patch) + own(positions)[
            :, None
        ]


class Seeing(nn.Module):
    """Attention of an image's patches to each other, without a mask."""

    def __init__(self, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        model, self.head = config.model, config.head_size
        where: dict[str, Any] = {
            "group": mesh.tp,
            "sequence": config.parallel.sequence,
            "dtype": dtype,
            "device": device,
        }
        maps = tuple(
            LogicalMatrix(n, (slice(None), slice(i, i + 1)), (0, 1), (2,), (3,)) for i, n in enumerate("qkv")
        )
        heads, std = (model.num_heads, 3, self.head), model.init_std
        self.qkv = ColumnLinear(
            model.hidden_size, heads, bias=model.bias, init_std=std, matrices=maps, **where
        )
        std, width = std / (2 * model.num_layers) ** 0.5, model.num_heads * self.head
        self.output = RowLinear(width, model.hidden_size, bias=model.bias, init_std=std, **where)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """``[patches · batch, hidden]`` → the same."""
        q, k, v = (
            self.qkv(x)
            .unflatten(0, (-1, context.batch_size))
            .unflatten(2, (-1, 3, self.head))
            .permute(3, 1, 2, 0, 4)
        )
        return self.output(
            F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2).flatten(0, 1)
        )


class SightBlock:
    """A block of patches, which all context ranks compute; without dropout."""

    reads = ("patches",)

    def __init__(
        self, index: int, config: Config, mesh: Topology, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(index, config, mesh, dtype, device)  # type: ignore[call-arg]
        self.attention = Seeing(config, mesh, dtype, device)

    def forward(self, patches: Tensor, context: Context) -> Tensor:
        """``[patches, batch, hidden]`` → the same."""
        if "pixels" not in context.batch:
            return patches
        x: Tensor = super().forward(patches.flatten(0, 1), replace(context, dropout=0.0))  # type: ignore[misc]
        return x.view_as(patches)


class Placing:
    """A block of text, which first puts patches where they stand."""

    reads = ("hidden", "patches")

    def forward(self, x: Tensor, patches: Tensor, context: Context) -> Tensor:
        """``[tokens, hidden]`` and patches → ``[tokens, hidden]``."""
        if "place" in context.batch:
            patches = enter_tensor_parallel(patches, context.group, True) if context.sequence else patches
            at = context.batch["place"]
            row = torch.arange(len(at), device=at.device)[:, None].expand_as(at)
            at, row = (
                own_part(i.flatten(), context.group) if context.sequence else i.flatten() for i in (at, row)
            )
            x = torch.where(at[:, None] >= 0, patches[at.clamp(min=0), row], x)
        return super().forward(x, context)  # type: ignore[misc, no-any-return]


def layers(config: Config) -> Layers:
    """A GPT's, of whose blocks the first see, and the next places what they have seen."""
    model: Any = config.model
    if config.train.seq_len <= model.patches or (
        config.parallel.sequence and model.patches % config.parallel.tensor
    ):
        raise ValueError(
            f"model.patches={model.patches} are not less than train.seq_len, or tensor ranks cannot "
            "divide them"
        )
    make = {"pixels": drawn if model.images is None else read, "place": place, "targets": text_targets}
    fields: Mapping[str, Callable[..., Any]] = {name: partial(source, model) for name, source in make.items()}
    flow = {"patches": Flow((model.patches, "batch", "hidden"), cp=False)}
    _, *blocks, last = gpt(config)
    first = type("Sight", (Sight,), {"writes": {**Sight.writes, **flow}, "fields": fields})
    kinds = (
        [((SightBlock,), {"writes": flow})] * model.sight_layers
        + [((Placing,), {})]
        + [((), {})] * len(blocks)
    )
    named = [
        LayerSpec(spec.name, type("Block", (*kind, spec.kind), more), spec.arguments)
        for spec, (kind, more) in zip(blocks, kinds, strict=False)
    ]
    return [LayerSpec("embedding", first), *named, last]


def small(config: Config) -> dict[str, Any]:
    """What verify changes in its small model: a sample is longer than its image, and shows digits, because
    random tokens are no numbers of images.
    """
    model: Any = config.model
    tokens = config.train.seq_len * (model.patches // config.train.seq_len + 1)
    return {"train.seq_len": tokens, "model.max_positions": tokens, "model.images": None}
