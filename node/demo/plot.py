"""A demo's plot: each peer's training loss over the run's tokens, the events, and the held-out
losses; as PNG and SVG, with the data as CSV.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farflock.node.demo.baselines import Comparison
from farflock.node.demo.demo import Child, Mark
from farflock.node.demo.figure import (
    OKABE_ITO,
    TOKENS,
    EndLabel,
    can_draw,
    figure,
    fitting_unit,
    label_ends,
    save,
    save_data,
)
from farflock.node.state.history import History

POINTS = 60  # of the longest curve; a point of any curve is the mean of as many steps
HEADROOM = 1.7  # the plot's top, over the loss without communication
STYLES = ("-", "--", "-.")  # for more peers than colours

Curve = list[tuple[float, float]]  # (tokens of the run, loss)


def plot(
    folder: Path,
    children: Sequence[Child],
    marks: Sequence[Mark],
    total_tokens: int,
    compared: Comparison,
) -> Path:
    """Write `loss.png`, `loss.svg` and `loss.csv`; return the path of the first. Without matplotlib
    write only the last, and return its path."""
    longest = max((_steps(child) for child in children), default=1)
    curves = {child.name: curve for child in children if (curve := curve_of(child, longest))}
    path = folder / "loss.png"
    save_data(
        path.with_suffix(".csv"),
        ("what", "tokens", "loss"),
        _rows(curves, marks, total_tokens, compared),
    )
    if not can_draw():
        return path.with_suffix(".csv")
    unit, name = fitting_unit(total_tokens, TOKENS)
    with figure(figsize=(8, 4.5)) as (made, axes):
        axes.set_xlim(0, total_tokens / unit)
        axes.set_ylim(*_limits(curves, compared))
        labels = _curves(axes, curves, unit) + _held_out(axes, compared)
        _events(axes, marks, total_tokens / unit)
        label_ends(axes, labels)
        axes.set_xlabel(f"{name} that all peers have trained")
        axes.set_ylabel("loss, nats per byte")
        axes.spines[["top", "right"]].set_visible(False)
        save(made, path)
    return path


def _steps(child: Child) -> int:
    return child.track[-1][0] - child.track[0][0] + 1 if child.track else 1


def curve_of(child: Child, longest: int) -> Curve:
    """Return a peer's training losses over the run's tokens; empty if it trained nothing.
    `longest` is the greatest number of steps of any peer."""
    points = max(2, POINTS * _steps(child) // longest)
    with History.read(child.folder) as history:
        series = history.series("loss", points)
    # a pipeline's server has no loss of a step in which it merged nothing
    return [(tokens_at(child.track, step), loss) for step, loss in series if math.isfinite(loss)]


def tokens_at(track: Sequence[tuple[int, int]], step: int) -> float:
    """Return the run's tokens at one of a peer's steps, interpolated from the (step, tokens)
    pairs that were seen."""
    at = bisect_right(track, (step, 2**62))
    if at == len(track) and track:
        return float(track[-1][1])
    if not at:
        return 0.0
    (before, low), (after, high) = track[at - 1], track[at]
    return low + (high - low) * (step - before) / (after - before)


def _limits(curves: dict[str, Curve], compared: Comparison) -> tuple[float, float]:
    """Return the range of the loss axis; the first steps of an untrained model lie above it."""
    losses = [loss for curve in curves.values() for _, loss in curve]
    held_out = (compared.swarm, compared.ddp, compared.none)
    low = min((*losses, *held_out))
    high = min(max((*losses, *held_out)), max(held_out) * HEADROOM)
    return low - 0.05 * (high - low), high + 0.02 * (high - low)


def _curves(axes: Any, curves: dict[str, Curve], unit: float) -> list[EndLabel]:  # noqa: ANN401 - matplotlib is untyped
    """Draw the peers' curves. Label those that end early at their end, and return the others."""
    labels, right = [], axes.get_xlim()[1]
    for number, (name, curve) in enumerate(curves.items()):
        colour = OKABE_ITO[number % len(OKABE_ITO)]
        style = STYLES[number // len(OKABE_ITO) % len(STYLES)]
        across, losses = [tokens / unit for tokens, _ in curve], [loss for _, loss in curve]
        axes.plot(across, losses, style, color=colour, linewidth=1.3)
        if across[-1] < 0.9 * right:
            axes.plot(across[-1], losses[-1], "x", color=colour, markersize=7)
            axes.annotate(
                name,
                (across[-1], losses[-1]),
                (6, 6),
                textcoords="offset points",
                color=colour,
                fontsize=8,
            )
        else:
            labels.append(EndLabel(losses[-1], name, colour))
    return labels


def _held_out(axes: Any, compared: Comparison) -> list[EndLabel]:  # noqa: ANN401 - matplotlib is untyped
    lines = (
        ("no communication", compared.none, ":"),
        ("the swarm", compared.swarm, "-"),
        ("DDP", compared.ddp, "--"),
    )
    for _, loss, style in lines:
        axes.axhline(loss, linestyle=style, color="black", linewidth=0.8)
    return [EndLabel(loss, f"{name}, held out: {loss:.3f}", "black") for name, loss, _ in lines]


def _events(axes: Any, marks: Sequence[Mark], width: float) -> None:  # noqa: ANN401 - matplotlib is untyped
    for mark in marks:
        axes.axvline(mark.share * width, color="0.55", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            mark.label,
            (mark.share * width, 1.0),
            (3, -3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=8,
            color="0.3",
        )


def _rows(
    curves: dict[str, Curve], marks: Sequence[Mark], total_tokens: int, compared: Comparison
) -> list[tuple[object, ...]]:
    """Return the CSV's rows: the curves, the held-out losses at the end, and the events."""
    rows: list[tuple[object, ...]] = [
        (name, round(tokens), f"{loss:.5f}")
        for name, curve in curves.items()
        for tokens, loss in curve
    ]
    held_out = (
        ("swarm", compared.swarm),
        ("DDP", compared.ddp),
        ("no communication", compared.none),
    )
    rows += [(f"held out: {name}", total_tokens, f"{loss:.5f}") for name, loss in held_out]
    return rows + [(f"event: {mark.label}", round(mark.share * total_tokens), "") for mark in marks]
