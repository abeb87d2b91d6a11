"""The depth to which a pipeline over slow links must be filled: the rule and the closed forms,
compared with an event simulation."""

import heapq
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.protocol.depth import SLACK, Depth, HopTime, PipelineTimes, StageTime, gpipe_s

STAGES, MICROBATCHES = 8, 64
HOP = HopTime(0.67109, 0.05)  # 100 Mbit/s under 8 MiB
NO_TIME = StageTime(0.0, 0.0)
SLOW = PipelineTimes((NO_TIME,) * STAGES, (HOP,) * (STAGES - 1))


class Simulation:
    """One step of a pipeline, event by event: a stage does one thing at a time, and so does each
    direction of a wire.

    `pick(stage, forwards done, backwards done, can go forward, can go back)` says "F",
    "B" or None to wait.
    """

    def __init__(self, pipeline, microbatches, pick):
        self.pipeline, self.pick = pipeline, pick
        count = len(pipeline.stages)
        self.waiting = {"F": [0] * count, "B": [0] * count}
        self.done = {"F": [0] * count, "B": [0] * count}
        self.waiting["F"][0] = self.microbatches = microbatches
        self.is_busy, self.wire_free_s = [False] * count, {}
        self.events, self.number, self.end_s = [], 0, 0.0
        self.most_in_flight = [0] * count

    def run(self):
        for stage in range(len(self.pipeline.stages)):
            self.start(stage, 0.0)
        while self.events:
            now_s, _, what, stage, kind = heapq.heappop(self.events)
            if what == "computed":
                self.is_busy[stage] = False
                self.send(stage, kind, now_s)
                self.end_s = now_s
            else:
                self.waiting[kind][stage] += 1
            self.start(stage, now_s)
        assert self.done["B"][0] == self.microbatches, "the step came to a stop before its end"
        return self.end_s

    def start(self, stage, now_s):
        if self.is_busy[stage]:
            return
        forwards, backs = self.done["F"][stage], self.done["B"][stage]
        kind = self.pick(
            stage, forwards, backs, self.waiting["F"][stage] > 0, self.waiting["B"][stage] > 0
        )
        if kind is None:
            return
        self.is_busy[stage] = True
        self.waiting[kind][stage] -= 1
        self.done[kind][stage] += 1
        in_flight = self.done["F"][stage] - backs
        self.most_in_flight[stage] = max(self.most_in_flight[stage], in_flight)
        times = self.pipeline.stages[stage]
        self.add(
            now_s + (times.forward_s if kind == "F" else times.backward_s + times.weight_s),
            "computed",
            stage,
            kind,
        )

    def send(self, stage, kind, now_s):
        if kind == "F" and stage == len(self.pipeline.stages) - 1:
            self.waiting["B"][stage] += 1
            return
        to = stage + 1 if kind == "F" else stage - 1
        if to >= 0:
            hop = self.pipeline.hops[min(stage, to)]
            free_s = max(now_s, self.wire_free_s.get((stage, kind), 0.0)) + hop.wire_s
            self.wire_free_s[stage, kind] = free_s
            self.add(free_s + hop.latency_s, "arrived", to, kind)

    def add(self, when_s, *event):
        self.number += 1
        heapq.heappush(self.events, (when_s, self.number, *event))


def one_forward_one_back(depth, microbatches):
    """The fixed pattern: `depth(stage)` forward passes, then backward and forward passes in
    turn."""

    def pick(stage, forwards, backs, can_forward, can_back):
        if forwards < microbatches and forwards - backs < depth(stage):
            return "F" if can_forward else None
        return "B" if can_back else None

    return pick


def back_first(depth):
    """Serve a queue: backward passes first, forward passes while there is room."""

    def pick(stage, forwards, backs, can_forward, can_back):
        if can_back:
            return "B"
        return "F" if can_forward and forwards - backs < depth(stage) else None

    return pick


def all_forward_then_back(microbatches):
    def pick(stage, forwards, backs, can_forward, can_back):
        if forwards < microbatches:
            return "F" if can_forward else None
        return "B" if can_back else None

    return pick


