"""Draw the pictures of the README and the documents, from runs and from measured results."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import FancyBboxPatch, Rectangle

from benchmarks import proof_picture
from benchmarks.documents import pairs_in_blocks
from megacore.tools.charts import SMALL, TITLE, new_figure
from megacore.tools.cli import Parser, exit_with

EXAMPLE = "python -m benchmarks.figures --run runs/quickstart"
ROOT = Path(__file__).resolve().parents[1]
FOLDER, RESULTS = ROOT / "docs/figures", ROOT / "benchmarks/results"
BLUE, ORANGE, RED, GREY = "#2f6fab", "#e67e22", "#c0392b", "#8a8a8a"
AXES = {"pp": 2, "dp": 4, "tp": 2}  # of the drawn mesh: two machines with 8 devices each


def launch(script: str, *arguments: str) -> None:
    """Run a script of launch/ from the repository root, without what it prints."""
    command = [sys.executable, f"launch/{script}", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def loss(run: Path) -> None:
    """Draw a run's losses, and what log.statistics measured if it did."""
    launch("compare.py", str(run), "--plot", str(FOLDER / "loss.png"))
    if '"activation_rms/' in (run / "metrics.jsonl").read_text(encoding="utf-8"):
        launch("compare.py", str(run), "--heat-map", str(FOLDER / "statistics.png"))


def mesh() -> None:
    """Ranks as a grid over pipeline, data and tensor, with the three groups of one rank marked."""
    shape = tuple(AXES.values())
    # the last axis is the innermost: tensor ranks are neighbours
    ranks = np.arange(np.prod(shape)).reshape(shape)
    chosen = 4
    at = np.unravel_index(chosen, shape)
    drawn = new_figure(4.5)
    axes = drawn.add_subplot()
    for (pp, dp, tp), rank in np.ndenumerate(ranks):
        x, y = dp + pp * 5.0, tp
        same = sum(here == there for here, there in zip((pp, dp, tp), at, strict=True))
        differs = next(
            (i for i, (here, there) in enumerate(zip((pp, dp, tp), at, strict=True)) if here != there), None
        )
        colour = (
            "#333333"
            if same == 3
            else (RED, ORANGE, BLUE)[differs]
            if same == 2 and differs is not None
            else "#e9e9e9"
        )
        axes.add_patch(
            FancyBboxPatch(
                (x + 0.08, y + 0.08), 0.84, 0.84, boxstyle="round,pad=0,rounding_size=0.08", color=colour
            )
        )
        axes.text(
            x + 0.5,
            y + 0.5,
            str(rank),
            ha="center",
            va="center",
            color="white" if same >= 2 else "#444444",
            fontsize=13,
        )
    for pp in range(AXES["pp"]):
        left = pp * 5.0
        axes.add_patch(Rectangle((left - 0.08, -0.08), 4.16, 2.16, fill=False, edgecolor="#bbbbbb"))
        axes.text(left + 2, -0.62, f"machine {pp}: pipeline stage {pp}", ha="center", fontsize=11)
        for dp in range(AXES["dp"]):
            axes.text(left + dp + 0.5, -0.2, f"dp {dp}", ha="center", fontsize=SMALL, color="#555555")
    for tp in range(AXES["tp"]):
        axes.text(-0.25, tp + 0.5, f"tp {tp}", ha="right", va="center", fontsize=SMALL, color="#555555")
    said = {
        BLUE: "tensor group: holds the other half of every matrix; both ranks compute the same tokens",
        ORANGE: "data group: holds the same weights, reads other samples; gradients are all-reduced over it",
        RED: "pipeline group: holds the other half of the layers; hidden states go there and gradients "
        "come back",
    }
    for i, (colour, text) in enumerate(said.items()):
        y = 2.55 + 0.36 * i
        axes.add_patch(Rectangle((0, y - 0.13), 0.26, 0.26, color=colour))
        axes.text(0.4, y, text, va="center", fontsize=10)
    axes.set_title(
        f"{ranks.size} ranks = pipeline 2 × data 4 × tensor 2, seen from rank {chosen}",
        loc="left",
        fontsize=12,
        pad=10,
    )
    axes.set_xlim(-0.9, 9.2)
    axes.set_ylim(3.5, -1.0)
    axes.set_aspect("equal")
    axes.axis("off")
    drawn.savefig(FOLDER / "mesh.png")


def schedules() -> None:
    """Draw schedules of four pipeline ranks, as the planner simulates them."""
    zb_v = ["parallel.schedule=zb_v", "model.num_layers=64"]
    for name, overrides in {"schedule.png": [], "schedule_zb_v.png": zb_v}.items():
        launch(
            "plan.py", "--config", "configs/gpt_1b.json", "parallel.pipeline=4", "train.global_batch_size=32",
            *overrides, "--plot", str(FOLDER / name),
        )  # fmt: skip


def searches() -> None:
    """Draw the searches of docs/planning.md, which take minutes."""
    large = ["--config", "configs/gpt_175b.json", "--world", "512"]
    largest = ["--config", "configs/gpt_1t.json", "--world", "4096", "train.global_batch_size=4096"]
    for name, options in {"search.png": large, "search_1t.png": largest}.items():
        launch("plan.py", *options, "--search", "--plot", str(FOLDER / name))


