"""Rebalancing: all peers compute the same move, no stage is emptied, and a swarm that churns is
faster with it."""

import collections
import dataclasses
import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farflock.swarm.protocol.rebalance import (
    MIN_RESIDENCE_S,
    LoadSnapshot,
    Move,
    RebalanceRule,
    ServerLoad,
    next_move,
    snapshot_number,
)


def server(peer, queue=0.0, rate=1.0, memory_bytes=100, resident_s=1e6):
    return ServerLoad(peer, queue, rate, memory_bytes, resident_s)


def snapshot(*stages, needs=None, number=4):
    return LoadSnapshot(
        number, tuple(tuple(stage) for stage in stages), tuple(needs or [100] * len(stages))
    )


def after(known, move):
    """The same servers, but one of them is at another stage and new there."""
    mover = next(server for server in known.stages[move.source] if server.peer == move.peer)
    stages = [
        [server for server in servers if server.peer != move.peer] for servers in known.stages
    ]
    stages[move.target].append(dataclasses.replace(mover, resident_s=0.0))
    return dataclasses.replace(
        known, number=known.number + 1, stages=tuple(tuple(servers) for servers in stages)
    )


def speeds(known):
    return [math.fsum(server.rate for server in servers) for servers in known.stages]


@st.composite
def snapshots(draw):
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    amounts, few = st.floats(0, 50), st.integers(0, 3)
    stages = [
        [
            server(
                f"p{stage}{number}",
                draw(amounts),
                draw(st.floats(0.1, 8)),
                draw(few),
                200.0 * draw(few),
            )
            for number in range(size)
        ]
        for stage, size in enumerate(sizes)
    ]
    return snapshot(*stages, needs=[draw(few) for _ in sizes])


rules = st.builds(
    RebalanceRule,
    st.sampled_from(["wait", "queue"]),
    st.floats(0, 1),
    st.sampled_from([0.0, 300.0]),
)


def test_the_server_with_the_least_to_do_goes_from_the_idlest_stage_to_the_busiest():
    known = snapshot(
        [server("a", 4), server("b", 6)],
        [server("c", 2), server("d", 0), server("e", 1)],
        [server("f", 30)],
    )
    assert next_move(known) == Move(4, "d", source=1, target=2)


def test_load_is_a_time_and_by_request_the_length_of_the_queue_as_in_the_paper():
    fast, slow = [server("a", 30, rate=30), server("b", 10, rate=10)], [server("c", 9, rate=3)]
    spare = [server("d", 0, rate=90), server("e", 0, rate=50)]
    assert next_move(snapshot(fast, slow, spare), RebalanceRule("queue")).target == 0
    assert next_move(snapshot(fast, slow, spare), RebalanceRule("wait")).target == 1


def test_within_a_stage_the_shortest_wait_goes_or_by_request_the_shortest_queue():
    source = [
        server("a", 4, rate=8),
        server("b", 2, rate=2),
        server("c", 5, rate=9),
        server("z", 5, rate=1),
    ]
    known = snapshot(source, [server("t", 90)])
    assert next_move(known).peer == "a"
    assert next_move(known, RebalanceRule("queue")).peer == "b"


def test_ties_go_by_peer_id_whatever_the_order_of_the_list():
    servers = [server(peer) for peer in "fbdace"]
    for _ in range(3):
        random.Random(4).shuffle(servers)
        assert next_move(snapshot(servers, [server("t", 9)])).peer == "a"


@settings(max_examples=150, deadline=None)
@given(snapshots(), rules, st.data())
def test_everybody_computes_the_same_move_from_any_order_of_the_records(known, rule, data):
    shuffled = tuple(tuple(data.draw(st.permutations(servers))) for servers in known.stages)
    assert next_move(dataclasses.replace(known, stages=shuffled), rule) == next_move(known, rule)


