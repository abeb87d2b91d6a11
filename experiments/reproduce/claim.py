"""The part that all recipes share: a claim with its source, sizes for three tiers, and rules.

One kind of recipe trains (recipe.py), the other computes or simulates (computation.py); both have
the same form.
"""

import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from farflock.node.errors import Usage, nearest
from farflock.node.run.sections import convert

Section = TypeVar("Section", bound=msgspec.Struct)


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a recipe's TOML."""


class Claim(Entry, frozen=True, kw_only=True):
    """A claim, its source and method, and what would reproduce it; `tiers` override `common`."""

    question: str
    claim: str
    source: str
    reproduced_if: str
    method: str
    common: dict[str, Any] = {}
    tiers: dict[Literal["ci", "cpu", "gpu"], dict[str, Any]]
    name: str = ""

    def section(self, tier: str, kind: type[Section]) -> Section:
        """Return the settings of a tier; raise `Usage` if it is missing or has a mistake."""
        if tier not in self.tiers:
            raise Usage(f"{self.name} has no tier {tier!r}", "", nearest(tier, list(self.tiers)))
        return section({**self.common, **self.tiers[tier]}, kind, f"{self.name}.toml, tiers.{tier}")


class Rule(Entry, frozen=True, kw_only=True):
    """One comparison on which the claim depends.

    `ordering`: the metric rises from arm to arm. `within`: low <= first - second <= high. `ratio`:
    the same of first / second. `bound`: the same of one arm's value. `optimum`: the best value of
    the arms' sweeps rises from arm to arm. Each must hold by `tolerance` standard errors over
    seeds, of the differences between runs of the same seed.
    """

    kind: Literal["ordering", "within", "ratio", "bound", "optimum"]
    arms: Annotated[list[str], msgspec.Meta(min_length=1)]
    says: str
    paper: str
    metric: str = "loss"
    low: float | None = None
    high: float | None = None
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=10)] = 3.0

    def require_sound(self, place: str) -> None:
        """Raise `Usage` unless the kind allows this number of arms and these limits."""
        wanted = {"within": 2, "ratio": 2, "bound": 1}.get(self.kind)
        if wanted is not None and len(self.arms) != wanted:
            raise Usage(
                place, f"{self.kind} compares {wanted} arms, not {len(self.arms)}", "correct `arms`"
            )
        if wanted is None:
            if len(self.arms) < 2 or self.low is not None or self.high is not None:
                raise Usage(
                    place,
                    f"{self.kind} takes at least two arms and no limits",
                    "correct `arms`, `low`, `high`",
                )
        elif self.low is None and self.high is None:
            raise Usage(place, f"{self.kind} needs a limit", "give it `low`, `high` or both")
        elif (self.low if self.low is not None else -math.inf) > (
            self.high if self.high is not None else math.inf
        ):
            raise Usage(place, f"low {self.low} is above high {self.high}", "swap them")


def section(table: dict[str, Any], kind: type[Section], place: str) -> Section:
    """Convert a table strictly; raise `Usage` that names its place."""
    try:
        return convert(table, kind)
    except Usage as error:
        raise Usage(f"{place}: {error.what}", error.why, error.remedy) from None


def sections(table: dict[str, Any], name: str, kind: type[Section], origin: str) -> list[Section]:
    """Convert each table of the array `[[name]]` strictly; return [] if there is no such array."""
    found = table.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise Usage(f"{origin}, {name}", "each rule must be a table", f"write it as [[{name}]]")
    return [section(one, kind, f"{origin}, {name} {number}") for number, one in enumerate(found, 1)]
