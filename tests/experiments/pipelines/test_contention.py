"""Links that queue, and SkipPipe's three effects on them, one at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.experiments.pipelines import contention, planned, released
from farflock.experiments.pipelines.contention import Setting, Wires
from farflock.experiments.placement.layout import LinkCosts

SIZE = 100.0
LINKS = LinkCosts.of(
    [[0, 0.5, 0.25], [0.5, 0, 1], [0.25, 1, 0]], [[1, 50, 100], [50, 1, 25], [100, 25, 1]]
)


def wires(shared=True, overhead=0.125):
    return Wires("abc", LINKS, SIZE, overhead, shared)


def test_on_an_idle_link_a_message_takes_its_size_the_latency_and_the_overhead():
    assert wires().send("a", "b", 3.0) == 3 + 100 / 50 + 0.5 + 0.125


def test_messages_one_after_the_other_wait_for_the_wire_and_not_for_the_latency():
    line = wires()
    assert [line.send("a", "b", 0.0) for _ in range(3)] == [2.625, 4.625, 6.625]
    assert line.send("a", "b", 100.0) == 102.625


def test_a_line_out_and_a_line_in_are_shared_by_their_wires_if_so_said():
    for shared, out_s, in_s in ((True, 3.0, 6.0), (False, 1.0, 4.0)):
        line = wires(shared, overhead=0.0)
        line.send("a", "b", 0.0)
        assert line.send("a", "c", 0.0) == out_s + 0.25
        assert line.send("c", "b", 0.0) == in_s + 1.0  # after a's message, of two seconds


def test_both_directions_are_free_of_each_other():
    line = wires(overhead=0.0)
    assert line.send("a", "b", 0.0) == line.send("b", "a", 0.0) == 2.5


hops = st.tuples(st.sampled_from("abc"), st.sampled_from("abc"), st.floats(0, 1)).filter(
    lambda hop: hop[0] != hop[1]
)


@given(st.lists(hops, max_size=20))
@settings(deadline=None)
def test_no_wire_and_no_line_carries_two_messages_at_a_time(sent):
    """Each message is on its lines from its arrival, less latency and transfer,
    for as long as the transfer takes."""
    line, now_s, busy = wires(overhead=0.0), 0.0, {}
    for sender, receiver, wait_s in sent:
        now_s += wait_s
        i, j = "abc".index(sender), "abc".index(receiver)
        takes_s = SIZE / LINKS.bandwidth[i, j]
        begins_s = line.send(sender, receiver, now_s) - LINKS.latency_s[i, j] - takes_s
        assert begins_s >= now_s - 1e-9
        for place in (("out", sender), ("in", receiver)):
            assert begins_s >= busy.get(place, 0.0) - 1e-9
            busy[place] = begins_s + takes_s


def test_without_queues_it_would_be_the_plain_timetable():
    plan = planned.as_plan(released.COLLISION_AWARE.values())
    plain = planned.instance(released.delays_s(mistaken=False)).timetable(plan).makespan_s
    queued, own = (Setting(shared_lines=shared).makespan_s(plan) for shared in (True, False))
    assert plain <= own <= queued < 1.1 * plain


@pytest.fixture(scope="module")
def made_s():
    return contention.makespans(Setting())


def test_each_effect_is_there_and_all_are_apart(made_s):
    effects = contention.effects(made_s)
    assert effects.pop("path choice, theirs") > 1.5
    assert min(effects.values()) > 1.1


def test_hops_and_origins_together_are_both_one_after_the_other_either_way(made_s):
    effects = contention.effects(made_s)
    together = pytest.approx(made_s["full, three origins"] / made_s["skipping, five origins"])
    assert effects["fewer hops, three origins"] * effects["more origins, skipping"] == together
    assert effects["more origins, full"] * effects["fewer hops, five origins"] == together


def test_the_published_order_is_kept_where_links_queue(made_s):
    assert (
        made_s["full, three origins"]
        > made_s["random"]
        > made_s["not collision-aware"]
        > made_s["collision-aware"]
    )
    ours_s = Setting().makespan_s(Setting().planned(seed=0, work=30))
    assert ours_s <= made_s["collision-aware"] + 1e-9
    assert made_s["random"] / ours_s > 1.5


MADE_S = {
    "full, three origins": 80,
    "full, five origins": 60,
    "skipping, three origins": 40,
    "skipping, five origins": 20,
    "random": 30,
    "not collision-aware": 20,
    "collision-aware": 10,
}


def test_effects_are_ratios_of_what_was_simulated():
    assert list(contention.effects(MADE_S).values()) == [2, 3, 80 / 60, 2, 3, 2]


def test_every_arm_moves_as_many_microbatches_over_all_its_chains_alike():
    full = contention.paths_in_turn(contention.chains_of(released.FULL), 3)
    skipping = contention.paths_in_turn(contention.chains_of(released.RANDOM), 5)
    assert len(full.paths) == len(skipping.paths) == contention.MICROBATCHES
    for plan, chains in ((full, 3), (skipping, 5)):
        uses = [
            sum(path[1:] == chain for path in plan.paths)
            for chain in {path[1:] for path in plan.paths}
        ]
        assert uses == [contention.MICROBATCHES // chains] * chains


def test_rows_are_the_effects_with_the_planner_s_seeds_apart(table, monkeypatch):
    made = []

    def planned_by(setting, seed, work):
        made.append((setting.forward_s, seed, work))
        return seed

    def theirs_over_ours(seed, work, forward_s):
        assert (forward_s, seed, work) == made[-1]
        return 4 / seed

    monkeypatch.setattr(contention, "makespans", lambda setting: MADE_S)
    monkeypatch.setattr(Setting, "planned", planned_by)
    monkeypatch.setattr(Setting, "makespan_s", lambda setting, plan: 5 * plan)
    monkeypatch.setattr(planned, "theirs_over_ours", theirs_over_ours)
    found = table("skippipe-effects", forward_s=0.5, work=7, seeds=[1, 2])
    assert made == [(0.5, 1, 7), (0.5, 2, 7)]
    assert (found["fewer hops, three origins"], found["fewer hops, five origins"]) == (2, 3)
    assert (found["more origins, full"], found["more origins, skipping"]) == (80 / 60, 2)
    assert (found["path choice, theirs"], found["collision awareness"]) == (3, 2)
    assert found["ours"] == [5, 10]
    assert found["path choice, ours"] == [6, 3]
    assert found["theirs over ours, links queue"] == [2, 1]
    assert found["theirs over ours, their simulation"] == [4, 2]
    assert len(found) == 17
