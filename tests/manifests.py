"""Manifests of checkpoints as somebody writes them who knows to renew their digests, and as earlier formats had them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from megacore.checkpoint.digest import add_digests, content_digest, digest_text
from megacore.checkpoint.manifest import MANIFEST, sealed


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest of the checkpoint in folder `path`, and its digest with it."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["manifest_sha256"]
    edit(manifest)
    (path / MANIFEST).write_bytes(sealed(manifest))


def aged(path: Path, version: int) -> None:
    """Makes the checkpoint what format `version` had: content digests that say nothing of names, and in version 2 SHA-256 of files."""

    def age(manifest: dict[str, Any]) -> None:
        manifest["format_version"] = version
        for tensor in manifest["tensors"].values():
            for piece in tensor["slices"]:
                content = load_file(path / piece["file"])[piece["key"]]
                piece["digest"] = digest_text(content_digest(content, piece["offset"], 0))
            tensor["digest"] = add_digests([piece["digest"] for piece in tensor["slices"]])
        for name, file in manifest["files"].items() if version == 2 else ():
            manifest["files"][name] = {"bytes": file["bytes"], "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest()}

    edit_manifest(path, age)
