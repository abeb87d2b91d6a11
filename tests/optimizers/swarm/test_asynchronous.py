"""Swarms of asynchronous local SGD whose rounds close on `enough` arrivals: nothing is lost or
counted twice, all members hold the same bits, and machines of unequal speed arrive together."""

import pytest
import torch

from farflock.optimizers.contrib.asynchronous import Async
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.parts.outer import OuterNesterov

NAMES = ("weight", "bias")


def arriving(**options):
    return lambda: Async(**{"period": 3, "enough": 1, "codec": "fp32", **options})


def adding(**options):
    """A method in which every arrival moves phi by exactly its own amount, so that all local work
    can be added up."""
    return arriving(lr=1.0, momentum=0.0, buffer=1, dylu=False, **options)


def work(swarm, name, steps, what):
    theta = swarm.build("fresh").theta()[what]
    return sum(
        (swarm.gradient(name, step, what, theta) for step in range(steps)), torch.zeros_like(theta)
    )


def speeds(swarm, **every):
    """Make each peer step only in every n-th tick, with n by its name."""
    swarm.rests = lambda peer, tick: tick % every[peer] != 0


def none_of(*missing):
    return lambda peer, number: lambda what, n: [] if (peer, number) in missing else [(0, n)]


def lateness(swarm):
    swarm.late = lambda peer, number: (number % 4) if peer == "b" else 0


def failures(swarm):
    swarm.fails = lambda number: number % 3 == 1


def unequal(swarm):
    speeds(swarm, a=1, b=2, c=5)


def everything(swarm):
    lateness(swarm), failures(swarm), unequal(swarm)


FATES = {
    "calm": lambda swarm: None,
    "late": lateness,
    "fail": failures,
    "slow": unequal,
    "all": everything,
}
each_fate = pytest.mark.parametrize("fate", FATES)


@each_fate
@pytest.mark.parametrize("enough", [1, 2])
def test_all_local_work_is_in_phi_once_or_still_at_its_peer(loopback, fate, enough):
    swarm = loopback(adding(enough=enough), "abc")
    FATES[fate](swarm)
    swarm.steps(40)
    swarm.rests, swarm.late = (lambda peer, tick: False), (lambda peer, number: 0)
    swarm.steps(4)
    start = swarm.build("fresh").theta()
    peers = list(swarm.peers.values())
    for peer in peers:
        swarm.catch_up(peer)
    assert len({peer.applied["arrivals"] for peer in peers}) == 1
    for what in NAMES:
        arrived = start[what] - peers[0].outer()[f"phi.{what}"]
        unsent = sum(peer.method._base[what] - peer.theta()[what] for peer in peers)
        done = sum(work(swarm, peer.name, peer.step, what) for peer in peers)
        assert torch.equal(arrived + unsent, done)
        assert bool(arrived.any())


@each_fate
@pytest.mark.parametrize("enough", [1, 2])
def test_members_that_know_of_the_same_rounds_hold_the_same_bits(loopback, same, fate, enough):
    """The loopback itself checks that `agreed` is equal when a round begins."""
    swarm = loopback(arriving(enough=enough, staleness="polynomial"), "abc", inner="adamw", lr=0.01)
    FATES[fate](swarm)
    compared = 0
    for _ in range(40):
        swarm.steps(1)
        first, *others = swarm.peers.values()
        for other in others:
            if other.applied == first.applied:
                compared += 1
                assert same(other.outer(), first.outer())
    assert compared > 10


@pytest.mark.parametrize(
    "fate",
    ["all", *(pytest.param(fate, marks=pytest.mark.long) for fate in FATES if fate != "all")],
)
def test_stopping_and_going_on_at_every_moment_changes_no_bit(loopback, same, fate):
    ends = []
    for stops in (False, True):
        swarm = loopback(arriving(staleness="hinge"), "abc", inner="adamw", lr=0.01)
        FATES[fate](swarm)
        swarm.between = swarm.restart if stops else swarm.between
        swarm.steps(30)
        ends.append(swarm)
    for name, peer in ends[0].peers.items():
        again = ends[1].peers[name]
        assert same(again.outer(), peer.outer())
        assert same(again.theta(), peer.theta())
        assert same(again.method.personal(again.replica), peer.method.personal(peer.replica))


