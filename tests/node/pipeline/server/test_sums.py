"""Gradients that wait for a step, by the round of their weights, against a plain list."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.pipeline.passes.stage import MicrobatchGradient
from farflock.node.pipeline.server.accounts import AccumulatorByRound, StageAccounts
from farflock.node.pipeline.server.weight_versions import WeightVersions
from farflock.node.train import microbatch_ids as notes
from farflock.swarm.protocol.gradient_leases import GradientLeases

MERGED = st.lists(
    st.tuples(st.integers(-1, 5), st.integers(-50, 50), st.none() | st.integers(0, 9)), max_size=20
)


@given(MERGED, st.none() | st.integers(-2, 6))
def test_a_step_takes_what_is_young_enough_and_names_the_rest(merged, oldest):
    sums, listed = AccumulatorByRound(), []
    for number, (round_number, value, loss) in enumerate(merged):
        key = ("t", number)
        sums.add(
            key,
            MicrobatchGradient({"w": torch.full((2,), float(value), dtype=torch.float64)}, 8),
            loss,
            round_number,
        )
        listed.append((key, round_number, value, loss))
    young = [entry for entry in listed if oldest is None or entry[1] >= oldest]
    taken = sums.take(lambda number: oldest is not None and number < oldest)
    assert taken.rounds == {key: round_number for key, round_number, _, _ in young}
    assert taken.late == {entry[0] for entry in listed} - set(taken.rounds)
    assert taken.staged.tokens == 8 * len(young)
    assert taken.loss_sum == sum(loss or 0 for *_, loss in young)
    if young:
        assert taken.staged.gradients["w"].tolist() == [sum(value for _, _, value, _ in young)] * 2
    after = sums.take()
    assert (after.staged.gradients, after.staged.tokens, after.rounds, after.late) == (
        {},
        0,
        {},
        frozenset(),
    )


def test_what_is_given_up_is_no_work_any_more_and_is_not_brought_to_a_round():
    leases, key = GradientLeases(4, 8.0), ("trainer", 7)
    accounts = StageAccounts(leases, WeightVersions(), lambda: 0, 0, 8, knows_loss=True)
    leases.own(key)
    accounts.sums.add(key, MicrobatchGradient({"w": torch.ones(2)}, 8), None, 0)
    accounts.count_merge(key)
    assert accounts.tokens == 8
    accounts.take()
    assert accounts.renounce() == 1
    accounts.sums.clear()
    accounts.count_merge(key)  # of a merge that was on its way to the worker
    assert accounts.tokens == 0
    assert accounts.brought(3) == notes.written({})
    assert not leases.is_merged(key)
    assert leases.begin(key, 2) == "run", "its trainer may ask for it again"


def test_a_merge_that_a_round_has_counted_before_it_was_noted_is_counted():
    leases, key = GradientLeases(4, 8.0), ("trainer", 7)
    leases.own(key)
    leases.offer(3)
    leases.close(3, [key])
    assert leases.is_merged(key)
