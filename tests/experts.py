"""Proves mixtures of experts in layouts of 4 and 8 ranks: each two values of what can be chosen
occur together in one of them.

python -m tests.experts                   proves all of them, a third over a strict wire too: 17 minutes on
    two cores
python -m tests.experts --list            says which they are
python -m tests.experts --only 3 7        some, by their numbers
python -m tests.experts --results FILE    keeps there what is found, and does not prove again what is there of
    the same code
python -m tests.experts --write           writes tests/experts_found.json, if all are equal to one process
"""

import contextlib
import hashlib
import io
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.checkpoint import run as checkpoint_command
from megacore.config.experts import ExpertSettings
from megacore.errors import ConfigError
from megacore.files import ROOT
from megacore.tools.cli import Parser, exit_with
from megacore.tools.verify.compare import ROUTING
from megacore.tools.verify.proof_report import explain
from megacore.tools.verify.run import Options, Result, prove
from megacore.tools.verify.workers import ProofWorkers
from tests.build import run_of
from tests.expert_rows import CHOICES, CONFIG, Proof, proofs
from tests.strict import Rules
from tests.strict.runs import Case, Runs
from tests.training import write_weights

FOUND = ROOT / "tests" / "experts_found.json"
# of the layouts one in so many is run over a strict wire, of those whose routers are as they are
STRICT_PART = 3
MIXTURE = (
    "model.num_layers=8",
    "model.norm=rmsnorm",
    "model.activation=swiglu",
    "model.position=rope",
    "model.bias=false",
    "model.ffn_size=32",
    "model.num_experts=8",
    "model.expert_ffn_size=32",
    "model.first_dense=1",
    "model.router_z_loss=0.01",
)


@dataclass(frozen=True)
class Found:
    """What became of a row."""

    verify: str  # the largest difference, or what is wrong
    near_ties: int
    # over a strict wire: from drawn weights, from those of a dense model; "" where it was not run
    strict: str
    right: bool


def examine(proof: Proof, workers: ProofWorkers, runs: "StrictRuns | None") -> Found:
    """Proves a row, with `runs` over a strict wire too."""
    (result,) = prove(
        Options(CONFIG, proof.settings, [proof.layout], plant=proof.plant), workers=workers
    ).results
    wrong = wrong_with(result)
    ties = sum(d.kind == ROUTING and d.relative > 0 for d in result.differences.values())
    most = max((d.relative for d in result.differences.values()), default=0.0)
    over = [] if runs is None else [runs.verdict(proof, upcycled) for upcycled in (False, True)]
    return Found(
        wrong or f"{most:.0e}".replace("e-0", "e-"),
        ties,
        " / ".join(said or "equal" for said in over),
        not (wrong or any(over)),
    )


def wrong_with(result: Result) -> str:
    """What is wrong with a layout, in a line; empty if nothing is."""
    return result.impossible or next(iter(explain(result)), "")


