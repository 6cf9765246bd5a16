"""Hugging Face model folders: config.json, and safetensors in one file or in several with an index.

A folder that somebody else made may have links to any file of the user. Only files of the folder itself are
read or copied.
"""

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import path as os_path
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacore.checkpoint import Layout, write_safetensors
from megacore.checkpoint.format import DTYPE_CODES
from megacore.errors import CheckpointError, ConfigError
from megacore.files import read_text
from megacore.tools.interchange.stream import pack

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FLOATS = {DTYPE_CODES[dtype] for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
WHOLE = "copy the whole folder again"
# What wrappers put before the names of a model's tensors: torch.compile, FSDP and activation checkpointing at
# any module, DDP, DeepSpeed and PEFT at the whole model.
WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
OUTER_WRAPPERS = ("module.", "_forward_module.", "base_model.model.")
# Parameters of PEFT's adapters, and the weights that they change.
ADAPTER = re.compile(
    r"\.(lora_\w+|base_layer|modules_to_save|original_module|(ia3|oft|boft|vera|hada|lokr)_\w+)\b"
)
ADAPTER_CONFIG = "adapter_config.json"
MERGED = "a merged model: PEFT's merge_and_unload() and then save_pretrained() write one"


class Folder:
    """An open model folder. Its files are mapped, and a tensor is read when it is asked for.

    Raises:
        CheckpointError: naming the file or the tensor that is missing, damaged, or of a dtype that is no
            float's; or a link out of the
            folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise CheckpointError(
                str(path),
                "there is no such folder",
                "a local one, with config.json and safetensors: nothing is downloaded",
            )
        refuse_foreign(path)
        if (path / ADAPTER_CONFIG).is_file():
            raise CheckpointError(str(path), f"holds an adapter of PEFT ({ADAPTER_CONFIG})", MERGED)
        self.config = read_json(path / CONFIG)
        self.shapes: dict[str, tuple[int, ...]] = {}
        # by the tensors in them, whose names are here without those of wrappers
        self._files: dict[str, safe_open] = {}
        self._stored_names: dict[str, str] = {}  # with them
        for name in self._file_names():
            self._open(path / name)

    def read(self, name: str) -> Tensor:
        """A tensor in its file's dtype, mapped from the file."""
        return self._files[name].get_tensor(self._stored_names[name])

    @property
    def transformers_reads_it(self) -> bool:
        """Whether transformers finds the same model in the folder.

        It does not know the names of wrappers, and reads no JSON with a byte order mark.
        """
        is_wrapped = any(name != stored_name for name, stored_name in self._stored_names.items())
        files = self.path.glob("*.json")
        return not is_wrapped and not any(file.read_bytes().startswith(codecs.BOM_UTF8) for file in files)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by their names without those of wrappers, mapped from the files."""
        return {name: self.read(name) for name in self.shapes}

    def _file_names(self) -> list[str]:
        if (self.path / INDEX).is_file():
            index = self.path / INDEX
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(
                isinstance(name, str) and Path(name).name == name and len(name) < 256
                for name in names.values()
            ):
                raise CheckpointError(
                    str(index), "has no weight_map from tensors to files of this folder", WHOLE
                )
            for name in sorted(set(names.values())):
                if not (self.path / name).is_file():
                    raise CheckpointError(str(index), f"names {name}, which is missing", WHOLE)
            return sorted(set(names.values()))
        if (self.path / SINGLE).is_file():
            return [SINGLE]
        if pickled := sorted(file.name for file in self.path.glob("*.bin")):
            right = (
                "convert it to safetensors: transformers does with save_pretrained, where you trust the file"
            )
            raise CheckpointError(
                str(self.path), f"holds {pickled[0]}, a pickle, which could run code and is not loaded", right
            )
        raise CheckpointError(
            str(self.path),
            f"has neither {SINGLE} nor {INDEX}",
            "a folder with the model's weights as safetensors",
        )

    def _open(self, file: Path) -> None:
        try:
            opened = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(str(file), f"is damaged or cut off: {error}", WHOLE) from error
        for stored_name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
            if ADAPTER.search(stored_name):
                wrong = f"holds {stored_name}, of an adapter of PEFT that is not merged"
                raise CheckpointError(str(file), wrong, MERGED)
            name = without_wrappers(stored_name)
            if name in self._files:
                raise CheckpointError(
                    str(file), f"holds the tensor {name} a second time", "each tensor in one file"
                )
            header = opened.get_slice(stored_name)
            if header.get_dtype() not in FLOATS:
                wrong = f"tensor {name} is {header.get_dtype()}"
                raise CheckpointError(
                    str(file), wrong, f"{' '.join(sorted(FLOATS))}; quantized weights cannot be converted"
                )
            self.shapes[name], self._files[name] = tuple(header.get_shape()), opened
            self._stored_names[name] = stored_name


def without_wrappers(name: str) -> str:
    """Return a tensor's name as the model itself has it, without what wrappers put before it."""
    name = WRAPPERS.sub("", name)
    while outer := next((prefix for prefix in OUTER_WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(outer)
    return name


def refuse_foreign(folder: Path) -> None:
    """Refuses a model folder with an entry that is a link to somewhere else, or neither a file nor a folder.

    A folder in the cache of Hugging Face's hub, ``models--…/snapshots/<revision>``, may have links to the
    ``models--…/blobs`` that it shares with other revisions.

    Raises:
        CheckpointError: naming the entry.
    """
    home = Path(os_path.realpath(folder))
    in_cache = (
        len(home.parents) > 1
        and home.parent.name == "snapshots"
        and home.parents[1].name.startswith("models--")
    )
    blobs = home.parents[1] / "blobs" if in_cache else None
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(
            str(folder), f"cannot be read: {error.strerror}", "a folder that this user may read"
        ) from None
    for entry in entries:
        real = Path(os_path.realpath(entry))
        if entry.is_symlink() and home not in real.parents and real.parent != blobs:
            raise CheckpointError(
                str(entry),
                f"is a link to {real}, out of the model's folder",
                "the file itself, where it is wanted",
            )
        if entry.exists() and not (entry.is_file() or entry.is_dir()):  # a pipe would be waited for
            raise CheckpointError(str(entry), "is neither a file nor a folder", WHOLE)


def read_json(file: Path) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises `CheckpointError` if there is none."""
    try:
        value = json.loads(read_text(file))
    except FileNotFoundError as error:
        raise CheckpointError(str(file), "is missing", "a model folder has one") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(str(file), f"is no JSON: {getattr(error, 'strerror', error)}", WHOLE) from error
    if not isinstance(value, dict):
        raise CheckpointError(str(file), "holds no JSON object", WHOLE)
    return value


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes a JSON object as transformers does, sorted and indented."""
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_weights(folder: Path, layout: Layout, tensors: Iterator[Tensor], file_bytes: int) -> int:
    """Write the tensors of `layout` as they come, in files of at most `file_bytes`;
    returns how many files.
    """
    files = pack(layout, file_bytes)
    if len(files) == 1:
        write_safetensors(folder / SINGLE, layout, tensors)
        return 1
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(file, {name: layout[name] for name in names}, tensors)
        weight_map |= dict.fromkeys(names, file.name)
    total = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in layout.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(files)


@contextmanager
def aside(output: Path) -> Iterator[Path]:
    """A context with a folder `output`.partial to write in.

    It becomes `output` if the block succeeds, and is deleted if it fails.

    Raises:
        ConfigError: `output` holds something already, or cannot be made.
        CheckpointError: the disk refused.
    """
    output = Path(os_path.abspath(output))
    partial = output.parent / (output.name + ".partial")
    try:
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise ConfigError("--output", f"{output} is there already", "a folder that is not, or empty")
        partial.mkdir(parents=True)
    except FileExistsError as error:
        wrong = f"{partial} is there: of a conversion that is running, or was killed"
        raise ConfigError("--output", wrong, "delete it if none is running, or another folder") from error
    except OSError as error:
        raise ConfigError(
            "--output", f"{partial} cannot be made: {error.strerror}", "a folder that can be made and written"
        ) from error
    try:
        yield partial
        partial.rename(output)
    except BaseException as error:
        rmtree(partial)
        if isinstance(error, OSError):
            raise CheckpointError(
                str(output), f"could not be written: {error.strerror or error}", "nothing was kept of it"
            ) from error
        raise
