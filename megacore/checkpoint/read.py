"""Reads any slice of any tensor in a checkpoint, and checks that it is what was written."""

import json
import shlex
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacore.checkpoint.digest import MODULUS, content_digest
from megacore.checkpoint.disk import file_digest
from megacore.checkpoint.format import DTYPE_CODES, DTYPES
from megacore.checkpoint.manifest import EARLIER, Manifest, parsed, read_manifest
from megacore.checkpoint.slices import Numbers, Slice, blocks
from megacore.config.model import ModelConfig
from megacore.config.source import COPY
from megacore.distributed.shard import Shard, TensorSlice, overlap, relative
from megacore.errors import CheckpointError
from megacore.model.plain.folder import differing_keys

# Model keys that may change between a checkpoint and the run that resumes it, because they do not change what
# is computed. (If max_positions changes a learned position table, its shape says so.)
FREE_MODEL_KEYS = {
    "source",
    "source_digest",
    "hf",
    "hf_revision",
    "hf_config",
    "hf_version",
    "dropout",
    "attention",
    "init_std",
    "zero_init",
    "kernels",
    "chunked_loss",
    "max_positions",
}
# of training alone
FREE_MODEL_KEYS |= {
    "z_loss",
    "router_balance",
    "balance_coefficient",
    "router_z_loss",
    "router_bias_rate",
    "capacity_factor",
}
# Keys of the config.json of `model.hf` that longer texts may change.
STRETCHED = {"rope_scaling", "rope_parameters", "max_position_embeddings"}
# Keys whose default is what others say.
DERIVED = {
    "num_kv_heads",
    "head_size",
    "ffn_size",
    "expert_ffn_size",
    "router_bias",
    "max_positions",
    "qkv_bias",
    "output_bias",
    "attention_scale",
}

BLOCK_ELEMENTS = 1 << 22  # elements of a tensor that are in memory at once while it is read


