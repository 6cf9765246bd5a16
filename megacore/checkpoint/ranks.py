"""What ranks tell one another about a checkpoint. Every method is collective. Only the main thread calls them: collectives of two
threads would mix."""

import torch
import torch.distributed as dist

from megacore.distributed.collectives import all_reduce, broadcast, broadcast_text
from megacore.distributed.mesh import Mesh

TEXT_BYTES = 1 << 14


class Ranks:
    """The ranks of a mesh, which save or read a checkpoint together. Any other object with its methods, `rank` and `world` will do."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank, self.world = mesh, mesh.place.rank, mesh.place.world_size

    def first(self, text: str) -> str:
        """On every rank, the text of the lowest rank that has one; "" if all are empty.

        It takes one small reduction, and a broadcast where there is a text.
        """
        speaker = torch.tensor(self.rank if text else self.world, device=self.mesh.device)
        source = int(all_reduce(speaker, self.mesh.world, dist.ReduceOp.MIN))
        if source == self.world:
            return ""
        fits = text.encode(errors="backslashreplace")[:TEXT_BYTES].decode(errors="ignore")
        return broadcast_text(fits, self.mesh.world, self.mesh.device, TEXT_BYTES, source)

    def total(self, number: int) -> int:
        """The sum of the ranks' numbers."""
        return int(all_reduce(torch.tensor(number, device=self.mesh.device), self.mesh.world))

    def share(self, content: bytes) -> bytes:
        """Rank 0's `content` on every rank, of any size. It takes two broadcasts, of the size and of the bytes."""
        size = int(broadcast(torch.tensor(len(content), device=self.mesh.device), self.mesh.world))
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8) if self.rank == 0 else torch.empty(size, dtype=torch.uint8)
        return broadcast(buffer.to(self.mesh.device), self.mesh.world).cpu().numpy().tobytes()
