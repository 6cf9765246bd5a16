"""How long attention takes on this device, forward and backward, by the formula (eager)
and by PyTorch's kernel (sdpa).

What `model.attention=auto` chooses is this table in a rule, `megacore/config/implied.py`. Each time is the
median of the calls of half a second, after two; the two ways take turns.
"""

from collections.abc import Iterator
from itertools import product
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.training import join
from megacore.config import Config
from megacore.config.implied import attention_of
from megacore.distributed.rank_info import RankInfo
from megacore.model.attention import Attention
from megacore.model.layers import DTYPES
from megacore.model.stage import whole_model
from megacore.tools.cli import Parser, counts, exit_with
from megacore.tools.settings.load import resolve

EXAMPLE = "OMP_NUM_THREADS=2 python -m benchmarks.attention --lengths 256,1024"
HEADS, TOKENS = 4, 2048


def config_of(kind: str, precision: str, seq_len: int, head_size: int) -> Config:
    """A block with such an attention, and sequences of together about `TOKENS` tokens."""
    model = {
        "num_layers": 1,
        "num_heads": HEADS,
        "hidden_size": HEADS * head_size,
        "vocab_size": 2,
        "attention": kind,
    }
    batch = max(1, TOKENS // seq_len)
    train = {
        "precision": precision,
        "seq_len": seq_len,
        "micro_batch_size": batch,
        "global_batch_size": batch,
    }
    return resolve({"model": model, "train": train}, [], "attention", 1).config


def calls(config: Config, device: torch.device) -> Iterator[float]:
    """Seconds of forward and backward of one call after the other, of ``[batch, heads, seq,
    head]`` as the qkv layer leaves it.
    """
    model = whole_model(config, device)
    attention = model.inner[0].attention
    assert isinstance(attention, Attention)
    shape = (config.train.micro_batch_size, config.train.seq_len, HEADS, 3, config.head_size)
    qkv = torch.randn(shape, dtype=DTYPES[config.train.precision], device=device, requires_grad=True)
    while True:
        started = perf_counter()
        y: Tensor = attention.attend(*attention.heads(qkv, None))
        y.backward(torch.ones_like(y))
        if device.type == "cuda":
            torch.cuda.synchronize()
        yield perf_counter() - started


def main(argv: list[str]) -> None:
    """Prints a line for each precision, length and head size."""
    parser = Parser(
        "Time attention on this device, forward and backward, for each implementation.",
        example=EXAMPLE,
        notes="Prints milliseconds and what model.attention=auto chooses. The implementations take turns.",
        page="benchmarks/README.md",
    )
    parser.add_argument(
        "--lengths",
        type=counts,
        default="64,128,256,512,1024,2048,4096",
        metavar="N,N",
        help="sequence lengths, in tokens",
    )
    parser.add_argument("--head-sizes", type=counts, default="32,64,128", metavar="N,N", help="head sizes")
    parser.add_argument(
        "--precisions", default="fp32,bf16", metavar="NAME,NAME", help="precisions: fp32, bf16, fp16"
    )
    parser.add_alias("--heads", "--head-sizes")
    args = parser.parse_args(argv)
    mesh = join(config_of("sdpa", "fp32", 64, 64), RankInfo())
    print(f"{mesh.device}, {torch.get_num_threads()} threads, {HEADS} heads, ms")
    print("precision | tokens | head | eager | sdpa | eager is | auto takes")
    for precision, head, length in product(args.precisions.split(","), args.head_sizes, args.lengths):
        sizes = (precision, length, head)
        contenders = [calls(config_of(kind, *sizes), mesh.device) for kind in ("eager", "sdpa")]
        seconds: list[list[float]] = [[], []]
        for contender in contenders:
            next(contender), next(contender)
        while sum(seconds[0]) + sum(seconds[1]) < 1.0 or len(seconds[0]) < 3:
            for own, contender in zip(seconds, contenders, strict=True):
                own.append(next(contender))
        eager, sdpa = (median(own) for own in seconds)
        chosen = attention_of(config_of("auto", *sizes), mesh.device.type)
        print(
            f"{precision} | {length} | {head} | {eager * 1e3:.2f} | {sdpa * 1e3:.2f} | "
            f"{sdpa / eager:.2f}× | {chosen}",
            flush=True,
        )


if __name__ == "__main__":
    exit_with(main)
