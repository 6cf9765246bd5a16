"""Checkpoint manifests that a test edits, as another program could."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.checkpoint.digest import digest_text
from megacore.checkpoint.manifest import MANIFEST, Manifest, sealed
from megacore.checkpoint.slices import Slices
from megacore.distributed.shard import piece_number


def edit_text(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes the JSON of the manifest of the checkpoint in folder `path`, and its digest with it."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["manifest_sha256"]
    edit(manifest)
    (path / MANIFEST).write_bytes(sealed(manifest))


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """The same, but shows `edit` the slices as an object each, in the list of their tensor."""

    def change(content: dict[str, Any]) -> None:
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