@settings(max_examples=150, deadline=None)
@given(snapshots(), rules)
def test_a_move_is_feasible_empties_no_stage_loses_no_server_and_raises_the_slower_speed(
    known, rule
):
    move = next_move(known, rule)
    assume(move is not None)
    moved = after(known, move)
    mover = next(server for server in known.stages[move.source] if server.peer == move.peer)
    assert mover.memory_bytes >= known.needs_bytes[move.target]
    assert mover.resident_s >= rule.min_residence_s or not known.stages[move.target]
    assert moved.stages[move.source]
    assert sum(map(len, moved.stages)) == sum(map(len, known.stages))
    assert (
        min(speeds(moved)[stage] for stage in (move.source, move.target))
        > speeds(known)[move.target]
    )
    assert min(speeds(moved)) >= min(speeds(known))
    assert move.number == known.number


@settings(max_examples=80, deadline=None)
@given(snapshots(), rules, st.randoms(use_true_random=False))
def test_moves_come_to_an_end_whatever_the_queues_do(known, rule, chance):
    rule = dataclasses.replace(rule, min_residence_s=0.0)
    seen = set()
    while (move := next_move(known, rule)) is not None:
        known = after(known, move)
        where = tuple(frozenset(server.peer for server in servers) for servers in known.stages)
        assert where not in seen, "it goes round in a circle"
        seen.add(where)
        noisy = (
            tuple(dataclasses.replace(server, queue=chance.uniform(0, 50)) for server in servers)
            for servers in known.stages
        )
        known = dataclasses.replace(known, stages=tuple(noisy))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.floats(0, 100), rules)
def test_a_balanced_swarm_makes_no_move(stages, each, queue, rule):
    known = snapshot(
        *([server(f"{stage}-{n}", queue) for n in range(each)] for stage in range(stages))
    )
    assert next_move(known, rule) is None


def test_two_stages_do_not_pass_one_server_to_and_fro():
    for pair in (
        ([server("a"), server("b")], [server("c", 50)]),
        ([server("a", 50)], [server("b"), server("c")]),
    ):
        assert next_move(snapshot(*pair)) is None


def test_hysteresis_a_little_more_load_moves_no_server():
    source = [server(peer, 4) for peer in "abc"]
    assert next_move(snapshot(source, [server("t", 5)])) is None
    assert next_move(snapshot(source, [server("t", 5.1)])) == Move(4, "a", 0, 1)
    assert next_move(snapshot(source, [server("t", 5)]), RebalanceRule(hysteresis=0.2)) is not None


def test_a_peer_that_has_just_come_stays_for_a_while():
    young = [server(peer, resident_s=MIN_RESIDENCE_S - 1) for peer in "ab"]
    known = snapshot([*young, server("c", 3, resident_s=MIN_RESIDENCE_S)], [server("t", 90)])
    assert next_move(known).peer == "c"
    assert next_move(known, RebalanceRule(min_residence_s=0)).peer == "a"
    assert next_move(snapshot([*young, server("c", 3, resident_s=0)], [server("t", 90)])) is None


def test_a_peer_that_cannot_hold_the_stage_does_not_go_there():
    source = [
        server("a", memory_bytes=10),
        server("b", 3, memory_bytes=20),
        server("c", 9, memory_bytes=10),
    ]
    assert next_move(snapshot(source, [server("t", 90)], needs=[10, 20])).peer == "b"
    assert next_move(snapshot(source, [server("t", 90)], needs=[10, 21])) is None


def test_if_the_idlest_stage_can_spare_no_server_the_next_one_is_asked():
    known = snapshot(
        [server("a", 0)], [server("b", 1), server("c", 2), server("d", 3)], [server("t", 90)]
    )
    assert next_move(known) == Move(4, "b", 1, 2)


def test_not_even_the_rounding_of_a_sum_depends_on_the_order():
    assert 0.1 + 0.2 + 0.3 > 0.3 + 0.2 + 0.1 == 0.6
    rates = {"a": 0.1, "b": 0.2, "c": 0.3}
    for order in ("abc", "cba"):
        source = [
            *(server(peer, rate=rates[peer], memory_bytes=0) for peer in order),
            server("m", rate=9.0),
        ]
        assert next_move(snapshot(source, [server("t", 90, rate=0.6)])) is None


