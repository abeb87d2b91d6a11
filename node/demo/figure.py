"""Parts of all figures: colours that colour-blind readers can tell apart, labels at the ends of
lines, units that fit, and files that contain nothing about the machine that drew them.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflock.node.extras import is_here, line_for

# Okabe and Ito's palette, without its yellow, which is too light for lines on white.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LABEL_GAP = 0.05  # between two labels, as a share of the axes' height
LABEL_AT = 1.03  # of the axes' width
_SALT = "farflock"  # of the ids in an SVG: the same data give the same file

TOKENS = ((1.0, "tokens"), (1e3, "k tokens"), (1e6, "M tokens"), (1e9, "G tokens"))
BYTES = ((1.0, "bytes"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"))
TIME = ((1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours"), (86400.0, "days"))


@dataclass(frozen=True, slots=True)
class EndLabel:
    """A label for the end of a line: the line's last height, its text and colour."""

    y: float
    text: str
    colour: str


def fitting_unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest unit that fits at least twice into `largest`, otherwise the smallest
    unit."""
    return next((unit for unit in reversed(units) if largest >= 2 * unit[0]), units[0])


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return the heights, moved as little as possible (least squares) so that they are `gap`
    apart and within the limits; they end up closer together if they would not fit otherwise."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    gap = min(gap, (high - low) / max(len(heights) - 1, 1))
    blocks: list[tuple[float, int]] = []  # neighbours that touch: their mean shift, and how many
    for rank, at in enumerate(order):
        mean, count = heights[at] - rank * gap, 1
        while blocks and blocks[-1][0] >= mean:
            before, many = blocks.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        blocks.append((mean, count))
    shifts = [mean for mean, count in blocks for _ in range(count)]
    top = high - gap * (len(heights) - 1)
    placed = [0.0] * len(heights)
    for rank, (at, shift) in enumerate(zip(order, shifts, strict=True)):
        placed[at] = min(max(shift, low), top) + rank * gap
    return placed


def label_ends(axes: Any, labels: Sequence[EndLabel], in_layout: bool = True) -> None:  # noqa: ANN401 - matplotlib is untyped
    """Write the labels to the right of the axes, each tied to the end of its line by a thin line.
    Pass `in_layout` as False where there is free space anyway."""
    inverse = axes.transAxes.inverted()
    heights = [
        float(inverse.transform(axes.transData.transform((axes.get_xlim()[1], label.y)))[1])
        for label in labels
    ]
    for label, from_y, to_y in zip(labels, heights, spread(heights, LABEL_GAP, 0, 1), strict=True):
        text = axes.annotate(
            label.text,
            xy=(1.0, min(max(from_y, 0.0), 1.0)),
            xytext=(LABEL_AT, to_y),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=label.colour,
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 0,
            },
        )
        text.set_in_layout(in_layout)


def can_draw() -> bool:
    """Return whether matplotlib is here, which the extra `plot` brings."""
    return is_here("matplotlib")


def warn_of_no_figure(say: Callable[[str], None]) -> None:
    """Say, before a long command begins, that it will draw nothing, and why."""
    if not can_draw():
        say(f"no figure will be drawn, as matplotlib is not installed: {line_for('matplotlib')}")


@contextmanager
def figure(**options: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - matplotlib is untyped
    """Yield a figure and its axes for the block, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": _SALT}):
        made, axes = pyplot.subplots(**options)
        try:
            yield made, axes
        finally:
            pyplot.close(made)


def save(made: Any, png: Path) -> None:  # noqa: ANN401 - matplotlib is untyped
    """Write the figure as PNG, and as SVG next to it, without the date or the names of program and
    machine."""
    made.savefig(png, dpi=150, bbox_inches="tight", metadata={"Software": None})
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    made.savefig(png.with_suffix(".svg"), bbox_inches="tight", metadata=nothing)


def save_data(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a figure's data as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
