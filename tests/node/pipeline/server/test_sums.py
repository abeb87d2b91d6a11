"""Gradients that wait for a step, by the round of their weights, against a plain list."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.pipeline.passes.stage import MicrobatchGradient
from farflock.node.pipeline.server.accounts import AccumulatorByRound

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
