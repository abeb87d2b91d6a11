"""The rows of a table by name, as a computation with these parameters gives them."""

import msgspec
import pytest

from farflock.experiments.pipelines.catalog import COMPUTATIONS


@pytest.fixture
def table():
    """A function (name of the computation, **parameters) -> values by row."""

    def compute(name, **parameters):
        computation, told = COMPUTATIONS[name], []
        made = computation.compute(msgspec.convert(parameters, computation.parameters), told.append)
        assert told == sorted(told)
        assert told[-1] == pytest.approx(1.0), "a waiting caller hears that it is over"
        rows = {row.name: row.values if not row.exact else row.values[0] for row in made.rows}
        assert len(rows) == len(made.rows), "no two rows have one name"
        return rows

    return compute
