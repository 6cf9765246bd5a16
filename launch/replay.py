"""Repeat a past step of a run, and find what was wrong with it: the first bad tensor, the sample, the
document.
"""

import os
import sys

# so that a checkout runs without being installed; an installed script has no such folder
if os.path.isdir(os.path.dirname(os.path.realpath(__file__)) + "/../megacore"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import megacore.tools.interrupt  # noqa: F401  (first: Ctrl-C during the other imports prints no traceback)

# isort: split
import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError, DataError
from megacore.launch.samples import beginning, named, table
from megacore.tools.cli import Parser, add_device, add_json, add_overrides, add_source, exit_with
from megacore.tools.output_files import check_json, report_unless_json, write_results

if TYPE_CHECKING:
    from megacore.model.batch import Microbatch
    from megacore.tools.replay.gauges import Finding, Size, Tensors
    from megacore.tools.replay.history import Attempt, Past
    from megacore.tools.replay.steps import Done, Replay

EXAMPLES = (
    "python launch/replay.py runs/gpt_1b --step 4210",
    "python launch/replay.py runs/gpt_1b --step 4210 --skipped --device cpu data.train=copy/of/corpus",
)
NOTES = (
    "Resumes from the newest complete checkpoint before the step, in one process, whatever the layout of the "
    "run was, and writes nothing into its folder. Reports whether loss and gradient norm are as recorded, "
    "the first tensor that is not finite or far larger than before, and the sample whose loss or gradient "
    "stands out."
)
# what may be elsewhere, or another, on this machine
OWN = ("data.train", "data.tokenizer", "model.kernels", "model.attention")
BEFORE = 24  # tokens before the costliest one from which text is shown


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Repeat a past step of a run and find what was wrong with it: tensor, sample and document.",
        example=EXAMPLES,
        notes=NOTES,
        status="0 as recorded, 1 not as recorded, 2 wrong arguments, records, data or checkpoints",
        page="docs/operations.md",
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, its log.dir")
    parser.add_argument("--step", required=True, type=int, metavar="N", help="step to repeat, from 1")
    parser.add_argument(
        "--skipped",
        action="store_true",
        help="repeat the attempt that was skipped, if the run did the step again with other samples",
    )
    add_device(parser)
    add_source(parser)
    add_json(parser, "what was found")
    add_overrides(parser, f"where {', '.join(OWN)} are now, if not where the run had them")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_intermixed_args(argv)
    for override in args.overrides:
        if (key := override.partition("=")[0]) not in OWN:
            raise ConfigError(key, "would make it another step than the run's", f"one of {', '.join(OWN)}")
    check_json(args.json)
    return args


def changed_corpora(replay: "Replay", past: "Past") -> list[str]:
    """Return the corpora whose files are newer than the checkpoint that the steps follow from.

    They may be copies with the same content, so this only explains losses that differ.
    """
    from megacore.checkpoint.manifest import MANIFEST

    saved = (past.base.path / MANIFEST).stat().st_mtime
    files = (
        (tokens.prefix, Path(f"{tokens.prefix}{end}"))
        for tokens in replay.stream.corpora
        for end in (".bin", ".idx")
    )
    return sorted({prefix for prefix, file in files if file.stat().st_mtime > saved})


def compared(done: "list[Done]", past: "Past", attempt: "Attempt", bound: float) -> dict[str, Any]:
    """The first step whose loss or norm is not the recorded one, and how many are on record."""
    from megacore.tools.replay.steps import apart

    known = [(each, record) for each in done if (record := past.recorded(each.step, attempt)) is not None]
    for each, record in known:
        if difference := apart((each.loss, each.grad_norm), record, bound):
            found = {
                "step": each.step,
                "loss": each.loss,
                "grad_norm": each.grad_norm,
                "relative": difference,
            }
            return {
                "steps": len(known),
                "first": found | {"recorded_loss": record[0], "recorded_grad_norm": record[1]},
            }
    return {"steps": len(known), "first": None}


def said_of_record(found: dict[str, Any], step: int, precision: str, lossy: str | None) -> str:
    """The comparison in words."""
    first = found["first"]
    if first is not None:
        figures = f"loss {shown(first['loss'])}, gradient norm {shown(first['grad_norm'])}"
        record = f"loss {shown(first['recorded_loss'])}, gradient norm {shown(first['recorded_grad_norm'])}"
        likely = "a device that computes wrongly, or another environment, is likely"
        if lossy is not None:
            likely = f"the replay is without the run's {lossy}, or else {likely}"
        return (
            f"NOT AS RECORDED: step {first['step']} now has {figures}, and on record is {record}.\n"
            f"{precision} does not round so much: {likely}."
        )
    if not found["steps"]:
        return (
            f"neither step {step} nor those before it since the checkpoint are on record (log.every): "
            "nothing to compare with"
        )
    rounding = f"{precision}'s rounding" if lossy is None else f"what {lossy} may change"
    return f"loss and gradient norm are as recorded within {rounding}, in {found['steps']} recorded steps"


def shown(figure: float | None) -> str:
    """A figure; None stands for one that is not finite."""
    return "not finite" if figure is None or not math.isfinite(figure) else f"{figure:.6g}"


def finite(found: Any) -> Any:
    """What was found, with null for numbers that are not finite, which JSON does not have."""
    if isinstance(found, dict):
        return {key: finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


class Look:
    """Looks at the step while its weights are still there."""

    def __init__(self, replay: "Replay", batch_of: int) -> None:
        """`batch_of`: the step whose turn it is to read the samples, in a run that passed none over."""
        self.replay, self.batch_of = replay, batch_of
        self.before: list[Done] = []
        self.finding: Finding | None = None
        self.report: dict[str, Any] = {}

    def __call__(self, sizes: "dict[Tensors, list[Size]]", batch: "list[Microbatch]") -> None:
        from megacore.tools.replay import gauges

        past = [done.sizes for done in self.before]
        self.finding = gauges.first_out_of_line(sizes, past)
        stands: dict[int, float] = dict.fromkeys(range(len(batch)), 0.0)
        figures = {"loss": gauges.losses, "gradient_norm": gauges.norms}
        measured = {}
        for name, measure in figures.items():
            own, usual = measure(sizes), [x for step in past for x in measure(step).values()]
            measured[name] = own
            for at, apart in gauges.of_microbatches(own, usual).items():
                stands[at] = max(stands[at], apart)
        bad = (
            self.finding.microbatches if self.finding is not None and self.finding.deviations is None else ()
        )
        chosen = bad[0] if bad else max(stands, key=lambda at: stands[at])
        self.report = {
            "tensor": None if self.finding is None else asdict(self.finding),
            "all_samples": len(bad) == len(batch) > 1,
            "stands_out": bool(bad) or stands[chosen] > gauges.LIMIT,
            "deviations": stands[chosen],
            "of_microbatch": {name: own.get(chosen) for name, own in measured.items()},
            "samples": self.samples(chosen, batch[chosen]),
        }

    def samples(self, microbatch: int, tokens: "Microbatch") -> list[dict[str, Any]]:
        """The sample whose loss is largest in the microbatch, or all of it if no sample's loss can be
        told; with its costliest token.
        """
        config, stream = self.replay.config, self.replay.stream
        size = config.train.micro_batch_size
        rows = named(stream, range(self.batch_of, self.batch_of + 1), config, False)[
            microbatch * size : (microbatch + 1) * size
        ]
        losses = self.replay.losses(tokens)
        if losses is None:
            return rows
        bad = (~losses.isfinite()).flatten().nonzero()
        at = int(bad[0]) if len(bad) else (int(losses.argmax()) if size == 1 else self.worst(losses))
        sample, position = divmod(at, losses.shape[1])
        return [rows[sample] | self.token(rows[sample], position + 1, float(losses[sample, position]))]

    @staticmethod
    def worst(losses: Any) -> int:
        """The costliest token of the costliest sample, counted over the microbatch."""
        sample = int(losses.sum(1).argmax())
        return int(sample * losses.shape[1] + int(losses[sample].argmax()))

    def token(self, row: dict[str, Any], position: int, loss: float) -> dict[str, Any]:
        """Of the token at `position` in a sample: its loss, its document, and the text around it."""
        stream, config = self.replay.stream, self.replay.config
        number = [tokens.prefix for tokens in stream.corpora].index(row["corpus"])
        tokens, spans = stream.corpora[number], stream.cuts[number].spans(row["sample"])
        places = [place for first, length in spans for place in range(first, first + length)]
        place = places[min(position, len(places) - 1)]
        document, offset = tokens.document_and_offset(place)
        found: dict[str, Any] = {
            "token": {
                "id": int(tokens.read(place, 1)[0]),
                "document": document,
                "offset": offset,
                "loss": loss,
            }
        }
        if config.data.tokenizer is not None:
            first = max(place - min(offset, BEFORE), 0)
            found["text"] = beginning(config)(tokens, first, 2 * BEFORE)
        return found


def said_of_step(report: dict[str, Any], step: int, others: int) -> list[str]:
    """What was found in the step, in words."""
    tensor = report["tensor"]
    if report["bad_weight"] is not None:
        lines = [
            f"weight {report['bad_weight']} is not finite before the step begins: look at a step before it"
        ]
    elif tensor is None:
        before = f"{others} step{'' if others == 1 else 's'} before it"
        lines = [
            f"every tensor of step {step} is finite and in line with those of {before} and of its other "
            "samples"
        ]
    elif tensor["deviations"] is None:
        lines = [f"first tensor that is not finite: the {tensor['what']} of {tensor['name']}"]
    else:
        lines = [
            f"first tensor out of line: the {tensor['what']} of {tensor['name']}, by "
            f"{tensor['deviations']:.3g} robust deviations"
        ]
    if report["all_samples"]:
        lines.append(
            "it is so in every sample: the model or the device is to blame rather than one sample; the "
            "first is"
        )
    elif report["stands_out"]:
        lines.append("the sample that stands out:")
    else:
        lines.append("no sample stands out; the one with the most unusual loss or gradient is")
    rows = [
        {key: value for key, value in row.items() if key not in ("token", "text", "data_rank", "microbatch")}
        for row in report["samples"]
    ]
    lines.append(table(rows))
    of = report["of_microbatch"]
    lines.append(f"its loss {shown(of['loss'])} a token, norm of its gradient {shown(of['gradient_norm'])}")
    for row in report["samples"]:
        if (token := row.get("token")) is not None:
            place = f"document {token['document']}:{token['offset']}"
            lines.append(f"costliest token: id {token['id']} in {place}, loss {shown(token['loss'])}")
        if "text" in row:
            lines.append(f"text around it: {row['text']!r}")
        elif "token" in row:
            lines.append("(its text is not shown: the run names no data.tokenizer)")
    return lines


def run(argv: list[str]) -> int:
    """Runs the script. Returns its exit status, or raises `UserError`."""
    args = parse(argv)
    from megacore.tools.replay.history import History
    from megacore.tools.replay.steps import COARSE, ROUNDING, lossy, replaying

    history = History(Path(args.run))
    base = history.before(args.step)
    sections = history.sections(args.step)
    past = history.past(base, sections)
    attempt = past.attempt(args.step, args.skipped)
    ahead = attempt.ahead(args.step)
    with report_unless_json(args.json):
        print(
            f"from {base.path}: steps {base.step + 1} to {args.step} again, step {args.step} with batch "
            f"{args.step + ahead}",
            flush=True,
        )
    with replaying(
        base, sections, attempt, args.source, [f"train.device={args.device}", *args.overrides]
    ) as replay:
        precision, look, changed_by = (
            replay.config.train.precision,
            Look(replay, args.step + ahead),
            lossy(sections),
        )
        bound = ROUNDING[precision] if changed_by is None else max(COARSE, ROUNDING[precision])
        for done in replay.steps(args.step - 1, lambda sizes, batch: None):
            look.before.append(done)
        bad_weight = replay.bad_weight()
        last = list(replay.steps(args.step, look))
        found = compared([*look.before, *last], past, attempt, bound)
        if found["first"] is not None and (changed := changed_corpora(replay, past)):
            right = "the corpus as it was then; data.train=PREFIX if it is elsewhere"
            raise DataError(
                changed[0],
                f"was changed or copied after {base.path.name} was saved, and its steps have other losses",
                right,
            )
        others = len(look.before)
    for row in look.report["samples"]:
        row["step"] = args.step
    report = {"step": args.step, "record": found, "bad_weight": bad_weight, **look.report}
    with report_unless_json(args.json):
        print(said_of_record(found, args.step, precision, changed_by))
        print(f"step {args.step}: loss {last[0].loss:.6g}, gradient norm {last[0].grad_norm:.6g}")
        print("\n".join(said_of_step(report, args.step, others)))
        if not args.skipped and any(step == args.step and own != ahead for step, own in past.skips):
            print(f"(step {args.step} was skipped before, with other samples: --skipped replays that)")
    write_results(args.json, finite(report))
    return 0 if found["first"] is None else 1


if __name__ == "__main__":
    exit_with(run)
