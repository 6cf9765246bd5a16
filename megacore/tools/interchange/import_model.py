"""Imports another project's model as a run's folder."""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint import Layout, Reader
from megacore.checkpoint.weights import SPECIAL_TOKENS
from megacore.config import Config
from megacore.distributed.shard import Shard
from megacore.errors import CheckpointError, ConfigError
from megacore.tools.interchange.check_conversion import (
    check_layers,
    compare_logits,
    require_same,
    transformers_if_installed,
)
from megacore.tools.interchange.export_tokenizer import (
    FAST,
    GENERATION,
    SENTENCEPIECE,
    SpecialTokens,
    copy_tokenizer,
)
from megacore.tools.interchange.families import TRAINING_KEYS, family_for_hf
from megacore.tools.interchange.folder import CONFIG, Folder, aside, read_json, write_json
from megacore.tools.interchange.mapped import Mapped, stored_name
from megacore.tools.interchange.nanogpt import HEAD, IGNORED, nanogpt_tensors, read_nanogpt
from megacore.tools.interchange.settings import get
from megacore.tools.interchange.stream import first_buffers, save_stream
from megacore.tools.settings.load import parse_override, resolve, set_value

FILE_BYTES = 4 << 30
# of `train.seq_len` where a model was made for more: fit for a start, and changed by an override
LONGEST = 2048
# a tenth of what trains from nothing: the model is to stay
GENTLE = {"lr": 3e-5, "min_lr": 3e-6, "warmup_steps": 20, "weight_decay": 0.01}


@dataclass(frozen=True)
class Peer:
    """A model of another project, with its files open."""

    path: Path
    architecture: str
    model: dict[str, Any]  # the `model` section that is the same function
    mapped: Callable[[Config], list[Mapped]]
    ignored: tuple[re.Pattern[str], ...]  # tensors that are none of the model's parameters
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    beyond: range = range(0)  # layers behind the last, whose tensors are left out, and that is said
    token_ids: dict[str, Any] = field(default_factory=dict)  # of special tokens, as config.json has them

    def names(self, mapped: list[Mapped]) -> dict[str, str]:
        """The name in the files of every tensor in `Mapped.peers`.

        Raises:
            CheckpointError: naming a tensor that is missing, of another shape, or none of the model's.
        """
        found = {}
        for name, shape in ((name, shape) for tensor in mapped for name, shape in tensor.peers.items()):
            stored = stored_name(name, self.shapes)
            right = f"a whole {self.architecture} of the sizes in its configuration"
            if stored is None:
                raise CheckpointError(str(self.path), f"has no tensor {name} of shape {shape}", right)
            if self.shapes[stored] != shape:
                raise CheckpointError(
                    str(self.path), f"tensor {stored} has shape {self.shapes[stored]}, not {shape}", right
                )
            found[name] = stored
        embedding = found[next(iter(mapped[0].peers))]
        for stored in sorted(self.shapes.keys() - set(found.values())):
            # some store it under both names
            tied = stored == HEAD and torch.equal(self.read(stored), self.read(embedding))
            if (
                not tied
                and stored not in self.left_out
                and not any(pattern.fullmatch(stored) for pattern in self.ignored)
            ):
                wrong = f"holds the tensor {stored}, which no {self.architecture} of its configuration has"
                raise CheckpointError(str(self.path), wrong, "a model without additions")
        return found

    @cached_property
    def left_out(self) -> list[str]:
        """The tensors in the files of layers behind the last."""
        return [name for name in self.shapes if (layer := LAYER.match(name)) and int(layer[1]) in self.beyond]


def hf_peer(path: Path) -> Peer:
    """Opens a Hugging Face model folder. Raises `CheckpointError` if no family here expresses it."""
    folder = Folder(path)
    family = family_for_hf(folder.config, str(path / CONFIG))
    try:
        model = family.read(folder.config)
        further = (get(folder.config, family.beyond, 1, (int, type(None))) or 0) if family.beyond else 0
    except CheckpointError as error:
        raise CheckpointError(str(path / CONFIG), error.wrong, error.right) from error
    beyond = range(model["num_layers"], model["num_layers"] + further)
    mapped = family.mapped_from(folder.shapes, folder.config)
    token_ids = {key: value for key, value in folder.config.items() if key.endswith("_token_id")}
    return Peer(
        path,
        family.architecture,
        model,
        mapped,
        family.ignored,
        folder.shapes,
        folder.read,
        beyond,
        token_ids,
    )


def nanogpt_peer(path: Path) -> Peer:
    """Opens a ``ckpt.pt`` of nanoGPT."""
    model, tensors = read_nanogpt(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Peer(path, "nanoGPT", model, nanogpt_tensors, IGNORED, shapes, tensors.__getitem__)


LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,9})\.")  # how the name of a tensor of a layer begins
PEERS = {"hf": hf_peer, "nanogpt": nanogpt_peer}