class StrictRuns:
    """Real runs of a small mixture over a strict wire, compared with one process over gloo."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.folder = Runs(folder), folder

    def verdict(self, proof: Proof, upcycled: bool) -> str:
        """What is wrong, in a line; empty if nothing is.

        `upcycled`: it trains on from a dense model's weights, to which noise is added.
        """
        model = (*MIXTURE, *proof.chosen("router", "layers"))
        begin = f"checkpoint.weights={self.upcycled(proof)}" if upcycled else "model.shared_experts=1"
        case = Case(
            proof.layout.name, (*model, begin, *proof.chosen("engine", "recompute", "capacity", "exchange"))
        )
        return self.runs.verdict(case, Rules(seed=proofs()[0].index(proof)))

    def upcycled(self, proof: Proof) -> Path:
        """A checkpoint whose experts are a dense model's layers and noise, with such a
        router and such layers; made once.
        """
        name = f"{proof.of['router']}_{proof.of['layers']}"
        made, settings = self.folder / name, (*MIXTURE, *proof.chosen("router", "layers"))
        if not made.exists():
            dense = [
                override
                for override in settings
                if override.partition(".")[2].partition("=")[0] not in ExpertSettings.model_fields
            ]
            source = write_weights(self.folder / f"{name}_dense", run_of(self.runs.config, *dense))
            with contextlib.redirect_stdout(io.StringIO()):
                checkpoint_command(
                    ["upcycle", str(source), "--output", str(made), "--noise", "0.1", *settings]
                )
        return made


def write_found(found: dict[int, Found]) -> None:
    """Write what was found of all rows, for `tests.pages.proved`."""
    rows = []
    for number, proof in enumerate(proofs()[0]):
        row = [proof.layout.name, *(proof.of[name] for name in CHOICES)]
        rows.append({"row": row, "difference": found[number].verify, "strict": found[number].strict})
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    FOUND.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


class Kept:
    """What was found of the code as it is, in a file of a line for each row; without a
    file nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.code = path, code()
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
        # not one in whose middle a run was ended
        kept = [json.loads(line) for line in lines if line.endswith("}")]
        self.found = {
            tuple(line["row"]): Found(**line["found"]) for line in kept if line["code"] == self.code
        }

    def add(self, proof: Proof, found: Found) -> None:
        """Keeps what became of a row."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"code": self.code, "row": proof.row, "found": asdict(found)}))


def code() -> str:
    """A digest of all code that a proof runs."""
    digest = hashlib.sha256()
    for path in sorted(
        path
        for folder in ("megacore", "kernels", "launch", "tests", "configs")
        for path in (ROOT / folder).rglob("*.*")
    ):
        if path.suffix in (".py", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def main(argv: list[str]) -> int:
    """Prints a line for each proof; returns the exit status."""
    parser = Parser(
        "Prove MoE models in layouts of 4 and 8 ranks that cover each pair of choices.",
        example="python -m tests.experts --only 3 7",
        status="0 all equal, 1 otherwise, 2 wrong arguments",
        page="docs/experts.md",
    )
    parser.add_argument("--list", action="store_true", help="start nothing; print the proofs")
    parser.add_argument(
        "--only", nargs="+", type=int, metavar="N", help="some proofs, by their numbers from 0"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="file that keeps results; proofs in it are not repeated"
    )
    parser.add_argument(
        "--write", action="store_true", help="write tests/experts_found.json if all are equal"
    )
    args = parser.parse_args(argv)
    chosen, _ = proofs()
    if args.write and args.only:
        raise ConfigError("--write", "writes what was found of all", "--write alone")
    if args.only and not set(args.only) <= set(range(len(chosen))):
        raise ConfigError("--only", f"there are {len(chosen)}", f"numbers from 0 to {len(chosen) - 1}")
    numbers = args.only or range(len(chosen))
    if args.list:
        print(
            *(
                f"{number}: {chosen[number].layout.name} {' '.join(chosen[number].settings)}"
                for number in numbers
            ),
            sep="\n",
        )
        return 0
    natural = [number for number, proof in enumerate(chosen) if proof.plant is None]
    count = -(-len(chosen) // STRICT_PART)
    over_strict = {natural[i * len(natural) // count] for i in range(count)}
    found, kept = dict[int, Found](), Kept(args.results)
    with tempfile.TemporaryDirectory() as folder, ProofWorkers(ROOT) as workers:
        runs = StrictRuns(Path(folder))
        try:
            for number in numbers:
                proof = chosen[number]
                if proof.row not in kept.found:
                    kept.found[proof.row] = examine(proof, workers, runs if number in over_strict else None)
                    kept.add(proof, kept.found[proof.row])
                said = found[number] = kept.found[proof.row]
                beside = f", {said.near_ties} near ties" * bool(
                    said.near_ties
                ) + f"; over a strict wire {said.strict}" * bool(said.strict)
                print(f"{number} {proof.layout.name}: {said.verify}{beside}", flush=True)
        finally:
            runs.runs.close()
    right = sum(one.right for one in found.values())
    print(f"{right} of {len(found)} are equal to one process")
    if args.write and right == len(found):
        write_found(found)
    return int(right < len(found))


if __name__ == "__main__":
    exit_with(main)