def test_gpipe_at_zero_compute_takes_what_its_closed_form_says_and_the_simulation_too():
    closed_s = gpipe_s(STAGES, MICROBATCHES, HOP, NO_TIME)
    assert closed_s == pytest.approx(2 * (7 * 0.72109 + 63 * 0.67109), rel=1e-12)
    assert closed_s == pytest.approx(94.6526, abs=1e-4)
    assert Simulation(
        SLOW, MICROBATCHES, all_forward_then_back(MICROBATCHES)
    ).run() == pytest.approx(closed_s)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), *[st.floats(0, 3)] * 5)
def test_gpipes_closed_form_holds_with_compute_too(
    stages, microbatches, wire_s, latency_s, forward_s, back_s, weight_s
):
    hop, times = HopTime(wire_s, latency_s), StageTime(forward_s, back_s, weight_s)
    pipeline = PipelineTimes((times,) * stages, (hop,) * (stages - 1))
    simulated_s = Simulation(pipeline, microbatches, all_forward_then_back(microbatches)).run()
    assert simulated_s == pytest.approx(gpipe_s(stages, microbatches, hop, times))


@pytest.mark.parametrize(("times", "wanted_s"), [(1, 89.4), (2, 53.2), (3, 57.1)])
def test_twice_as_many_in_flight_as_1f1b_take_53_in_place_of_89_seconds(times, wanted_s):
    pick = one_forward_one_back(lambda stage: times * (STAGES - stage), MICROBATCHES)
    assert Simulation(SLOW, MICROBATCHES, pick).run() == pytest.approx(wanted_s, abs=0.05)


def test_the_wires_alone_take_43_seconds():
    assert MICROBATCHES * SLOW.bottleneck_s == pytest.approx(42.95, abs=0.005)


def test_the_rule_asks_for_16_in_flight_and_backward_first_then_reaches_the_bound():
    assert SLOW.round_trip_s() == pytest.approx(14 * 0.72109)
    assert SLOW.wanted_depth() == 16  # 15.04 rounded up
    bound_s = SLOW.step_bound_s(MICROBATCHES, 16)
    assert bound_s == pytest.approx(52.374, abs=1e-3)
    simulation = Simulation(
        SLOW, MICROBATCHES, back_first(lambda stage: SLOW.depth(stage, memory=64))
    )
    assert simulation.run() == pytest.approx(bound_s, rel=0.01)
    assert simulation.most_in_flight[0] == 16


def test_room_for_fewer_bounds_the_depth_and_costs_time():
    assert [SLOW.depth(stage, memory=10) for stage in range(STAGES)] == [10, 10, 10, 9, 7, 5, 3, 1]
    spans_s = [
        Simulation(SLOW, MICROBATCHES, back_first(lambda stage, k=k: k)).run()
        for k in (4, 8, 12, 16)
    ]
    assert spans_s == sorted(spans_s, reverse=True)
    assert spans_s[0] > 3 * spans_s[-1]


def test_without_links_the_rule_is_that_of_1f1b():
    pipeline = PipelineTimes((StageTime(1.0, 2.0),) * 5, (HopTime(0.0),) * 4)
    assert [pipeline.wanted_depth(stage) for stage in range(5)] == [5, 4, 3, 2, 1]
    tenths = PipelineTimes((StageTime(0.1, 0.0),) * 3, (HopTime(0.0),) * 2)
    # 3 x 0.1 is a little more than 0.3
    assert [tenths.wanted_depth(stage) for stage in range(3)] == [
        3,
        2,
        1,
    ]
    pick = one_forward_one_back(lambda stage: 5 - stage, 20)
    assert Simulation(pipeline, 20, pick).run() == pytest.approx((20 + 5 - 1) * 3.0)


def test_the_slowest_of_stages_and_wires_is_the_bottleneck():
    stages = (StageTime(0.1, 0.2, 0.3), StageTime(0.1, 0.1), StageTime(0.2, 0.2))
    assert PipelineTimes(stages, (HopTime(0.4), HopTime(0.5, 9.0))).bottleneck_s == pytest.approx(
        0.6
    )
    assert PipelineTimes(stages, (HopTime(0.4), HopTime(0.7, 9.0))).bottleneck_s == 0.7
    assert PipelineTimes(stages, (HopTime(0.4), HopTime(0.7, 9.0))).round_trip_s(
        1
    ) == pytest.approx(2 * 9.7 + 0.6)