def test_a_buffer_of_all_with_equal_pulls_is_synchronous_diloco(loopback):
    ours = loopback(arriving(enough=0, buffer=4), "abcd")
    theirs = loopback(
        lambda: DiLoCo(3, OuterNesterov(0.7, 0.9), codec="fp32", return_codec="fp32"), "abcd"
    )
    for swarm in (ours, theirs):
        swarm.steps(15)
    for what in NAMES:
        found, expected = (swarm.peers["a"].outer()[f"phi.{what}"] for swarm in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rounds_close_on_the_first_arrivals_and_the_others_come_into_the_next_ones(loopback):
    swarm = loopback(adding(), "abc")
    swarm.steps(3)
    inside = [swarm.log[key].participants for key in sorted(swarm.log, key=lambda key: key.round)]
    assert sorted(inside) == [("a",), ("b",), ("c",)]
    swarm.steps(3)
    assert len(swarm.log) == 6


def test_a_contribution_that_was_not_taken_arrives_in_a_later_round(loopback):
    swarm = loopback(adding(enough=0), "ab")
    swarm.taken = none_of(("b", 0))
    swarm.steps(6)
    start = swarm.build("fresh").theta()["weight"]
    phi = swarm.peers["a"].outer()["phi.weight"]
    assert torch.equal(phi, start - work(swarm, "a", 6, "weight") - work(swarm, "b", 3, "weight"))
    assert [key.round for key, _ in ((e.key, e) for _, e in swarm.peers["b"].offered)] == [0, 1]


def test_machines_of_speeds_1_2_4_make_steps_in_proportion_and_arrive_together(loopback):
    swarm = loopback(arriving(period=8), "abc")
    speeds(swarm, a=1, b=2, c=4)
    swarm.steps(120)
    quotas = {name: peer.method._quota for name, peer in swarm.peers.items()}
    assert (quotas["a"], quotas["b"]) == (8, 4)
    assert quotas["c"] in (2, 3)  # its pause after the last step of a round is not measured
    counts = {name: sum(bool(r.taken) for r in peer.results) for name, peer in swarm.peers.items()}
    assert max(counts.values()) <= 1.6 * min(counts.values())
    stale = [
        float(x["staleness"]) for r in list(swarm.log.values())[-9:] for x in r.gathered.values()
    ]
    assert max(stale) <= 3


def test_without_dynamic_steps_slow_machines_arrive_rarely_and_stale(loopback):
    swarm = loopback(arriving(period=8, dylu=False), "abc")
    speeds(swarm, a=1, b=2, c=4)
    swarm.steps(120)
    counts = {name: sum(bool(r.taken) for r in peer.results) for name, peer in swarm.peers.items()}
    assert counts["a"] > 1.5 * counts["b"] > 2 * counts["c"]
    stale = [
        float(x["staleness"])
        for r in swarm.log.values()
        for who, x in r.gathered.items()
        if who == "c"
    ]
    assert max(stale) >= 5


def test_a_joiner_begins_at_phi_and_arrives_unstale(loopback, same):
    swarm = loopback(arriving(), "ab")
    swarm.steps(10)
    swarm.join("c", "a")
    assert same(swarm.peers["c"].outer(), swarm.peers["a"].outer())
    swarm.steps(12)
    mine = [result.gathered["c"] for result in swarm.peers["c"].results if result.taken]
    assert mine
    assert float(mine[0]["staleness"]) <= 6


def test_a_peer_that_leaves_takes_only_its_own_work_along(loopback, same):
    swarm = loopback(arriving(), "abc")
    swarm.steps(7)
    swarm.leave("b")
    swarm.steps(14)
    a, c = swarm.peers["a"], swarm.peers["c"]
    assert len([result for result in a.results if result.taken]) >= 4
    assert a.applied != c.applied or same(a.outer(), c.outer())
