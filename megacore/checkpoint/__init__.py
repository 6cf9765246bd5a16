"""Checkpoints: logical tensors on disk, written by any layout and read by any other.

    checkpoints/
      step_00000100/
        manifest.json             every logical tensor: its shape, dtype, and which file holds which slice of it; the run's state
        rank_00000.safetensors    the slices that rank 0 held
        ...

A tensor has a name and a global shape, never a rank: a reader asks for the slice its own `Shard` describes,
and gets it from whichever files overlap it. JSON and safetensors only; nothing that is loaded can run code.
"""

from megacore.checkpoint.read import Reader, checkpoints_in, find_latest, locate
from megacore.checkpoint.write import Layout, LocalTensor, pack, save, save_stream, write_safetensors

__all__ = [
    "Layout",
    "LocalTensor",
    "Reader",
    "checkpoints_in",
    "find_latest",
    "locate",
    "pack",
    "save",
    "save_stream",
    "write_safetensors",
]