class Reader:
    """An open checkpoint. Any rank of any layout reads the slices it needs, in blocks of bounded size.

    Opening checks the manifest, and that every file is there in its recorded size, unless another rank has
    done so and gives the manifest's `text`. Before a slice is first used, all of it is read and compared with
    its digest. A `trusted` reader does not do
    so: all ranks have called `verify` together before.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged or of an unknown version.
    """

    def __init__(self, path: Path, trusted: bool = False, text: bytes | None = None) -> None:
        self.path, self.trusted = path, trusted
        # whether who wants weights alone wants those that were trained, where averages of them evaluate
        self.trained = False
        self.manifest: Manifest = read_manifest(path) if text is None else parsed(path, text)
        # opened once: parsing a header for each slice would be quadratic
        self._files: dict[str, safe_open] = {}
        self._verified: set[tuple[str, str]] = set()

    def trust(self) -> None:
        """Ends comparing what is read: all ranks together have. Lets go of what only comparing needs."""
        self.trusted = True
        self.manifest.text = b""
        self._verified.clear()

    @property
    def step(self) -> int:
        """The step whose update came last before the checkpoint."""
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The JSON state that was given to `Saver.start`."""
        return self.manifest.state

    @property
    def names(self) -> list[str]:
        """The logical tensors, in the order of their names."""
        return sorted(self.manifest.tensors)

    def read(self, name: str, shard: TensorSlice | Shard) -> Tensor:
        """The slice of tensor `name` that `shard` describes, on the CPU, in the dtype it was saved in.

        Raises:
            CheckpointError: no such tensor, another global shape, or a damaged file.
        """
        self.check(name, shard.global_shape)
        out = torch.empty(shard.local_shape, dtype=DTYPES[self.manifest.tensors[name].dtype])
        self.read_into(name, shard, out)
        return out

    @torch.no_grad()
    def read_into(self, name: str, shard: TensorSlice | Shard, out: Tensor) -> None:
        """`read`, copied into `out` (`shard.local_shape`; any dtype, any device), which
        may be a parameter.
        """
        self.check(name, shard.global_shape)
        assert out.shape == shard.local_shape, (
            f"{name}: {tuple(out.shape)} given for a slice of {shard.local_shape}"
        )
        own = TensorSlice(shard.global_shape, shard.offset, shard.local_shape)
        for piece in self.manifest.pieces(name, own):
            box = overlap(piece.offset, piece.shape, own.offset, own.local_shape)
            assert box is not None
            stored = self._stored(name, piece)
            if not self.trusted:
                self._verify_slice(name, piece, stored)
            for block in blocks(box, BLOCK_ELEMENTS):
                out[relative(block, shard.offset)].copy_(stored[relative(block, piece.offset)])

    @property
    def source_copy(self) -> Path | None:
        """The run's own copy of `model.source`, if it is where the run has left it."""
        copy = self.path.parent.parent / COPY
        return copy if copy.is_file() else None

    def check_model(
        self, model: dict[str, Any], otherwise: str = "take another checkpoint", stretch: bool = False
    ) -> None:
        """Refuse a model section that is not the one the checkpoint was written with,
        naming every key that differs.

        A key that it has not, because it is of an earlier release, counts as its default. Those that change
        no shape and no function (dropout) are passed over. `otherwise` tells a user who wants to keep the
        section what to do. `stretch`: only its weights are wanted, so rotary positions may be scaled anew, to
        train on longer texts, and `model.source` may be another file whose tensors are the same.
        """
        recorded = self.state.get("model", {})
        if not isinstance(recorded, dict):
            raise CheckpointError(str(self.path), "the model section in its state is no section", EARLIER)
        was, now = (of.get("source_digest") for of in (recorded, model))
        if was != now and not stretch:
            files = [
                f"model.source of digest {digest}" if digest else "no model.source" for digest in (was, now)
            ]
            right = f"model.source={self.source_copy}" if was and self.source_copy else "the same"
            raise CheckpointError(
                str(self.path),
                f"was written with {files[0]}, and the config has {files[1]}",
                f"{right}, or {otherwise}",
            )
        check_architecture(self.path, recorded, model, otherwise, stretch)
        free = FREE_MODEL_KEYS - ({"max_positions"} if model.get("position") == "learned" else set())
        free |= {"rope_scaling"} if stretch and model.get("rope_scaling") is not None else set()
        if recorded:
            defaults = ModelConfig().model_dump(mode="json")
            recorded = {key: defaults[key] for key in defaults.keys() & model.keys() - DERIVED} | recorded
        # In the schema's order: keys from which others are derived come first.
        if differ := [
            key for key in model if key in recorded and key not in free and recorded[key] != model[key]
        ]:
            was, now = (
                {key: value if isinstance(value := of[key], str) else json.dumps(value) for key in differ}
                for of in (recorded, model)
            )
            said = ", ".join(f"model.{key}={was[key]} (the config says {now[key]})" for key in differ)
            words = " ".join(shlex.quote(f"model.{key}={was[key]}") for key in differ)
            raise CheckpointError(str(self.path), f"was written with {said}", f"set {words}, or {otherwise}")

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a logical tensor that is missing or has another shape.

        Raises:
            CheckpointError: naming it.
        """
        tensor = self.manifest.tensors.get(name)
        right = "set the model section of the config to the one recorded in its manifest.json"
        if tensor is None:
            raise CheckpointError(str(self.path), f"has no tensor {name} of shape {shape}", right)
        if tensor.shape != shape:
            raise CheckpointError(
                str(self.path),
                f"tensor {name} has shape {tensor.shape}, and the model of this config {shape}",
                right,
            )

    def verify(self, part: int = 0, parts: int = 1, note: Callable[[], None] = lambda: None) -> None:
        """Read everything, or number `part` of `parts` equal parts of the files, and compare it
        with the digests of files and of contents. `note` is called now and then, so that somebody
        who watches sees that it moves.

        Raises:
            CheckpointError: naming the file, and where one is to blame the tensor.
        """
        for name in sorted(self.manifest.files)[part::parts]:
            file = self.manifest.files[name]
            try:
                digest = file_digest(self.path / name)
            except OSError as error:
                raise CheckpointError(
                    str(self.path), f"{name} cannot be read: {error.strerror or error}", EARLIER
                ) from error
            self._open(name)
            # which also shows whether the manifest mixes up slices
            for tensor, piece in self._slices_in(name):
                note()
                self._verify_slice(tensor, piece, self._stored(tensor, piece))
            if digest != file.digest:
                raise CheckpointError(
                    str(self.path),
                    f"{name} has changed since it was written, outside of its tensors",
                    EARLIER,
                )

    def verify_tensor(self, name: str) -> None:
        """Read one tensor and compare it with its digest, once.

        Raises:
            CheckpointError: as `verify`.
        """
        for piece in self.manifest.pieces(name):
            self._verify_slice(name, piece, self._stored(name, piece))

    def verify_headers(self) -> None:
        """Open every file and compare its header with the manifest; reads no tensor.

        Raises:
            CheckpointError: as `verify`.
        """
        for file in self.manifest.files:
            # For numpy, which maps no memory: PyTorch takes some hundredths of a second to, and there may be
            # thousands of files.
            opened = self._opened(file, "numpy")
            for name, piece in self._slices_in(file):
                self._header(opened, name, piece)

    @cached_property
    def _by_file(self) -> tuple[Numbers, Numbers]:
        """The slices' rows in the order of files, and for each file the place of its
        first one; at the end, of none.
        """
        order = np.argsort(self.manifest.slices.file, kind="stable")
        return order, np.searchsorted(
            self.manifest.slices.file[order], np.arange(len(self.manifest.files) + 1)
        )

    def _slices_in(self, file: str) -> list[tuple[str, Slice]]:
        """What the manifest says is in a file, with the names of the tensors."""
        (order, starts), place = self._by_file, self.manifest.places[file]
        return list(self.manifest.named(order[starts[place] : starts[place + 1]]))

    def _verify_slice(self, name: str, piece: Slice, stored: Any) -> None:
        """Refuse a slice whose content or name does not match its digest. Each slice is checked once."""
        if (piece.file, piece.key) in self._verified:
            return
        total, identity = 0, self.manifest.identity(name)
        whole = tuple(
            slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True)
        )
        for block in blocks(whole, BLOCK_ELEMENTS):
            total += content_digest(
                stored[relative(block, piece.offset)], tuple(s.start for s in block), identity
            )
        if total % MODULUS != piece.digest:
            wrong = (
                f"tensor {name} has changed in {piece.file} since it was written (its slice at "
                f"{piece.offset})"
            )
            raise CheckpointError(str(self.path), wrong, EARLIER)
        self._verified.add((piece.file, piece.key))

    def _open(self, name: str) -> safe_open:
        """Opens a file, and refuses it unless it holds exactly the tensors that the manifest lists."""
        if name not in self._files:
            self._files[name] = self._opened(name, "pt")
        return self._files[name]

    def _opened(self, name: str, framework: str) -> safe_open:
        try:
            file = safe_open(self.path / name, framework=framework)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(str(self.path), f"{name} is damaged: {error}", EARLIER) from error
        found, expected = set(file.keys()), {piece.key for _, piece in self._slices_in(name)}
        if differ := found ^ expected:
            wrong = (
                f"{name} {'holds' if differ & found else 'lacks'} tensor "
                f"{min(differ & found or differ)[:200]}"
            )
            raise CheckpointError(str(self.path), wrong, f"its manifest says otherwise; {EARLIER}")
        return file

    def _stored(self, name: str, piece: Slice) -> Any:
        """A slice on disk whose header is checked: a lazy safetensors slice, which
        reads the part it is indexed with.
        """
        return self._header(self._open(piece.file), name, piece)

    def _header(self, file: safe_open, name: str, piece: Slice) -> Any:
        stored = file.get_slice(piece.key)
        dtype = DTYPE_CODES[DTYPES[self.manifest.tensors[name].dtype]]
        if tuple(stored.get_shape()) != piece.shape or stored.get_dtype() != dtype:
            wrong = f"tensor {name} is {stored.get_dtype()} {tuple(stored.get_shape())} in {piece.file}"
            raise CheckpointError(
                str(self.path), wrong, f"its manifest says {dtype} {piece.shape}; {EARLIER}"
            )
        return stored


def check_architecture(
    path: Path, recorded: dict[str, Any], model: dict[str, Any], otherwise: str, stretch: bool
) -> None:
    """Refuse another config.json of `model.hf`, see `Reader.check_model`. Where it is does not matter."""
    was, now = recorded.get("hf_config"), model.get("hf_config")
    if (was is None) != (now is None):
        sides = [f"{'no' if content is None else 'a'} model.hf_config" for content in (was, now)]
        wrong = f"was written with {sides[0]}, and the config has {sides[1]}"
        raise CheckpointError(str(path), wrong, f"the same, or {otherwise}")
    if not isinstance(was, dict) or now is None:
        return
    if keys := [key for key in differing_keys(was, now) if not (stretch and key in STRETCHED)]:
        changes = [f"{key}={json.dumps(was.get(key))} (now {json.dumps(now.get(key))})" for key in keys]
        wrong = f"was written with another model.hf_config, of {', '.join(changes)}"
        raise CheckpointError(str(path), wrong, f"that config.json, or {otherwise}")
