"""Checkpoints: logical tensors on disk, written by any layout and read by any other.

    checkpoints/
      step_00000100/
        manifest.json             every logical tensor: shape, dtype, digest; which file holds which slice;
                                  the run's state
        rank_00000.safetensors    the slices that rank 0 wrote
        ...

A tensor has a name and a global shape, never a rank: a reader asks for the slice its own `Shard` describes,
and gets it from whichever files overlap it. JSON and safetensors only; nothing that is loaded can run code.

A save has four steps (`saver`, `write`, `folder`):

1. The ranks agree on a token, and each writes `rank_N.safetensors` in `step_N.<token>.partial`. Ranks that
   hold the same tensors divide them by bytes. A rank hashes its file while it writes, syncs it to the disk,
   and reads it back; both bypass the page cache where the file system supports `O_DIRECT`.
2. Each rank renames its index, `rank_N.json`, into place: its file is on the disk.
3. Rank 0 merges the indexes into the manifest, checks that the slices tile every tensor, and renames the
   folder to `step_N`. This rename is the commit, and no pointer file can become stale.
4. Rank 0 deletes the checkpoints that `checkpoint.keep` no longer keeps, each after a rename. The newest one
   has just been read back, so a complete checkpoint always remains.

With `checkpoint.async`, tensors are first copied to host memory, and a thread does these steps without
collectives. Only one save runs at a time.

The manifest (`manifest`, `slices`) begins with a SHA-256 of itself. It has the size and XXH3-128 digest of
each file, the shape, dtype and content digest (`digest`) of each tensor, and five columns of numbers with a
row for each slice. A tensor's content digest is the same in every layout. Digests detect accidents, not
attacks, so a manifest is validated before it is used.

Names of tensors: `model/` has master weights, `adam_m/` and `adam_v/` the moments of AdamW, `residual/` what
gradient compression has not sent yet, and `basis/` the factors of its low-rank form. To read a slice:

    reader = Reader(Path("runs/gpt_1b/checkpoints/step_00001000"))
    box = TensorSlice(global_shape=(50304, 2048), offset=(1024, 0), local_shape=(512, 2048))
    rows = reader.read("model/embedding.weight", box)
"""

from megacore.checkpoint.folder import checkpoints_in, locate, newest_whole, opened, warn_of_damage
from megacore.checkpoint.read import Reader
from megacore.checkpoint.saver import Ranks, Saved, Saver
from megacore.checkpoint.write import Layout, LocalTensor, write_safetensors
