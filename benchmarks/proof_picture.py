"""Draw a mesh of ranks next to the table that launch/verify.py printed, for the README."""

import re
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from megacore.tools.charts import SMALL, TITLE, new_figure

BLUE, ORANGE, RED, DARK, LIGHT = "#2f6fab", "#e67e22", "#c0392b", "#333333", "#e9e9e9"
# Rows of the picture, and the tensors of verify's table that each stands for.
ROWS = {
    "loss": r"loss|valid_loss",
    "gradient norm": r"grad_norm",
    "embedding": r"embedding\.weight",
    "attention, qkv": r"blocks\.\d+\.attention\.qkv\.weight",
    "attention, output": r"blocks\.\d+\.attention\.output\.weight",
    "feed-forward, up": r"blocks\.\d+\.feed_forward\.up\.weight",
    "feed-forward, down": r"blocks\.\d+\.feed_forward\.down\.weight",
    "norms": r"(blocks\.\d+\.)?norm\d?\.weight",
}


def read_proof(output: Path) -> tuple[list[str], dict[str, list[float]], str]:
    """Return the layouts of verify's output, each row's largest difference in each, and the largest of all.

    Raises `ValueError` if a tensor of the table belongs to no row.
    """
    layouts: list[str] = []
    differences: dict[str, list[float]] = {name: [] for name in ROWS}
    width = 0  # layouts of the table that is being read
    for line in output.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[:1] == ["one"] or (words and width == 0 and words[0].startswith("tp")):
            layouts += words
            width = len(words)
            for values in differences.values():
                values += [0.0] * width
        elif width and len(words) == width + 1:
            row = next((name for name, pattern in ROWS.items() if re.fullmatch(pattern, words[0])), None)
            if row is None:
                raise ValueError(f"{output}: the picture has no row for {words[0]}")
            for index, value in enumerate(words[1:], start=len(layouts) - width):
                differences[row][index] = max(differences[row][index], float(value))
            if words[0] == "norm.weight":  # the last row of a table
                width = 0
    largest = re.search(r"largest relative difference (\S+)", output.read_text(encoding="utf-8"))
    if largest is None:
        raise ValueError(f"{output}: the last line of launch/verify.py is missing")
    return layouts, differences, largest[1]


def draw_mesh(axes: Axes) -> None:
    """Eight ranks as pipeline 2 × data 2 × tensor 2, with the groups of rank 0 in colour."""
    colours = {0: DARK, 1: BLUE, 2: ORANGE, 4: RED}
    for rank in range(8):
        stage, replica, half = rank // 4, rank // 2 % 2, rank % 2
        x, y = 1.1 * half, 1.1 * replica + 3.0 * stage
        colour = colours.get(rank, LIGHT)
        box = FancyBboxPatch((x, y), 0.9, 0.9, boxstyle="round,pad=0,rounding_size=0.1", color=colour)
        axes.add_patch(box)
        text_colour = "white" if rank in colours else "#444444"
        axes.text(x + 0.45, y + 0.45, str(rank), ha="center", va="center", color=text_colour, fontsize=11)
    for stage in range(2):
        y = 1.0 + 3.0 * stage
        axes.text(-0.25, y, f"stage {stage}", ha="center", va="center", rotation=90, fontsize=SMALL)
    legend = {BLUE: "tensor", ORANGE: "data", RED: "pipeline"}
    for index, (colour, name) in enumerate(legend.items()):
        y = 5.7 + 0.5 * index
        axes.text(0, y, "■", color=colour, va="center", fontsize=11)
        axes.text(0.5, y, f"{name} peer of rank 0", va="center", fontsize=SMALL)
    axes.set_title("tp2pp2dp2: 8 ranks", loc="left", fontsize=TITLE)
    axes.set(xlim=(-0.5, 3.2), ylim=(7.0, -0.3))
    axes.set_aspect("equal")
    axes.axis("off")


def draw_differences(
    axes: Axes, layouts: list[str], differences: dict[str, list[float]], largest: str
) -> None:
    """The table of verify as a heat map: which power of ten each largest difference has."""
    values = np.array(list(differences.values()))
    exponents = np.where(values > 0, np.floor(np.log10(np.maximum(values, 1e-300))), np.nan)
    axes.imshow(np.nan_to_num(exponents, nan=-17), cmap="Greens", vmin=-19, vmax=-8, aspect="auto")
    for (row, column), exponent in np.ndenumerate(exponents):
        text = "=" if np.isnan(exponent) else f"{exponent:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=SMALL, color="#1b3a1b")
    axes.set_xticks(range(len(layouts)), layouts, rotation=60, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(differences)), list(differences))
    axes.tick_params(length=0, labelsize=SMALL)
    axes.spines[:].set_visible(False)
    label = "difference from one process in fp64, as a power of ten; '=': no difference"
    axes.set_xlabel(f"{label}\nthe largest is {largest}, the bound is 1e-9", fontsize=SMALL)


def draw(output: Path, picture: Path) -> None:
    """Draw the mesh and the table of one output of launch/verify.py."""
    layouts, differences, largest = read_proof(output)
    figure = new_figure(3.9)
    mesh, table = figure.subplots(1, 2, width_ratios=(1.0, 3.4))
    draw_mesh(mesh)
    draw_differences(table, layouts, differences, largest)
    figure.savefig(picture)
