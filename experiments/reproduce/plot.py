"""A study as one figure: held-out loss against tokens, bytes, and simulated time at each rate."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farflock.experiments.reproduce.job import Outcome, Point
from farflock.experiments.reproduce.report import RATES, time_s
from farflock.experiments.reproduce.study import Result
from farflock.node.demo.figure import (
    BYTES,
    MARKERS,
    OKABE_ITO,
    TIME,
    TOKENS,
    EndLabel,
    can_draw,
    figure,
    fitting_unit,
    label_ends,
    save,
    save_data,
)

Axis = Callable[[Outcome, Point], float]
Units = Sequence[tuple[float, str]]
ROUNDS = ((1.0, "rounds"),)
STYLES = {"ddp": "--", "none": ":"}
COLOURS = {"ddp": "#000000", "none": "0.45"}  # the baselines of every study


def panels() -> list[tuple[str, Units, Axis]]:
    """Return each panel's horizontal axis: its label, its units, and the function of its values."""
    return [
        ("of the run", TOKENS, lambda outcome, point: point.tokens),
        ("sent per peer", BYTES, lambda outcome, point: point.sent_bytes),
        *((f"at {rate} Mbit/s", TIME, _seconds_at(rate)) for rate in RATES),
    ]


def _seconds_at(rate: int) -> Axis:
    return lambda outcome, point: time_s(point, outcome.overlaps, rate)


def draw(
    results: Sequence[Result], title: str, path: Path, labels: Mapping[str, str] | None = None
) -> None:
    """Write the figure as PNG and SVG, and its data as CSV; only the latter without matplotlib.

    It shows each arm's mean over seeds, with a band from the smallest to the greatest. `labels`
    overrides the arms' own labels.
    """
    named = {result.name: result.label for result in results} | dict(labels or {})
    save_data(path.with_suffix(".csv"), COLUMNS, _rows(results, named))
    if not can_draw():
        return
    noise = any("growth" in outcome.metrics for result in results for outcome in result.outcomes)
    shown = [("", ROUNDS, panels()[0][2])] if noise else panels()
    rows, columns = (1, 1) if noise else (2, 3)
    with figure(
        nrows=rows,
        ncols=columns,
        sharey=True,
        figsize=(7, 4.5) if noise else (13, 7.5),
        squeeze=False,
        layout="constrained",
    ) as (made, grid):
        places = list(grid.flat)
        for place, (what, units, axis) in zip(places, shown, strict=False):
            _panel(place, results, what, units, axis)
        for row in grid:
            row[0].set_ylabel("mean square distance" if noise else "held-out loss, nats a token")
        if noise:
            places[0].set_yscale("log")
        for place in places[len(shown) :]:
            place.axis("off")
        free = len(places) > len(shown)
        label_ends(places[len(shown) - 1], _ends(results, named), in_layout=not free)
        made.suptitle(title)
        save(made, path)


COLUMNS = (
    "arm",
    "label",
    "seed number",
    "tokens",
    "sent bytes",
    *(f"seconds at {rate} Mbit/s" for rate in RATES),
    "loss",
)


def _rows(results: Sequence[Result], named: Mapping[str, str]) -> list[tuple[object, ...]]:
    return [
        (
            result.name,
            named[result.name],
            number,
            point.tokens,
            point.sent_bytes,
            *(time_s(point, outcome.overlaps, rate) for rate in RATES),
            point.loss,
        )
        for result in results
        for number, outcome in enumerate(result.outcomes, start=1)
        for point in outcome.curve
    ]


def _panel(place: Any, results: Sequence[Result], what: str, units: Units, axis: Axis) -> None:  # noqa: ANN401 - matplotlib is untyped
    values = [
        axis(outcome, point)
        for result in results
        for outcome in result.outcomes
        for point in outcome.curve
    ]
    unit, name = fitting_unit(max(values, default=0.0), units)
    for number, result in enumerate(results):
        _curve(place, number, result, axis, unit)
    if units is BYTES:
        place.set_xscale("symlog", linthresh=1e4 / unit)
    place.set_xlabel(f"{name} {what}".rstrip())
    place.tick_params(labelleft=True)


def _look(number: int, name: str) -> tuple[str, str, str]:
    """Return an arm's colour, line style and marker."""
    colour = COLOURS.get(name, OKABE_ITO[number % (len(OKABE_ITO) - 1)])
    return colour, STYLES.get(name, "-"), "" if name in STYLES else MARKERS[number % len(MARKERS)]


def _means(result: Result, axis: Axis) -> tuple[list[float], list[list[float]]]:
    """Return each point's mean position on the axis, and its losses, one per seed."""
    outcomes = [outcome for outcome in result.outcomes if outcome.curve]
    length = min((len(outcome.curve) for outcome in outcomes), default=0)
    columns = [
        [(axis(outcome, outcome.curve[at]), outcome.curve[at].loss) for outcome in outcomes]
        for at in range(length)
    ]
    across = [sum(x for x, _ in column) / len(column) for column in columns]
    return across, [[loss for _, loss in column] for column in columns]


def _curve(place: Any, number: int, result: Result, axis: Axis, unit: float) -> None:  # noqa: ANN401 - matplotlib is untyped
    across, losses = _means(result, axis)
    if not across:
        return
    colour, style, marker = _look(number, result.name)
    across = [x / unit for x in across]
    means = [sum(values) / len(values) for values in losses]
    place.plot(across, means, style, marker=marker, markersize=4, linewidth=1.2, color=colour)
    place.fill_between(
        across,
        list(map(min, losses)),
        list(map(max, losses)),
        alpha=0.15,
        color=colour,
        linewidth=0,
    )


def _ends(results: Sequence[Result], named: Mapping[str, str]) -> list[EndLabel]:
    """Return a label for the end of each arm's curve."""
    labels = []
    for number, result in enumerate(results):
        if losses := _means(result, panels()[0][2])[1]:
            last = sum(losses[-1]) / len(losses[-1])
            labels.append(EndLabel(last, named[result.name], _look(number, result.name)[0]))
    return labels
