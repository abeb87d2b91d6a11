"""A simulated step takes what formulas say, in every order, and no message overtakes another on its
wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.experiments.pipelines.steps import one_f_one_b, step_s
from farflock.swarm.protocol.depth import HopTime, PipelineTimes, StageTime, gpipe_s

seconds = st.floats(0, 2, allow_nan=False)


def pipeline(stages, hop, times):
    return PipelineTimes((times,) * stages, (hop,) * (stages - 1))


@given(
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    wire_s=seconds,
    latency_s=seconds,
    each_s=seconds,
)
def test_gpipe_takes_its_formula(stages, microbatches, wire_s, latency_s, each_s):
    hop, times = HopTime(wire_s, latency_s), StageTime(each_s, 2 * each_s)
    found = step_s(pipeline(stages, hop, times), microbatches, [microbatches] * stages)
    assert found == pytest.approx(gpipe_s(stages, microbatches, hop, times))


@given(
    stages=st.integers(1, 5),
    times=st.tuples(seconds, seconds, seconds),
    hop=st.tuples(seconds, seconds),
)
def test_one_microbatch_takes_its_round_trip(stages, times, hop):
    alone = pipeline(stages, HopTime(*hop), StageTime(*times))
    for order in ("fixed", "backward_first"):
        assert step_s(alone, 1, [1] * stages, order) == pytest.approx(alone.round_trip_s())


@given(
    stages=st.integers(2, 4),
    microbatches=st.integers(1, 8),
    depth=st.integers(1, 5),
    wire_s=seconds,
    latency_s=seconds,
    each_s=seconds,
    shared=st.booleans(),
    order=st.sampled_from(["fixed", "backward_first"]),
)
def test_no_order_is_faster_than_the_bound(
    stages, microbatches, depth, wire_s, latency_s, each_s, shared, order
):
    under = pipeline(stages, HopTime(wire_s, latency_s), StageTime(each_s, each_s))
    found = step_s(under, microbatches, [depth] * stages, order, shared)
    assert found >= under.step_bound_s(microbatches, depth) * (1 - 1e-9)


def test_1f1b_without_wires_has_its_bubble_of_p_minus_one():
    free = pipeline(4, HopTime(0.0), StageTime(1.0, 2.0))
    assert step_s(free, 10, one_f_one_b(4)) == pytest.approx((10 + 3) * 3.0)


def test_one_line_in_and_out_makes_forwards_and_gradients_wait_for_each_other():
    slow = pipeline(3, HopTime(1.0), StageTime(0.0, 0.0))
    alone, shared = (
        step_s(slow, 8, [8] * 3, "backward_first", shared_access=shared) for shared in (False, True)
    )
    assert shared >= 2 * 8 * 1.0, (
        "the middle sends each microbatch on and each gradient back over one line"
    )
    assert alone < shared


def test_gradients_may_be_smaller_than_activations():
    wide = pipeline(2, HopTime(1.0), StageTime(0.0, 0.0))
    assert step_s(wide, 4, [4, 4], back=[HopTime(0.25)]) == pytest.approx(4 * 1.0 + 4 * 0.25)


def test_1f1b_s_depths_count_down_to_the_last_stage():
    assert one_f_one_b(4) == [4, 3, 2, 1]
    assert one_f_one_b(2, 3) == [6, 3]


def test_a_stage_that_waits_for_too_many_forwards_is_refused_unless_gradients_go_first():
    line = pipeline(2, HopTime(1.0), StageTime(1.0, 1.0))
    with pytest.raises(ValueError, match="give depths that never grow"):
        step_s(line, 4, [1, 2])
    assert step_s(line, 4, [1, 2], "backward_first") == pytest.approx(4 * line.round_trip_s())


@pytest.mark.parametrize(("microbatches", "depths"), [(0, [1, 1]), (1, [1]), (1, [1, 0])])
def test_a_step_without_microbatches_or_depths_is_refused(microbatches, depths):
    with pytest.raises(ValueError, match="a depth of at least 1 for each stage"):
        step_s(pipeline(2, HopTime(1.0), StageTime(1.0, 1.0)), microbatches, depths)