def test_a_stage_without_servers_is_helped_first_even_by_a_newcomer():
    known = snapshot([server("a", 9e9), server("b", 9e9, resident_s=0)], [], [server("c", 5)])
    assert next_move(known) == Move(4, "a", 0, 1)
    newcomers = snapshot([server("a", resident_s=0), server("b", resident_s=0)], [])
    assert next_move(newcomers) == Move(4, "a", 0, 1)
    assert next_move(snapshot([server("a")], [])) is None
    assert next_move(snapshot([], [])) is None
    assert next_move(snapshot()) is None


@pytest.mark.parametrize(
    ("now_s", "period_s", "number"),
    [(0, 300, 0), (299.9, 300, 0), (300, 300, 1), (-1, 60, -1), (61, 60, 1)],
)
def test_moments_of_one_period_share_its_number(now_s, period_s, number):
    assert snapshot_number(now_s, period_s) == number


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: snapshot_number(1.0, 0.0), "period"),
        (lambda: server("a", queue=math.nan), "finite queue"),
        (lambda: server("a", queue=-1), "finite queue"),
        (lambda: server("a", rate=0.0), "rate > 0"),
        (lambda: server("a", rate=math.inf), "rate > 0"),
        (lambda: server("a", memory_bytes=-1), "memory"),
        (lambda: server("a", resident_s=-1.0), "residence"),
        (lambda: snapshot([server("a")], [server("a")]), "listed in two stages"),
        (lambda: snapshot([server("a")], needs=[1, 2]), "1 stages, but the memory needs of 2"),
        (lambda: RebalanceRule(hysteresis=-0.1), "hysteresis"),
    ],
)
def test_a_snapshot_that_makes_no_sense_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()


STAGES, PEERS, LIFE_S, HOURS = 16, 160, 2 * 3600.0, 8


def churn(seed, period_s):
    """Let equal peers come to random stages and leave at random times. Return the share of the best
    assignment's throughput in each hour; the throughput is that of the slowest stage."""
    chance = random.Random(seed)
    # stage, since when
    home = {f"{number:05d}": (number % STAGES, -1e6) for number in range(PEERS)}
    born, tick_s, shares = PEERS, 20.0, collections.defaultdict(list)
    for tick in range(int(HOURS * 3600 / tick_s)):
        now_s = tick * tick_s
        for peer in [peer for peer in home if chance.random() < tick_s / LIFE_S]:
            del home[peer]
        for _ in range(sum(chance.random() < tick_s / LIFE_S for _ in range(PEERS))):
            home[f"{born:05d}"] = (chance.randrange(STAGES), now_s)
            born += 1
        if period_s is not None and now_s % period_s == 0:
            move = next_move(observed(home, now_s, period_s))
            if move is not None:
                home[move.peer] = (move.target, now_s)
        counts = collections.Counter(stage for stage, _ in home.values())
        best = len(home) // STAGES
        shares[int(now_s // 3600)].append(min(counts[stage] for stage in range(STAGES)) / best)
    return [sum(hour) / len(hour) for hour in shares.values()]


def observed(home, now_s, period_s):
    """The slowest stage sets the pace and is 95 % busy; each queue is that of an M/M/1 server at
    its stage's share of it."""
    members = [
        [peer for peer, (where, _) in home.items() if where == stage] for stage in range(STAGES)
    ]
    pace = 0.95 * min(len(peers) for peers in members)
    stages = []
    for peers in members:
        busy = pace / len(peers) if peers else 0.0
        stages.append(
            [
                server(peer, busy / (1 - busy) / len(peers), resident_s=now_s - home[peer][1])
                for peer in peers
            ]
        )
    return snapshot(*stages, number=snapshot_number(now_s, period_s))


def test_under_churn_rebalancing_beats_none_and_more_often_beats_less_often():
    runs = {
        period_s: [churn(seed, period_s) for seed in range(3)] for period_s in (None, 300.0, 60.0)
    }
    overall = {period_s: sum(map(sum, hours)) / (3 * HOURS) for period_s, hours in runs.items()}
    assert overall[None] + 0.1 < overall[300.0] < overall[60.0]
    first, last = (sum(hours[hour] for hours in runs[None]) / 3 for hour in (0, HOURS - 1))
    assert last < first - 0.1, "without rebalancing the swarm decays"
    assert sum(hours[HOURS - 1] for hours in runs[60.0]) / 3 > last + 0.2
