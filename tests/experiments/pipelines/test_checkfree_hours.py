"""The time model: its formulas against recursions and chance, and what it reads off the paper's
table."""

import random

import pytest

from farflock.experiments.pipelines import checkfree_hours as hours


def simulated(useful, period, chance, draws):
    """Return the iterations spent until `useful` of them are done."""
    done = spent = 0
    while done < useful:
        spent += 1
        done = done // period * period if draws.random() < chance else done + 1
    return spent


@pytest.mark.parametrize(("period", "chance"), [(1, 0.3), (7, 0.05), (20, 0.02)])
def test_replay_costs_what_a_simulation_spends(period, chance):
    draws = random.Random(1)
    found = simulated(40_000 // period * period, period, chance, draws)
    assert found == pytest.approx(
        hours.replayed(40_000 // period * period, period, chance), rel=0.03
    )


def test_replay_obeys_its_recursion_and_costs_nothing_without_failures():
    def trials(period, chance):
        """Expected trials for a run of successes: E(k) = (E(k-1) + 1) / (1 - p)."""
        return 0.0 if period == 0 else (trials(period - 1, chance) + 1) / (1 - chance)

    assert hours.replayed(30, 30, 0.07) == pytest.approx(trials(30, 0.07), rel=1e-12)
    assert hours.replayed(600, 30, 0.07) == pytest.approx(20 * trials(30, 0.07), rel=1e-12)
    assert hours.replayed(1234, 50, 0.0) == 1234


def test_the_explaining_period_is_the_one_whose_replay_it_is():
    period = hours.explaining_period(10_000, 22_000, 0.01)
    assert hours.replayed(10_000, period, 0.01) == pytest.approx(22_000, rel=1e-4)


def test_rates_an_hour_become_probabilities_an_iteration():
    assert hours.probability(0.1, 3600, 1) == pytest.approx(0.1, rel=1e-12)
    assert hours.probability(0.1, 3600, 2) == pytest.approx(1 - 0.9**2, rel=1e-12)
    assert hours.probability(0.1, 1800, 2) == pytest.approx(0.1, rel=1e-12)


def test_each_stage_that_does_anothers_forward_passes_takes_so_much_longer():
    assert hours.redundant_iteration_s(7.0, backward=2.5) == pytest.approx(9.0)


def test_a_crossover_is_where_straight_lines_meet():
    assert hours.crossover((1, 2, 4), (0, 1, 5), (2, 2, 2)) == pytest.approx(2.5)
    assert hours.crossover((1, 2), (0, 1), (2, 2)) is None
    assert hours.crossover((1, 2), (3, 4), (2, 2)) is None


def test_the_tables_hours_are_whole_numbers_of_evaluations():
    """The table's hours give the iterations and CheckFree's penalty, except for checkpointing at
    16 %: its hours are those of 25,000 iterations at the other columns' 91.35 s."""
    found = {
        (name, rate): hours.iterations(name, at)
        for name in hours.TABLE
        for at, rate in enumerate(hours.RATES)
    }
    odd = found.pop(("checkpointing", 0.16))
    assert odd * 92.14 / 91.35 == pytest.approx(25_000, abs=2)
    for iterations in found.values():
        assert iterations == pytest.approx(500 * round(iterations / 500), abs=2)
    assert hours.useful_iterations() == 10_000
    assert found["redundancy", 0.16] == pytest.approx(10_000, abs=1)


def test_the_paper_s_ordering_and_its_crossover_are_in_the_table():
    columns = zip(*([h for _, h in cells] for cells in hours.TABLE.values()), strict=True)
    assert [min(zip(column, hours.TABLE, strict=True))[1] for column in columns] == [
        "checkfree+",
        "checkfree+",
        "redundancy",
    ]
    assert 0.10 < hours.crossovers()["checkfree"] < hours.crossovers()["checkfree+"] < 0.16


def test_replay_grows_with_the_rate_and_the_period_and_a_cell_without_penalty_costs_nothing(table):
    rows = table("checkfree-hours")
    by_place = {
        (rate, period): rows[f"replay every {period}, {rate:.0%}, six stages, hours"]
        for rate in hours.RATES
        for period in hours.PERIODS
    }
    for rate in hours.RATES:
        assert by_place[rate, 10] < by_place[rate, 40] < by_place[rate, 50] < by_place[rate, 100]
        assert rows[f"redundancy, {rate:.0%}, times the iterations"] == pytest.approx(1, abs=1e-4)
    for period in hours.PERIODS:
        assert by_place[0.05, period] < by_place[0.10, period] < by_place[0.16, period]


def test_rows_have_names_of_their_own_and_the_models_numbers():
    shares = []
    table = hours.compute(hours.Size(), shares.append)
    rows = {row.name: row for row in table.rows}
    assert len(rows) == len(table.rows)
    assert all(row.exact and len(row.values) == 1 for row in table.rows)
    assert rows["checkfree+, 10%, hours"].values == [367.81]
    assert rows["checkfree+ is overtaken at, %"].values == [100 * hours.crossovers()["checkfree+"]]
    assert shares == [1.0]
