"""Scores of an evaluation's tasks, as the lm-evaluation-harness returns them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from farflock.node.errors import nearest


class BadTask(ValueError):
    """A task that there is not, or that the model cannot do; the message names the remedy."""


def unknown_task(name: str, known: Iterable[str]) -> BadTask:
    """Return the refusal of a name, with the nearest one that there is."""
    return BadTask(
        f"there is no task {name[:100]!r}; {nearest(name, known)} (--include-path adds those of a "
        "folder)"
    )


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One metric of one task, and its standard error if that is known."""

    task: str
    metric: str
    value: float
    error: float | None


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> list[TaskScore]:
    """Return the numbers among the harness's results, whose keys are `metric,filter` and
    `metric_stderr,filter`."""
    return [
        TaskScore(task, _named(key), float(value), _error(found, key))
        for task, found in results.items()
        for key, value in found.items()
        if _is_number(value) and "," in key and "_stderr," not in key
    ]


def _named(key: str) -> str:
    """Return a metric's name, with that of a filter that is not the usual one."""
    metric, _, kind = key.partition(",")
    return metric if kind == "none" else f"{metric} ({kind})"


def _error(found: Mapping[str, Any], key: str) -> float | None:
    metric, _, kind = key.partition(",")
    error = found.get(f"{metric}_stderr,{kind}")
    return float(error) if isinstance(error, int | float) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
