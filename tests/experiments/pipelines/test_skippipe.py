"""SkipPipe's published times, to the last digit; its plans against the rules;
its program against a literal twin."""

import collections
import math
import random

import pytest

from farflock.experiments.pipelines import planned, released
from farflock.experiments.pipelines.released import Start
from farflock.experiments.pipelines.skippipe import reproduce, simulate
from farflock.swarm.paths.skippipe import BadPlan, ScheduledPass, require_paths, require_timetable

PUBLISHED = {
    "full": 79.93971963540922,
    "random": 48.915682705668054,
    "not collision-aware": 35.43481420147051,
    "collision-aware": 33.31379002209655,
}


def test_the_four_published_times_come_out_to_the_last_digit():
    assert reproduce() == PUBLISHED


def test_with_the_times_of_the_present_script_it_gives_what_that_gives():
    times = {
        "full": 154.2028,
        "random": 87.1663,
        "not collision-aware": 75.8060,
        "collision-aware": 68.5538,
    }
    assert reproduce(released.SCRIPT_FORWARD_S) == pytest.approx(times, abs=5e-5)


def test_the_mistaken_link_is_on_no_path_so_the_times_are_the_same_without_it():
    assert reproduce(mistaken=False) == PUBLISHED
    there, without = released.delays_s(), released.delays_s(mistaken=False)
    assert there[6][10] == pytest.approx(132.3136, abs=2e-3)  # Netherlands to London
    assert without[6][10] < 0.5
    changed = {(i, j) for i in range(20) for j in range(20) if there[i][j] != without[i][j]}
    assert changed == {(6, 10), (10, 6), (18, 10), (10, 18)}


def test_delays_are_those_of_the_released_schedule():
    assert released.delays_s()[0][1] == pytest.approx(1.9615622573571703, abs=1e-14)


def runs():
    yield released.full_starts(), 27
    yield released.drawn_starts(released.RANDOM, 0.44), 30
    yield released.drawn_starts(released.NOT_COLLISION_AWARE, 0.44), 30
    yield released.planned_starts(released.COLLISION_AWARE), 30


