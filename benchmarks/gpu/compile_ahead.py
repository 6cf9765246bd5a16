"""Compile the fused kernels of some models for an H100 or H200, on a machine
without a GPU, into Triton's cache.

`benchmarks.gpu.prepare` runs this with the target machine's version of Triton on PYTHONPATH and the folder of
the cache in TRITON_CACHE_DIR.
"""

import argparse
import hashlib
import zipfile
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import cache, driver

from benchmarks.gpu.parts import GPT_OPERATIONS
from benchmarks.kernel_compile import TARGETS, launches_of
from benchmarks.kernel_operations import model_sizes
from megacore.errors import ConfigError
from megacore.tools.cli import Parser, exit_with

EXAMPLE = "TRITON_CACHE_DIR=cache python3 -m benchmarks.gpu.compile_ahead gpt_124m"
LIBRARY = "triton/_C/libtriton.so"


class StandInDriver:
    """What Triton's runtime asks of a GPU's driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def key_of_wheel(wheel: Path) -> str:
    """Return the key that the Triton of `wheel` gives its version, from the key of the Triton that runs here.

    The key contains a digest of Triton's library, which is built for one version of Python: the wheel may be
    for another version than this process has. The other files are the same.
    """
    installed = Path(triton.__file__).parents[1] / LIBRARY
    with installed.open("rb") as library:
        installed_digest = hashlib.file_digest(library, "sha256").hexdigest()
    with zipfile.ZipFile(wheel) as files, files.open(LIBRARY) as library:
        digest = hashlib.file_digest(library, "sha256").hexdigest()  # type: ignore[arg-type]
    key = cache.triton_key()
    if installed_digest not in key:
        raise ConfigError("triton", f"the cache of {triton.__version__} has another kind of key", "3.6.0")
    return key.replace(installed_digest, digest)


def compile_models(models: tuple[str, ...], target: GPUTarget) -> int:
    """Compile what `models` launch; return the number of kernels.

    Compiled are the operations of GPT-2 at each model's sizes, forward and backward. Triton's own runtime
    specialises and compiles them, without launching them, so the keys are those of a real launch. A step has
    few other launches, such as an optimizer's over tensors of other sizes; those are compiled where they run.
    """
    driver.set_active(StandInDriver(target))
    compiled = set()
    for operation, size in model_sizes(models):
        if operation not in GPT_OPERATIONS:
            continue
        for launch in launches_of(operation, size, torch.bfloat16):
            kernel = launch.kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
            compiled.add(kernel.hash)
    return len(compiled)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        "Compile the fused kernels of some models for an H100 or H200, without a GPU.",
        example=EXAMPLE,
        page="benchmarks/README.md",
    )
    parser.add_argument("models", nargs="+", metavar="NAME", help="names of configs/, such as gpt_124m")
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="Triton of the target machine, if its Python differs"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Compiles and prints the number of kernels."""
    args = parse(argv)
    key = cache.triton_key() if args.wheel is None else key_of_wheel(args.wheel)
    with mock.patch.object(cache, "triton_key", lambda: key):
        count = compile_models(tuple(args.models), TARGETS["sm_90"])
    print(f"{count} kernels compiled by Triton {triton.__version__}")


if __name__ == "__main__":
    exit_with(main)
