"""What documents cost: steps with attention within them, what best-fit packing pads and saves,
how even context ranks' work is.

Steps: a small model trains on one sample, filled with documents of one length, with `data.document_mask` and
without. Counted are the operations that attention's kernels were asked for; predicted is
`megacore/tools/choices/flops.py`. Times are medians of rounds in which the lengths take turns. Packing is
that of a corpus; work is counted for random documents.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import machine
from benchmarks.training import RandomStream, Training, join
from megacore.config import Config
from megacore.context_parallel.attention import Sequences, attend
from megacore.context_parallel.sharding import AttentionPart, parts, runs_by_rank
from megacore.data.indexed import IndexedTokens
from megacore.data.packing import Bounds, WholeDocuments
from megacore.distributed.communicator import SOLO
from megacore.distributed.rank_info import RankInfo
from megacore.tools.choices.flops import document_attention_flops
from megacore.tools.cli import Parser, count, exit_with
from megacore.tools.output_files import check_output
from megacore.tools.settings.load import resolve

EXAMPLE = "OMP_NUM_THREADS=1 python -m benchmarks.documents --data data/stdlib"
SEQ_LEN, LENGTHS = 8192, (256, 512, 1024, 2048, 4096, 8192)
MODEL = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_heads": 4,
    "vocab_size": 4096,
    "position": "rope",
    "attention": "sdpa",
}
BALANCED = 32768
DRAWN: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {  # documents for a sample, at random
    "all of 256": lambda rng, seq_len: np.full(seq_len // 256, 256),
    "lognormal, median 403": lambda rng, seq_len: rng.lognormal(6.0, 1.4, seq_len // 64).astype(int) + 2,
    "uniform up to a sample": lambda rng, seq_len: rng.integers(2, seq_len, 99),
}
PACKED = (512, 1024, 2048, 4096, 8192)  # sample lengths for the corpus


def pairs(found: Iterable[AttentionPart], batch_size: int = 1) -> int:
    """How many pairs of a query and a key some parts have: the work of attention, up to a factor."""
    total = 0
    for part in found:
        q, k = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
        total += (q * (q + 1) // 2 if part.causal else q * k) * (batch_size if part.row is None else 1)
    return total


class Documents(RandomStream):
    """Random tokens in documents of one length."""

    def __init__(self, config: Config, each: int) -> None:
        super().__init__(config)
        self.each = each

    def documents(self, indices: np.ndarray) -> list[Bounds]:
        """``[n]`` indices → the same documents for each."""
        return [(*range(0, self.length - 1, self.each), self.length) for _ in indices]


class AttentionOperations(TorchDispatchMode):
    """Counts what attention's kernels are asked for: 4 operations a pair of tokens and
    feature forward, and 8 backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name:
            backward = name.endswith("_backward")
            q, k, *rest = args[backward:]
            causal = next(value for value in rest if isinstance(value, bool))
            if q.dim() == 3:  # a GPU's kernel for many documents, which is told where they end
                lengths = [
                    np.diff(x.tolist()).tolist()
                    for x in rest
                    if isinstance(x, torch.Tensor) and x.dtype == torch.int32
                ]
                each, size = list(zip(*lengths, strict=True)), q.shape[1] * q.shape[2]
            else:
                each, size = [(q.shape[2], k.shape[2])], q.shape[0] * q.shape[1] * q.shape[3]
            pairs = sum(queries * (queries + 1) // 2 if causal else queries * keys for queries, keys in each)
            self.count += (8 if backward else 4) * size * pairs
        return func(*args, **(kwargs or {}))


class Contender:
    """Steps over one sample of documents of `each` tokens; `each` None: without `data.document_mask`."""

    def __init__(self, each: int | None, seq_len: int) -> None:
        train = {"precision": "fp32", "seq_len": seq_len, "micro_batch_size": 1, "global_batch_size": 1}
        self.each, data = each, {"document_mask": each is not None}
        self.config = resolve({"model": MODEL, "train": train, "data": data}, [], "documents", 1).config
        self.mesh = join(self.config, RankInfo())
        self.training = Training(self.config, self.mesh, Documents(self.config, each or seq_len))
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.config.model.num_heads, seq_len, self.config.head_size)
        self.qkv = [
            torch.randn(shape, generator=generator).to(self.mesh.device).requires_grad_() for _ in range(3)
        ]
        documents = ((*range(0, seq_len, each or seq_len), seq_len),)
        self.sequences = Sequences(seq_len, SOLO, "gather", documents)
        self.seconds: list[tuple[float, float]] = []  # of a step, and of attention alone in one layer

    def attention(self) -> float:
        """Seconds of attention in one layer, forward and backward."""
        q, k, v = self.qkv
        started = perf_counter()
        if self.each is None:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = attend(q, k, v, self.sequences, self.config.head_size**-0.5)
        y.backward(torch.ones_like(y))
        self.training.wait()
        return perf_counter() - started

    def row(self) -> dict[str, Any]:
        """Its figures."""
        config, seq_len = self.config, self.config.train.seq_len
        lengths = [seq_len] if self.each is None else [self.each] * (seq_len // self.each)
        with AttentionOperations() as counted:
            self.training.step()
        step, attention = (median(times) for times in zip(*self.seconds, strict=True))
        return {
            "document_tokens": self.each,
            "attention_flops_counted": counted.count,
            "attention_flops_predicted": document_attention_flops(config, lengths),
            "attention_seconds": attention,
            "step_seconds": step,
            "rounds": len(self.seconds),
        }


def pairs_in_blocks(tokens: int) -> int:
    """Pairs of a query and a key that PyTorch's CPU kernel computes for a document: in
    blocks of 512 keys, masked or not.
    """
    queries = 256 if tokens >= 768 else 64 if tokens >= 192 else 32
    keys = [min(-(-min(start + queries, tokens) // 512) * 512, tokens) for start in range(0, tokens, queries)]
    return sum(min(queries, tokens - i * queries) * seen for i, seen in enumerate(keys))


def packing(prefix: str, seq_len: int) -> dict[str, Any]:
    """What best-fit packing pads and cuts on a corpus, beside consecutive samples."""
    corpus = IndexedTokens(prefix)
    started = perf_counter()
    packed = WholeDocuments(corpus, seq_len)
    seconds = perf_counter() - started
    starts, lengths = corpus.documents(0, corpus.num_documents)
    targets = np.maximum(lengths - 1, 0)
    whole = int(targets.sum())
    return {
        "seq_len": seq_len,
        "documents": packed.documents,
        "tokens": corpus.num_tokens,
        "samples": packed.count,
        "consecutive_samples": (corpus.num_tokens - 1) // seq_len,
        "padding": packed.padding / packed.count / packed.row,
        "cut": packed.cut,
        "cut_consecutive": packed.cut_otherwise,
        # The targets that are predicted without the beginning of their document.
        "beheaded": 1 - int(np.minimum(targets, seq_len).sum()) / whole,
        "beheaded_consecutive": 1 - int(np.minimum(targets, seq_len - starts % seq_len).sum()) / whole,
        "seconds": seconds,
    }


def balance(lengths: str, ranks: int, seq_len: int = BALANCED, samples: int = 8) -> dict[str, Any]:
    """The most work of a context rank over the mean, over some samples of random documents: as ranks would
    divide a sequence without documents, and as they do. In a ring ranks wait for one another after each step,
    so there the steps' maxima add up at most.
    """
    rng, found = np.random.default_rng(ranks), []
    for _ in range(samples):
        ends = np.cumsum(DRAWN[lengths](rng, seq_len))
        documents = ((0, *ends[ends < seq_len].tolist(), seq_len),)
        for known in (None, documents):
            runs = runs_by_rank(seq_len, ranks, known)
            work = [
                [pairs(parts(runs[r], runs[r - step], documents)) for step in range(ranks)]
                for r in range(ranks)
            ]
            steps = np.array(work) / np.sum(work) * ranks  # [ranks, steps], 1 for a rank's share
            found.append((steps.sum(1).max(), steps.max(0).sum()))
    early_late, by_work = np.array(found[::2]).mean(0), np.array(found[1::2]).mean(0)
    return {
        "lengths": lengths,
        "ranks": ranks,
        "seq_len": seq_len,
        "gather": {"early and late": early_late[0], "by work": by_work[0]},
        "ring at most": {"early and late": early_late[1], "by work": by_work[1]},
    }


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the steps."""
    print("documents of | attention's operations, counted | predicted | attention, one layer | step")
    for row in rows:
        name = "no mask" if row["document_tokens"] is None else f"{row['document_tokens']:,}"
        counted, predicted = (
            f"{row[f'attention_flops_{kind}'] / 1e9:.2f} G" for kind in ("counted", "predicted")
        )
        print(
            f"{name} | {counted} | {predicted} | {row['attention_seconds'] * 1e3:.1f} ms | "
            f"{row['step_seconds']:.3f} s",
            flush=True,
        )


def main(argv: list[str]) -> None:
    """Measures and prints; `--output` keeps the figures."""
    parser = Parser(
        "Measure what data.document_mask and best-fit packing cost and save.",
        example=EXAMPLE,
        page="benchmarks/README.md",
    )
    parser.add_argument(
        "--data", metavar="PREFIX", help="prefix of a prepared corpus to pack, such as data/stdlib"
    )
    parser.add_argument(
        "--rounds", type=count, default=3, metavar="N", help="measured rounds, after one that is not"
    )
    parser.add_argument(
        "--seq-len", type=count, default=SEQ_LEN, metavar="N", help="length of a sample, in tokens"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the results")
    parser.add_alias("--corpus", "--data")
    args = parser.parse_args(argv)
    if args.output is not None:
        check_output("--output", str(args.output))
    packed = [] if args.data is None else [packing(args.data, seq_len) for seq_len in PACKED]
    for row in packed:
        print(
            f"samples of {row['seq_len']:,}: padding {row['padding']:.2%}; documents cut {row['cut']:,}, "
            "by consecutive samples "
            f"{row['cut_consecutive']:,} of {row['documents']:,}; targets without their document's "
            f"beginning {row['beheaded']:.1%}, "
            f"{row['beheaded_consecutive']:.1%}; packed in {row['seconds'] * 1e3:.1f} ms",
            flush=True,
        )
    balanced = [balance(lengths, ranks) for lengths in DRAWN for ranks in (2, 4, 8)]
    for row in balanced:
        ways = "; ".join(
            f"{way}: {row[way]['early and late']:.2f}, by work {row[way]['by work']:.2f}"
            for way in ("gather", "ring at most")
        )
        print(f"{row['lengths']}, {row['ranks']} context ranks, most work over the mean: {ways}", flush=True)
    contenders = [
        Contender(each, args.seq_len) for each in (*(each for each in LENGTHS if each <= args.seq_len), None)
    ]
    for turn in range(args.rounds + 1):
        for contender in contenders[:: 1 if turn % 2 else -1]:
            seconds = contender.training.step(), contender.attention()
            contender.seconds += [seconds] * (turn > 0)
    rows = [contender.row() for contender in contenders]
    table(rows)
    if args.output is not None:
        threads = {"threads": torch.get_num_threads(), "model": MODEL, "seq_len": args.seq_len}
        found = machine.describe() | threads | {"steps": rows, "packing": packed, "balance": balanced}
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    exit_with(main)
