"""A recipe that trains nothing: its numbers are computed or simulated (experiments/pipelines).

It has the form and the rules of a recipe that trains, but a number without randomness needs no
second seed. Like an arm, a table is kept under a hash of its parameters and of the code that
computes it.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import torch

from farflock.experiments.pipelines.catalog import COMPUTATIONS
from farflock.experiments.pipelines.table import Progress, Row, Table
from farflock.experiments.reproduce.claim import Claim, Entry, Rule, section, sections
from farflock.experiments.reproduce.shelf import Shelf
from farflock.experiments.reproduce.verdict import Finding, judge
from farflock.experiments.reproduce.version import sources_hash
from farflock.node.errors import Failure, Usage, nearest
from farflock.node.run.sections import tables


class Comparison(Entry, frozen=True, kw_only=True):
    """A comparison of rows of the table with the paper.

    `near`: each row lies within `within` of its number in `paper`. The other kinds are those of
    `Rule`; for them `paper` is text.
    """

    kind: Literal["near", "ordering", "bound", "within", "ratio"]
    rows: Annotated[list[str], msgspec.Meta(min_length=1)]
    says: str
    paper: str | list[float]
    within: Annotated[float, msgspec.Meta(gt=0)] | None = None
    low: float | None = None
    high: float | None = None
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=10)] = 3.0

    def rules(self, place: str) -> list[Rule]:
        """Return the rules, one per row of `near`; raise `Usage` for an inconsistent comparison."""
        if (self.kind == "near") != isinstance(self.paper, list) or (self.kind == "near") != (
            self.within is not None
        ):
            raise Usage(
                place,
                "`near` takes a list of the paper's numbers and `within`, "
                "the other kinds take text and no `within`",
                "correct `paper` or `within`",
            )
        if isinstance(self.paper, str):
            made = [self._rule(self.kind, self.rows, self.says, self.paper, self.low, self.high)]
        else:
            made = self._near(place, self.paper)
        for rule in made:
            rule.require_sound(place)
        return made

    def _near(self, place: str, paper: list[float]) -> list[Rule]:
        if len(paper) != len(self.rows) or self.low is not None or self.high is not None:
            why = (
                f"`near` has {len(self.rows)} rows and {len(paper)} numbers of the paper, "
                "and takes no limit but `within`"
            )
            raise Usage(place, why, "give each row one number, and leave out `low` and `high`")
        within = self.within or 0.0
        return [
            self._rule(
                "bound",
                [row],
                f"{self.says}: {row}",
                f"{theirs:g}",
                theirs - within,
                theirs + within,
            )
            for row, theirs in zip(self.rows, paper, strict=True)
        ]

    def _rule(
        self,
        kind: str,
        rows: list[str],
        says: str,
        paper: str,
        low: float | None,
        high: float | None,
    ) -> Rule:
        table = {
            "kind": kind,
            "arms": rows,
            "says": says,
            "paper": paper,
            "metric": "value",
            "low": low,
            "high": high,
        }
        return msgspec.convert({**table, "tolerance": self.tolerance}, Rule)


class Computation(Claim, frozen=True, kw_only=True):
    """A claim about a `computation` of the catalogue; `quantity` names its rows, with the unit."""

    computation: str
    quantity: str
    verdict: Annotated[list[Comparison], msgspec.Meta(min_length=1)]

    def parameters(self, tier: str) -> msgspec.Struct:
        """Return a tier's parameters; raise `Usage` for any that the computation does not know."""
        return self.section(tier, COMPUTATIONS[self.computation].parameters)

    def needs_gpu(self, tier: str) -> bool:
        """Return False, as computations run on the CPU; raise `Usage` as `parameters` does."""
        self.parameters(tier)
        return False

    @property
    def rules(self) -> list[Rule]:
        """All rules, in order."""
        return [
            rule
            for number, one in enumerate(self.verdict, 1)
            for rule in one.rules(f"{self.name}.toml, verdict {number}")
        ]

    def described(self, tier: str) -> dict[str, Any]:
        """Return the resolved configuration, for `--dry-run`."""
        return {
            "recipe": self.name,
            "tier": tier,
            "computation": self.computation,
            "parameters": msgspec.to_builtins(self.parameters(tier)),
            "verdict": msgspec.to_builtins(self.rules),
        }

    def key(self, tier: str) -> str:
        """Return 64 hex digits over the code and the parameters, but not the comparisons."""
        code = sources_hash((COMPUTATIONS[self.computation].compute.__module__,))
        facts = [self.computation, self.parameters(tier), code, torch.__version__.partition("+")[0]]
        return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()

    def table(self, tier: str, shelf: Shelf, progress: Progress) -> Table:
        """Return the table from the shelf; compute and keep it if it is not there."""
        key = self.key(tier)
        found = shelf.find_table(key)
        if found is None:
            found = COMPUTATIONS[self.computation].compute(self.parameters(tier), progress)
            shelf.keep_table(key, self.described(tier), found)
        return found

    def judged(self, table: Table) -> list[Finding]:
        """Judge each rule."""
        rows = {row.name: row for row in table.rows}
        return [
            self._judged(rule, [self._named(name, rows) for name in rule.arms])
            for rule in self.rules
        ]

    def _named(self, name: str, rows: dict[str, Row]) -> Row:
        if name not in rows:
            raise Failure(
                f"{self.name}: its table has no row {name!r}", "", nearest(name, list(rows))
            )
        return rows[name]

    def _judged(self, rule: Rule, rows: Sequence[Row]) -> Finding:
        if len({(row.exact, len(row.values)) for row in rows}) > 1:
            raise Failure(
                f"{self.name}: {rule.says}",
                "an exact row cannot be compared with a row that has a value per seed",
                "choose `rows` of one sort",
            )
        return judge(rule, {row.name: row.values for row in rows}, {}, exact=rows[0].exact)


def read(name: str, text: str) -> Computation:
    """Parse and check a recipe."""
    origin = f"{name}.toml"
    table = tables(text, origin)
    compared = sections(table, "verdict", Comparison, origin)
    recipe = section(table, Computation, origin)
    if recipe.computation not in COMPUTATIONS:
        why = f"there is no computation {recipe.computation[:64]!r}"
        raise Usage(origin, why, nearest(recipe.computation, list(COMPUTATIONS)))
    recipe = msgspec.structs.replace(recipe, verdict=compared, name=name)
    assert recipe.rules, "there is no comparison, or one without a rule"
    return recipe