def test_no_node_computes_twice_at_a_time_or_holds_too_much_and_all_come_back():
    delays = released.delays_s()
    for starts, count in runs():
        outcome = simulate(starts, delays)
        assert len(outcome.finished_s) == count
        assert not outcome.forgotten
        works = [
            ScheduledPass(
                planned.NAMES[w.node], (w.number // 100, w.number % 100), w.start_s, w.end_s
            )
            for w in outcome.worked
        ]
        require_timetable(works, released.MEMORY)


def test_the_released_plan_and_the_random_one_keep_to_our_rules():
    serving = planned.instance(released.delays_s()).serving
    for paths in (released.COLLISION_AWARE, released.RANDOM):
        plan = planned.as_plan(paths.values())
        require_paths(plan, serving, planned.TERMS)
        visits = collections.Counter(stop.peer for path in plan.paths for stop in path)
        assert set(visits.values()) == {6}  # each node, twice as many as fit at a time


def test_the_plan_without_regard_to_collisions_keeps_to_them_too():
    serving = planned.instance(released.delays_s()).serving
    require_paths(planned.as_plan(released.NOT_COLLISION_AWARE.values()), serving, planned.TERMS)


def test_a_plan_that_skips_too_much_is_refused():
    short = planned.as_plan(
        [[path[:3] for path in paths] for paths in released.COLLISION_AWARE.values()]
    )
    with pytest.raises(BadPlan, match="skip ratio"):
        require_paths(short, planned.instance(released.delays_s()).serving, planned.TERMS)


def test_the_program_forgets_a_microbatch_whose_slot_is_taken_when_its_second_ends():
    """Two of one slot at a node with room: the second only looks while its own tick lasts."""
    delays = [[0.5, 3.0], [3.0, 0.5]]
    outcome = simulate([Start(7, 0.0, (0, 1)), Start(107, 1.0, (0, 1))], delays, 0.4)
    assert outcome.forgotten == (107,)
    assert set(outcome.finished_s) == {7}
    assert outcome.makespan_s == outcome.finished_s[7]
    assert not simulate(
        [Start(7, 0.0, (0, 1)), Start(107, 1.0, (0, 1))], delays, 0.4, memory=1
    ).forgotten


def literal(starts, delays, c, memory, ticks=400):
    """The rules as they were written down, with every sweep of every tick;
    returns what finished."""
    nodes = [{"mem": memory, "inbox": [], "last": 0.0, "open": []} for _ in delays]
    for start in starts:
        after = dict(zip(start.path, start.path[1:], strict=False))
        before = dict(zip(start.path[1:], start.path, strict=False))
        nodes[start.path[0]]["inbox"].append(
            {
                "t": start.start_s,
                "r": 10000,
                "id": start.number,
                "next": after,
                "prev": before,
                "first": start.path[0],
                "oneshot": False,
                "back": False,
                "done": False,
            }
        )
    finished = {}

    def step(n, tick):
        node = nodes[n]
        node["inbox"].sort(key=lambda m: (m["t"], m["r"]))
        for m in list(node["inbox"]):
            if math.floor(m["t"]) != tick:
                continue
            if m["t"] < node["last"]:
                m["t"] = node["last"]
                continue
            if m["done"]:
                continue
            forward = not m["back"] and not m["oneshot"]
            if forward and node["mem"] <= 0:
                m["t"] += 0.1
                continue
            if forward and m["first"] == n and m["id"] % 100 in node["open"]:
                continue
            t, sent, to = m["t"], dict(m, done=False), None
            if forward and n in m["next"]:
                node["open"].append(m["id"])
                node["mem"] -= 1
                took, to = c, m["next"][n]
            elif forward:
                node["mem"] -= 1
                took, to = c, m["first"]
                sent |= {"oneshot": True, "first": n}
            elif m["oneshot"]:
                took, to = c * 0.25, m["first"]
                sent |= {"oneshot": False, "back": True}
            elif n in m["prev"]:
                node["mem"] += 1
                took, to = 1.5 * c, m["prev"][n]
            else:
                node["mem"] += 1
                took = 1.5 * c
                if m["id"] % 100 in node["open"]:
                    node["open"].remove(m["id"] % 100)
                finished[m["id"]] = t + took
            m["done"] = True
            if to is not None:
                sent["t"] = sent["r"] = t + took + delays[n][to]
                nodes[to]["inbox"].append(sent)
            node["last"] = t + took + (0.09 if m["r"] > 1000 else 0.13)
            for other in node["inbox"]:
                if other["id"] != m["id"] and t <= other["t"] < node["last"]:
                    other["t"] = node["last"]

    for tick in range(ticks):
        for _ in range(15):
            for n in range(len(nodes)):
                step(n, tick)
    return finished


@pytest.mark.parametrize("seed", range(6))
def test_on_other_instances_it_does_what_the_literal_rules_do(seed):
    chance = random.Random(seed)
    delays = [[chance.uniform(0.4, 4.0) for _ in range(7)] for _ in range(7)]
    starts = []
    for lane in range(2):
        for turn in range(2):
            for q in range(3):
                path = (lane, *chance.sample(range(2, 7), 3))
                starts.append(
                    Start(
                        100 * turn + 10 * q + lane, 2.5 * turn + chance.choice((0.1, 0.5)) * q, path
                    )
                )
    memory = chance.choice((2, 3))
    outcome = simulate(starts, delays, 0.3, memory)
    expected = literal(starts, delays, 0.3, memory, ticks=150)
    assert outcome.finished_s == expected
    assert len(outcome.forgotten) == 12 - len(expected)


def test_rows_are_the_four_makespans_in_three_ways(table):
    found = table("skippipe", also_s=[released.SCRIPT_FORWARD_S])
    assert len(found) == 12
    script = reproduce(released.SCRIPT_FORWARD_S)
    for name, makespan_s in PUBLISHED.items():
        assert found[name] == found[f"{name}, links corrected"] == makespan_s
        assert found[f"{name}, forward pass of 1.76 s"] == script[name]


def test_a_longer_forward_pass_makes_every_plan_longer(table):
    found = table("skippipe", forward_s=0.5, also_s=[])
    assert len(found) == 8
    assert found["full"] > PUBLISHED["full"]
    assert found["collision-aware"] > PUBLISHED["collision-aware"]