def import_model(
    peer: Peer, output: Path, overrides: list[str], compare_layers: int | None, say: Callable[[str], None]
) -> None:
    """Write `peer` as the new run `output`: a checkpoint of step 0 that holds weights alone, and a
    config.json to fine-tune them with, in a folder of its own. What follows from other values (the last step
    of the decay, the data ranks) is left open in it.

    Only one logical tensor is in memory at a time, until the comparison with transformers, which holds one
    whole model (cut to `compare_layers`).

    Args:
        overrides: `section.key=value`, of the run's config.
        say: takes a line for the user.

    Raises:
        UserError: whatever is wrong; `output` is then as it was.
    """
    transformers = transformers_if_installed()
    sections: dict[str, Any] = {
        "model": dict(peer.model),
        "train": {"seq_len": min(peer.model["max_positions"], LONGEST), "precision": "fp32"},
        "optim": dict(GENTLE),
        "checkpoint": {"every": 100, "weights": str(output)},
        "log": {"dir": f"{output}_finetuned"},
    }
    for name in (SENTENCEPIECE, FAST[0]):
        if "data" not in sections and (peer.path / name).is_file():
            sections["data"] = {"tokenizer": str(output / "tokenizer" / name)}
    for override in overrides:
        set_value(sections, *parse_override(override))
    config = resolve(deepcopy(sections), [], output.name, 1).config
    if config.model.is_custom:
        raise ConfigError(
            config.model.custom_key, f"the tensors of {peer.path} are those of megacore's own blocks", "null"
        )
    if config.model.num_layers > len(peer.shapes):  # before so many are looked for
        wrong = f"has {len(peer.shapes)} tensors, too few for {config.model.num_layers} layers"
        raise CheckpointError(
            str(peer.path), wrong, f"a whole {peer.architecture} of the sizes in its configuration"
        )
    check_layers(compare_layers, config)
    mapped = peer.mapped(config)
    try:
        names = peer.names(mapped)
    except CheckpointError as error:
        changed = [
            key
            for key, value in sections["model"].items()
            if key not in TRAINING_KEYS and peer.model.get(key) != value
        ]
        if not changed:
            raise
        wrong = f"is {json.dumps(sections['model'][changed[0]])}, and then {peer.path} {error.wrong}"
        right = f"as the files have it, without {' '.join(f'model.{key}' for key in changed)}"
        raise ConfigError(f"model.{changed[0]}", wrong, right) from error
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    with aside(output) as partial:
        settings = config.model_dump(mode="json", by_alias=True)
        write_json(partial / CONFIG, sections | {"model": settings["model"]})
        (partial / "tokenizer").mkdir()
        copy_tokenizer(peer.path, partial / "tokenizer")
        if not any((partial / "tokenizer").iterdir()):
            (partial / "tokenizer").rmdir()
        layout: Layout = {tensor.key: (tensor.own(dtype), tensor.shape) for tensor in mapped}
        # which the peer has not
        buffers = {name: value for name, value in first_buffers(config).items() if name not in layout}
        layout |= {name: (value.dtype, tuple(value.shape)) for name, value in buffers.items()}
        origin = {"path": str(peer.path), "architecture": peer.architecture}
        state = {
            "samples": 0,
            "seed": config.train.seed,
            "model": settings["model"],
            "config": settings,
            "weights_of": origin,
        }
        if peer.path.is_dir():
            generation = peer.path / GENERATION
            special_tokens = SpecialTokens(
                peer.token_ids,
                read_json(generation) if generation.is_file() else None,
                sections.get("data", {}).get("tokenizer"),
            )
            state[SPECIAL_TOKENS] = asdict(special_tokens)
        # One at a time.
        joined = (
            tensor.join({name: peer.read(names[name]) for name in tensor.peers}).to(tensor.own(dtype))
            for tensor in mapped
        )
        reader = Reader(
            save_stream(
                partial / "checkpoints", 0, layout, chain(joined, buffers.values()), state, FILE_BYTES
            )
        )
        say(
            f"{peer.path}: {len(names)} tensors of {peer.architecture}, in {len(reader.manifest.files)} "
            "file(s)"
        )
        for tensor in mapped:
            for name, ours in tensor.split(reader.read(tensor.key, Shard(tensor.shape))).items():
                require_same(peer.path, names[name], peer.read(names[name]).to(tensor.own(dtype)), ours)
        if peer.left_out:
            say(
                f"{len(peer.left_out)} tensors of layers behind the last are left out: they guess tokens "
                "further ahead"
            )
        say(f"read back: all {len(names)} tensors are those of {peer.architecture}, in every bit")
        if not peer.path.is_dir():
            say("logits were not compared: they can be with a model of transformers only")
        elif transformers is None:
            say("logits were not compared: transformers is not installed")
        else:
            say(compare_logits(transformers, config, reader, dtype, peer.path, compare_layers))
    say(f"wrote {output}, whose {CONFIG} fine-tunes it")
