"""Checkpoints: logical tensors on disk, written by any layout and read by any other.

    checkpoints/
      step_00000100/
        manifest.json             every logical tensor: shape, dtype, digest; which file holds which slice;
                                  the run's state
        rank_00000.safetensors    the slices that rank 0 wrote
        ...

A tensor has a name and a global shape, never a rank: a reader asks for the slice its own `Shard` describes,
and gets it from whichever files overlap it. JSON and safetensors only; nothing that is loaded can run code.
"""

from megacore.checkpoint.folder import checkpoints_in, locate, newest_whole, opened, warn_of_damage
from megacore.checkpoint.read import Reader
from megacore.checkpoint.saver import Ranks, Saved, Saver
from megacore.checkpoint.write import Layout, LocalTensor, write_safetensors
