"""Real links between data centres, read from regions.toml and checked, for planners and simulators.

The measurements come from other projects' published programs; each table names its source.
"""

import math
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from typing import Annotated

import msgspec
import numpy as np

from farflock.experiments.placement.layout import LinkCosts
from farflock.node.errors import Usage, nearest

ORIGIN = "regions.toml"
# DT-FM's case 5, "worldwide": eight machines in each
WORLDWIDE = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")

Table = list[list[float]]


class Released(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bandwidth in the source that cannot be right."""

    pair: tuple[str, str]
    bandwidth: float


class Regions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One-way latency and bandwidth of each pair of regions; on the diagonal, within a region."""

    source: Annotated[str, msgspec.Meta(min_length=1)]
    names: Annotated[list[str], msgspec.Meta(min_length=2)]
    latency_ms: Table
    unit_bytes: Annotated[float, msgspec.Meta(gt=0)]  # bytes per second in a unit of `bandwidth`
    bandwidth: Table
    released: list[Released] = []

    def links(self, where: Sequence[str], released: bool = False) -> LinkCosts:
        """Return the links between machines in these regions, one machine per name.

        `released` keeps the source's mistakes.
        """
        for name in where:
            if name not in self.names:
                raise Usage(
                    f"region {name[:64]!r}",
                    "its links were not measured",
                    nearest(name, self.names),
                )
        latency, rate = np.array(self.latency_ms) / 1e3, np.array(self.bandwidth) * self.unit_bytes
        for mistake in self.released if released else ():
            a, b = map(self.names.index, mistake.pair)
            rate[a, b] = rate[b, a] = mistake.bandwidth * self.unit_bytes
        at = np.ix_(*[[self.names.index(name) for name in where]] * 2)
        return LinkCosts.of(latency[at], rate[at])

    def turns(self, machines: int) -> tuple[str, ...]:
        """Return the machines' regions, taking all regions in turn."""
        return tuple(self.names[machine % len(self.names)] for machine in range(machines))


def load() -> dict[str, Regions]:
    """Return all tables: `gcp` with 12 regions, `aws` with 10."""
    return read((files("farflock.experiments.placement") / ORIGIN).read_text())


def read(text: str) -> dict[str, Regions]:
    """Parse tables; raise `Usage` unless each is square, symmetric, finite and above 0."""
    try:
        tables = msgspec.convert(tomllib.loads(text), dict[str, Regions])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Usage(ORIGIN, str(error)[:200], "correct the file") from None
    for name, regions in tables.items():
        _require_sound(f"{ORIGIN}, {name}", regions)
    return tables


def _require_sound(place: str, regions: Regions) -> None:
    names = regions.names
    if len(set(names)) < len(names):
        raise Usage(place, "a region is named twice", "name each region once")
    for what, table in (("latency_ms", regions.latency_ms), ("bandwidth", regions.bandwidth)):
        if [len(row) for row in table] != [len(names)] * len(names):
            raise Usage(
                place,
                f"{what} is not a table of {len(names)} by {len(names)} numbers",
                "give it one row and one column per region",
            )
        for i, row in enumerate(table):
            for j, value in enumerate(row):
                if not (math.isfinite(value) and value > 0 and value == table[j][i]):
                    raise Usage(
                        place,
                        f"{what} from {names[i]} to {names[j]} is {value}, "
                        f"but back it is {table[j][i]}",
                        "give both directions the same number, above 0",
                    )
    for mistake in regions.released:
        if not {*mistake.pair} <= {*names} or not mistake.bandwidth > 0:
            raise Usage(
                place,
                f"released {mistake.pair} is not a pair of its regions with a bandwidth above 0",
                "name two regions and their bandwidth",
            )