def peers(results: Path) -> None:
    """megacore's speed over the best other library's, as users get it and with equal process settings."""
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    drawn = new_figure(3.7)
    panels = drawn.subplots(1, 2, sharey=True)
    for axes, (precision, ways) in zip(panels, found["ratios"].items(), strict=True):
        for i, ((way, ratios), colour) in enumerate(zip(ways.items(), (BLUE, ORANGE), strict=True)):
            for at, ratio in enumerate(ratios):
                x = at + 0.4 * (i - 0.5)
                axes.bar(x, ratio or 0, width=0.37, color=colour, label=way if at == 0 else None)
                if ratio is None:
                    axes.text(
                        x,
                        0.04,
                        "not measured",
                        rotation=90,
                        ha="center",
                        va="bottom",
                        fontsize=SMALL,
                        color="#444444",
                    )
                else:
                    axes.text(
                        x, 0.05, f"{ratio:.2f}", ha="center", va="bottom", fontsize=SMALL, color="white"
                    )
        axes.axhline(1, color="#444444", linewidth=1)
        axes.set_xticks(range(len(found["layouts"])), found["layouts"])
        axes.set_title(precision, loc="left", fontsize=TITLE)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, 2.8)
    panels[0].set_ylabel("megacore's speed / best peer's")
    drawn.suptitle("tokens a second on a CPU, medians", x=0.01, ha="left", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=SMALL)
    drawn.savefig(FOLDER / "peers.png")


def documents(results: Path) -> None:
    """Attention's and a step's time by the documents' length; and which documents packing leaves whole."""
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    within = [row for row in found["steps"] if row["document_tokens"]]
    (whole,) = [row for row in found["steps"] if not row["document_tokens"]]
    lengths = [row["document_tokens"] for row in within]
    drawn = new_figure(3.6)
    times, cuts = drawn.subplots(1, 2, width_ratios=(1.25, 1))
    kinds = (
        ("step_seconds", "a training step", ORANGE),
        ("attention_seconds", "attention of one layer", BLUE),
    )
    for key, name, colour in kinds:
        times.plot(lengths, [row[key] for row in within], color=colour, marker="o", label=name)
        times.plot(lengths[-1] * 1.25, whole[key], color=colour, marker="s", markerfacecolor="none")
    for name, style, pairs in (
        ("as the sum of squares", "--", lambda n: n * (n + 1) // 2),
        ("as the blocks that PyTorch's CPU kernel computes", ":", pairs_in_blocks),
    ):
        whole_pairs = pairs(lengths[-1])  # a line through the longest
        expected = [
            pairs(n) * lengths[-1] / n / whole_pairs * within[-1]["attention_seconds"] for n in lengths
        ]
        times.plot(lengths, expected, color=BLUE, linestyle=style, linewidth=1, label=name)
    times.set(
        xscale="log",
        yscale="log",
        xlabel=f"tokens of each document, in samples of {found['seq_len']:,}",
        ylabel="seconds",
    )
    times.set_xticks(lengths, [f"{length:,}" for length in lengths])
    times.minorticks_off()
    times.set_ylim(bottom=0.004)  # space for the legend below the lines
    times.set_title("squares: without document_mask", loc="left", fontsize=SMALL)
    times.legend(frameon=False, fontsize=SMALL)
    rows, at = found["packing"], np.arange(len(found["packing"]))
    ways = (("cut_consecutive", "consecutive tokens", GREY, -0.2), ("cut", "best_fit", BLUE, 0.2))
    for key, name, colour, beside in ways:
        bars = cuts.bar(
            at + beside, [100 * row[key] / row["documents"] for row in rows], 0.38, color=colour, label=name
        )
        cuts.bar_label(bars, fmt="%.0f", fontsize=SMALL)
    cuts.set_xticks(at, [f"{row['seq_len']:,}\n{row['padding']:.2%}" for row in rows], fontsize=SMALL)
    cuts.set(
        xlabel="tokens of a sample; below, best_fit's padding", ylabel="documents that are cut, per cent"
    )
    cuts.legend(frameon=False, fontsize=SMALL)
    for axes in (times, cuts):
        axes.spines[["top", "right"]].set_visible(False)
    drawn.savefig(FOLDER / "documents.png")


def parse(argv: list[str]) -> Path:
    """Return the folder of the run to draw. Raises `ConfigError`."""
    parser = Parser(
        "Draw the pictures of the README and the documents again, in docs/figures.",
        example=EXAMPLE,
        notes="Run launch/quickstart.sh first; without its run, the loss curve stays as it is. The two "
        "searches take minutes.",
        page="benchmarks/README.md",
    )
    parser.add_argument("--run", default="runs/quickstart", metavar="RUN", help="run whose losses are drawn")
    return ROOT / parser.parse_args(argv).run


def run(argv: list[str]) -> None:
    """Draw all pictures."""
    folder = parse(argv)
    FOLDER.mkdir(exist_ok=True)
    if (folder / "metrics.jsonl").is_file():
        loss(folder)
    else:
        print(
            f"no run in {folder}: the loss curve stays as it is (bash launch/quickstart.sh)", file=sys.stderr
        )
    mesh()
    proof_picture.draw(RESULTS / "verify_gpt_tiny.txt", FOLDER / "proof.png")
    schedules()
    searches()
    peers(RESULTS / "peers_settings_2026-11-22.json")
    documents(RESULTS / "documents_2026-11-22.json")


if __name__ == "__main__":
    exit_with(run)
