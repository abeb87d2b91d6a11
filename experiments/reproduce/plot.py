"""A study as one picture: held-out loss against tokens, bytes, and simulated time at each rate."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farflock.experiments.reproduce.job import Outcome, Point
from farflock.experiments.reproduce.report import RATES, time_s
from farflock.experiments.reproduce.study import Result

Axis = Callable[[Outcome, Point], float]


def panels() -> list[tuple[str, Axis]]:
    """Return the horizontal axes with their names."""
    return [
        ("tokens of the run", lambda outcome, point: point.tokens),
        ("bytes sent by a peer", lambda outcome, point: point.sent_bytes),
        *((f"hours at {rate} Mbit/s", _hours_at(rate)) for rate in RATES),
    ]


def _hours_at(rate: int) -> Axis:
    return lambda outcome, point: time_s(point, outcome.overlaps, rate) / 3600


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Write the picture: each arm's mean over seeds, with a band from the least to the greatest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    noise = any("growth" in outcome.metrics for result in results for outcome in result.outcomes)
    axes_of = [("round", panels()[0][1])] if noise else panels()
    figure, grid = pyplot.subplots(
        1 if noise else 2,
        1 if noise else 3,
        figsize=(8, 5) if noise else (15, 9),
        squeeze=False,
        layout="constrained",
    )
    places = list(grid.flat)
    for place, (name, axis) in zip(places, axes_of, strict=False):
        for result in results:
            _curve(place, result, axis)
        place.set_xlabel(name)
        place.set_ylabel("mean square distance" if noise else "held-out loss, nats a token")
        if noise:
            place.set_yscale("log")
        if name.startswith("bytes"):
            place.set_xscale("symlog", linthresh=1e4)
        else:
            place.ticklabel_format(axis="x", scilimits=(-3, 4))
    handles, labels = places[0].get_legend_handles_labels()
    if noise:
        places[0].legend(fontsize=8)
    else:
        places[-1].axis("off")
        places[-1].legend(handles, labels, loc="center", fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _curve(place: Any, result: Result, axis: Axis) -> None:  # noqa: ANN401 - matplotlib is untyped
    outcomes = [outcome for outcome in result.outcomes if outcome.curve]
    length = min((len(outcome.curve) for outcome in outcomes), default=0)
    if not length:
        return
    columns = [
        [(axis(outcome, outcome.curve[at]), outcome.curve[at].loss) for outcome in outcomes]
        for at in range(length)
    ]
    across = [sum(x for x, _ in column) / len(column) for column in columns]
    losses = [[loss for _, loss in column] for column in columns]
    means = [sum(values) / len(values) for values in losses]
    style = {"ddp": "--", "none": ":"}.get(result.name, "-")
    (drawn,) = place.plot(across, means, style, linewidth=1.2, label=result.label)
    place.fill_between(
        across, list(map(min, losses)), list(map(max, losses)), alpha=0.15, color=drawn.get_color()
    )
