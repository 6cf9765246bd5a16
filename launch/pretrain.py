"""Trains a GPT: the script that a launcher starts once for every rank."""

import argparse
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout runs without being installed

from megacore.cli import Parser
from megacore.config import Resolved, load
from megacore.errors import ConfigError, UserError
from megacore.place import Place, missing_hostfile, place_from_environment

EXAMPLE = "deepspeed --hostfile hostfile launch/pretrain.py --config configs/gpt_1b.json train.steps=1000"
MORE = """The same with torchrun, srun or mpirun; `python launch/pretrain.py --config configs/gpt_tiny.json` is one rank alone.
Exit status: 0 finished, 2 bad config, data or arguments, 75 stopped on request after saving, else failed."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(EXAMPLE, f"{__doc__}\n{MORE}")
    parser.add_argument("--config", required=True, metavar="FILE", help="a JSON file, such as configs/gpt_tiny.json")
    parser.add_argument("--print-config", action="store_true", help="print every value and where it came from, and stop")
    # What the deepspeed launcher adds; it is in the environment too, and read there.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="JSON values over the file's, such as train.steps=20")
    return parser.parse_intermixed_args(argv)


def main() -> int:
    """One rank's run; returns its exit status."""
    rank = 0
    try:
        place = place_from_environment()
        rank = place.rank
        args = parse(sys.argv[1:])
        if hostfile := missing_hostfile():
            raise ConfigError("--hostfile", f"{hostfile} does not exist", "a file with lines such as `localhost slots=4`, or no --hostfile")
        # What can be wrong is found here, before torch is imported and before any rank waits for another.
        resolved = load(args.config, args.overrides, place.world_size)
        if args.print_config:
            if rank == 0:
                print(resolved.table())
            return 0
        return train(resolved, place)
    except UserError as error:
        if rank == 0:
            print(error, file=sys.stderr)
        return 2


def train(resolved: Resolved, place: Place) -> int:
    """Joins the mesh and trains."""
    config = resolved.config

    from megacore.mesh import Mesh, pick_device
    from megacore.train.cpu import keep_freed_memory, multiply_with_onednn, share_cores
    from megacore.train.failure import GRACE_SECONDS, fail
    from megacore.train.inputs import Inputs
    from megacore.train.trainer import Trainer

    try:
        device = pick_device(config, place)
        inputs = Inputs(config, place.rank)
    except UserError as error:
        if place.rank > 0:  # what only this machine lacks must be said; what all lack, rank 0 has said by then
            time.sleep(GRACE_SECONDS)
            print(f"rank {place.rank} on {socket.gethostname()}: {error}", file=sys.stderr)
        raise
    if device.type == "cpu":
        share_cores(place.local_world_size)
        multiply_with_onednn()
        keep_freed_memory()
    mesh = None
    try:
        mesh = Mesh(config, place, device)
        status = Trainer(config, mesh, inputs).run()
    except BaseException as error:
        fail(error, place, mesh)
        raise
    mesh.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
