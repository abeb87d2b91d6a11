"""`[evaluation]` and `[guard]`: how often drawn members measure the run on its held-out text, and
what follows if the training goes wrong."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from farflock.node.errors import Usage
from farflock.node.run.sections import Section

EVERY_ROUNDS = 10  # if the manifest does not say
SEQUENCES = 64
MAX_SEQUENCES = 4096
WITHOUT_ROUNDS = ("local",)  # methods


class EvaluationSection(Section, frozen=True):
    """[evaluation]: after every `every`-th round of the method's first stream, in a pipeline that
    of the first stage, a drawn member measures the loss on `sequences` held-out sequences, the same
    ones each time. 0 is never."""

    every: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = EVERY_ROUNDS
    sequences: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = SEQUENCES


class GuardSection(Section, frozen=True):
    """[guard]: what the members do once evaluations show a loss that is not finite, or rose
    `rising` times in a row, or a gradient norm far above the usual: `warn`, `end` the run at the
    same round (not in a pipeline), or nothing (`off`)."""

    on: Literal["warn", "end", "off"] = "warn"
    rising: Annotated[int, msgspec.Meta(ge=2, le=32)] = 3


NEVER, UNGUARDED = EvaluationSection(every=0), GuardSection("off")


def fill_evaluation(table: dict[str, Any]) -> None:
    """Switch evaluation off in a run that cannot be evaluated; raise `Usage` if the founder asks
    for it there."""
    why_not = _why_not(table)
    if not why_not:
        return
    evaluation, guard = table.setdefault("evaluation", {}), table.setdefault("guard", {})
    if _asked(evaluation, "every", 0):
        raise Usage("evaluation.every", why_not, "leave it out, or set it to 0")
    if _asked(guard, "on", "off"):
        raise Usage("guard.on", why_not, "leave it out, or set it to 'off'")
    if isinstance(evaluation, dict) and isinstance(guard, dict):
        evaluation["every"], guard["on"] = 0, "off"


def require_guard(
    evaluation: EvaluationSection, guard: GuardSection, *, has_stages: bool = False
) -> None:
    """Raise `Usage` for a guard that is to end the run and cannot: it lacks the evaluations that
    it decides on, or the run has stages, which have no round in common."""
    if guard.on == "end" and has_stages:
        raise Usage(
            "guard.on",
            "the stages of a pipeline have no round in common at which all members could end alike",
            "set it to 'warn' or 'off'",
        )
    if guard.on == "end" and not evaluation.every:
        raise Usage(
            "guard.on",
            "without evaluations nothing would ever end the run",
            "set evaluation.every to a number of rounds, or guard.on to 'off'",
        )


def _why_not(table: Mapping[str, Any]) -> str:
    alone = table["method"]["name"] in WITHOUT_ROUNDS
    return "the method has no rounds after which to evaluate" if alone else ""


def _asked(section: object, name: str, off: object) -> bool:
    return isinstance(section, Mapping) and section.get(name, off) != off
