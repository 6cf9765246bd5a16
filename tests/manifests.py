"""Manifests edited as if by somebody, and aged to formats before."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from megacore.checkpoint.digest import content_digest, digest_text
from megacore.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Manifest, sealed
from megacore.checkpoint.slices import Slices
from megacore.distributed.shard import piece_number


def edit_text(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes the JSON of the manifest of the checkpoint in folder `path`, and its digest with it."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["manifest_sha256"]
    edit(manifest)
    (path / MANIFEST).write_bytes(sealed(manifest))


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """The same, but shows the slices of each tensor as the objects that format 4 had."""

    def change(content: dict[str, Any]) -> None:
        if content["format_version"] < 5:
            edit(content)
            return
        unpack(path, content)
        edit(content)
        pack(content)

    edit_text(path, change)


def unpack(path: Path, content: dict[str, Any]) -> None:
    """Makes the columns objects."""
    manifest = Manifest.of_text((path / MANIFEST).read_bytes())
    del content["slices"]
    for name, tensor in content["tensors"].items():
        tensor["slices"] = [
            {
                "file": p.file,
                "key": p.key,
                "offset": [*p.offset],
                "shape": [*p.shape],
                "digest": digest_text(p.digest),
            }
            for p in manifest.pieces(name)
        ]


def pack(content: dict[str, Any]) -> None:
    """Makes the objects columns, if they are still there."""
    rows, files = [], [*content.get("files", {})]
    for tensor in content.get("tensors", {}).values():
        for p in tensor["slices"]:
            rows.append(
                (
                    files.index(p["file"]),
                    piece_number(p["key"]),
                    p["offset"],
                    p["shape"],
                    int(p["digest"], 16),
                )
            )
    content["tensors"] = {
        name: {**tensor, "slices": len(tensor["slices"])}
        for name, tensor in content.get("tensors", {}).items()
    }
    dims = max((len(tensor["shape"]) for tensor in content.get("tensors", {}).values()), default=0)
    content["slices"] = Slices.of(rows).widened(dims).texts()


def aged(path: Path, version: int) -> None:
    """Makes the checkpoint what format `version` had: an object a slice; before 4 content digests that say
    nothing of names; and in 2 SHA-256 of files.
    """

    def age(content: dict[str, Any]) -> None:
        assert content["format_version"] == FORMAT_VERSION
        unpack(path, content)
        content["format_version"] = version
        for tensor in content["tensors"].values() if version < 4 else ():
            for piece in tensor["slices"]:
                stored = load_file(path / piece["file"])[piece["key"]]
                piece["digest"] = digest_text(content_digest(stored, piece["offset"], 0))
            tensor["digest"] = digest_text(sum(int(piece["digest"], 16) for piece in tensor["slices"]))
        for name, file in content["files"].items() if version == 2 else ():
            content["files"][name] = {
                "bytes": file["bytes"],
                "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest(),
            }

    edit_text(path, age)