times_s = st.floats(0.01, 2.0)
pipelines = st.integers(1, 5).flatmap(
    lambda count: st.builds(
        PipelineTimes,
        st.tuples(*[st.builds(StageTime, times_s, times_s, times_s)] * count),
        st.tuples(*[st.builds(HopTime, times_s, times_s)] * (count - 1)),
    )
)


@settings(max_examples=60, deadline=None)
@given(pipelines, st.integers(1, 12), st.integers(1, 8))
def test_no_schedule_is_faster_than_the_bound(pipeline, microbatches, in_flight):
    bound_s = pipeline.step_bound_s(microbatches, in_flight)
    for pick in (
        back_first(lambda stage: in_flight),
        one_forward_one_back(lambda stage: in_flight, microbatches),
    ):
        assert Simulation(pipeline, microbatches, pick).run() >= bound_s - 1e-9


@settings(max_examples=60, deadline=None)
@given(pipelines)
def test_deeper_than_the_rule_says_gains_little(pipeline):
    wanted = Simulation(pipeline, 40, back_first(pipeline.wanted_depth)).run()
    unlimited = Simulation(pipeline, 40, back_first(lambda stage: 40)).run()
    assert wanted <= 2 * unlimited
    assert wanted <= pipeline.round_trip_s() + 2 * 40 * pipeline.bottleneck_s


@settings(max_examples=60, deadline=None)
@given(pipelines, st.integers(1, 50))
def test_the_depth_never_grows_down_the_pipeline_and_never_passes_memory(pipeline, memory):
    depths = [pipeline.depth(stage, memory) for stage in range(len(pipeline.stages))]
    assert depths == sorted(depths, reverse=True)
    assert all(1 <= depth <= memory for depth in depths)
    assert depths[0] == memory or depths[0] * pipeline.bottleneck_s >= pipeline.round_trip_s() * (
        1 - 1e-8
    )


def followed(depth, trip_s, bottleneck_s, microbatches):
    """Let a trainer's depth follow a pipeline. A microbatch comes back at most every `bottleneck_s`
    and at least `trip_s` after it set out. Return how many it wants in flight at the end."""
    now_s = free_s = depth._ends_s[-1] if depth._ends_s else 0.0
    out = []
    for _ in range(microbatches):
        while len(out) < depth.wanted:
            free_s = max(free_s + bottleneck_s, now_s + trip_s)
            out.append(free_s)
        now_s = out.pop(0)
        depth.came_back(now_s, trip_s)
    return depth.wanted


@pytest.mark.parametrize(("trip_s", "bottleneck_s"), [(3.0, 0.2), (0.5, 0.5), (10.0, 0.9)])
def test_a_trainer_finds_the_depth_that_keeps_the_slowest_stage_busy(trip_s, bottleneck_s):
    found = followed(Depth(2, 1000), trip_s, bottleneck_s, 600)
    assert found == pytest.approx(SLACK * trip_s / bottleneck_s, abs=2)


def test_a_trainer_keeps_within_its_terms_and_follows_what_changes():
    depth = Depth(2, 20)
    assert followed(depth, 3.0, 0.1, 200) == 20
    assert followed(depth, 3.0, 3.0, 200) == math.ceil(SLACK)
    assert followed(depth, 0.1, 3.0, 200) == 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: StageTime(-1.0, 0.0), "not negative"),
        (lambda: HopTime(math.nan), "finite"),
        (lambda: HopTime(0.0, math.inf), "finite"),
        (lambda: PipelineTimes((), ()), "0 stages and 0 hops; give at least one stage"),
        (
            lambda: PipelineTimes((NO_TIME,), (HOP,)),
            "1 stages and 1 hops; .* one hop between each",
        ),
        (lambda: SLOW.depth(0, memory=0), "has room for 0 microbatches; it needs at least 1"),
        (lambda: SLOW.step_bound_s(0, 1), "microbatches"),
        (lambda: SLOW.step_bound_s(1, 0), "in flight"),
        (lambda: gpipe_s(0, 1, HOP, NO_TIME), "stages"),
        (lambda: Depth(0, 4), "is not a range"),
        (lambda: Depth(5, 4), "is not a range"),
        (
            lambda: PipelineTimes((NO_TIME,) * 2, (HopTime(0.0, 1.0),)).wanted_depth(),
            "takes any time",
        ),
    ],
)
def test_times_and_counts_that_make_no_sense_are_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()
