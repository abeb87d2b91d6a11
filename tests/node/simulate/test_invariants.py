"""The watch is told what no correct swarm does and must say so; it lets pass what is correct."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from farflock.node.simulate import invariants as limits
from farflock.node.simulate.invariants import (
    DEADLINE_S,
    MAX_ITEMS,
    MAX_STORE_BYTES,
    MAX_TASKS,
    NO_LIARS,
    OVERDUE_S,
    Distrust,
    InvariantChecker,
)
from farflock.node.train.driver import Claim
from farflock.optimizers.method import All, Exchange, ExchangeKey, Result
from farflock.swarm.messages import Key
from farflock.swarm.peer.peer import OpenWait
from farflock.swarm.sim.virtual_time import run_virtual

PEERS = ["one", "two", "three"]
STEPS = 3


class Scene:
    """A watch, and clients of three peers whose results the test makes up."""

    def __init__(self, arm="diloco", liars=NO_LIARS):
        self.watch, self.state = InvariantChecker(arm, PEERS, liars), torch.zeros(2)
        snapshot = lambda replica: {"phi": self.state}  # noqa: E731
        self.driver = SimpleNamespace(
            method=SimpleNamespace(snapshot=snapshot, feedback=None), replica=None
        )
        self.results = {}
        self.clients = [self.exchange_client(index) for index in range(3)]

    def exchange_client(self, index, birth=1):
        inner = SimpleNamespace(encode=lambda exchange, claim: None)
        inner.decode = lambda key, outcome, payloads=(): self.results[PEERS[index]]
        return self.watch.exchange_client(
            SimpleNamespace(me=PEERS[index]), index, birth, self.driver, inner
        )

    def train(self, index, steps=STEPS, birth=1):
        for _ in range(steps):
            self.watch.reported(index, birth, self.driver, "step", {})

    async def offer(self, index, value, number=0, tokens=10 * STEPS, codec="fp32"):
        tensors = {"w": torch.full((2,), float(value))}
        exchange = Exchange(ExchangeKey("delta", number), "mean", All(), tensors, codec=codec)
        self.clients[index].encode(exchange, Claim(tokens))
        await asyncio.sleep(0.1)  # until everybody has offered
        return self.clients[index].decode(exchange.key, None, (b"payload",))

    def result(self, value, participants, tokens=0, number=0, status="ok"):
        mean = {"w": torch.full((2,), float(value))}
        return Result(
            status,
            number + 1,
            tuple(participants),
            (1.0,) * len(participants),
            mean=mean,
            tokens=tokens,
        )

    async def round(self, values, number=0, tokens=None, **told):
        """All three offer, and are told the right result or what `told` says instead."""
        total = 10 * STEPS * 3 * (number + 1) if tokens is None else tokens
        for index in range(3):
            self.train(index)
            right = self.result(sum(values) / 3, sorted(PEERS), total, number)
            self.results[PEERS[index]] = told.get(PEERS[index], right)
        await asyncio.gather(
            *(self.offer(index, value, number) for index, value in enumerate(values))
        )

    def applied(self, index, number=0, status="ok", birth=1):
        self.watch.reported(
            index,
            birth,
            self.driver,
            "round",
            {"stream": "delta", "round": number, "status": status},
        )


def violations(main, arm="diloco", liars=NO_LIARS):
    """The watch's report after `main(scene)`."""

    async def whole():
        scene = Scene(arm, liars)
        await main(scene)
        return scene.watch.violations

    return run_virtual(whole())


def the_only(found, words):
    assert len(found) == 1, found
    assert words in found[0]


def test_right_rounds_pass():
    async def main(scene):
        await scene.round([1, 2, 3])
        for index in range(3):
            scene.applied(index)
        await scene.round([1, 2, 6], number=1)
        for index in range(3):
            scene.applied(index, 1)

    assert violations(main) == []


def test_a_round_key_that_is_used_again_is_found_and_in_another_life_it_is_not():
    async def main(scene):
        await scene.round([1, 2, 3])
        await scene.offer(0, 1)

    the_only(violations(main), "used again")

    async def reborn(scene):
        await scene.round([1, 2, 3])
        scene.clients[0] = scene.exchange_client(0, birth=2)
        await scene.offer(0, 1)

    assert violations(reborn) == []


def test_a_round_that_is_applied_twice_is_found():
    async def main(scene):
        scene.applied(0)
        scene.applied(0)
        scene.applied(0, birth=2)

    the_only(violations(main), "applied round 0 of delta twice")


def test_what_was_applied_before_a_snapshot_was_adopted_may_be_applied_to_it_again():
    async def main(scene):
        scene.applied(0)
        scene.watch.reported(0, 1, scene.driver, "adopt", {"reason": "too far behind"})
        scene.applied(0)
        assert scene.watch.rounds == 1

    assert violations(main) == []


def test_members_of_a_close_method_may_differ_a_little_and_only_where_they_have_applied_the_same():
    async def main(scene, offset, rounds):
        for index, own in enumerate(rounds):
            scene.state = torch.full((2,), 1 + index * offset)
            fields = {"stream": "part", "round": own["part"], "status": "ok"}
            scene.watch.reported(index, 1, scene.driver, "round", fields, own)

    together, apart = [{"part": 3}, {"part": 3}], [{"part": 3}, {"part": 4}]
    assert violations(lambda scene: main(scene, 1e-5, together), arm="demo") == []
    the_only(violations(lambda scene: main(scene, 0.1, together), arm="demo"), "states differ")
    assert violations(lambda scene: main(scene, 0.1, apart), arm="demo") == []


def test_what_was_gathered_is_what_was_sent_bit_by_bit():
    async def main(scene):
        for index in range(2):
            scene.results[PEERS[index]] = Result("failed", 1)
            await scene.offer(index, index + 1)
        right = scene.result(1.5, ["one", "two"], 60)
        true, false = ({"one": 1.0, "two": two} for two in (2.0, 2.0 + 2**-20))
        for told in (true, false):
            gathered = {who: {"w": torch.full((2,), value)} for who, value in told.items()}
            scene.results["one"] = replace(right, gathered=gathered)
            for index in range(2):
                scene.train(index)
            scene.clients[0].decode(ExchangeKey("delta", 0), None)

    the_only(violations(main, arm="sparseloco"), "has gathered tensors of two that it never sent")


def test_rounds_since_a_moment_are_counted_by_peer_and_stream():
    async def main(scene):
        scene.applied(0)
        await asyncio.sleep(1)
        for number in (1, 2):
            scene.applied(0, number)
        counts = scene.watch.rounds_since(0.5)
        assert counts == {"one": {"delta": 2}, "two": {}, "three": {}}
        assert scene.watch.statuses == {"ok": 3}

    assert violations(main, arm="noloco") == []


def test_states_that_differ_after_a_round_are_found_unless_the_method_is_per_peer():
    async def main(scene):
        scene.applied(0)
        scene.state = torch.ones(2)
        scene.applied(1)

    the_only(violations(main), "states differ")
    assert violations(main, arm="noloco") == []


def test_a_round_that_fails_is_found_only_while_nothing_but_a_death_has_happened():
    async def main(scene):
        scene.watch.calm_until_s = 5.0
        scene.applied(0, status="failed")
        await asyncio.sleep(6)
        scene.applied(0, 1, status="failed")

    the_only(violations(main), "round 0 of delta failed although only one peer had died")


def test_a_round_that_was_late_at_the_death_may_fail():
    async def main(scene):
        scene.watch.calm_until_s, scene.watch.overdue = 5.0, {("delta", 0)}
        scene.applied(0, status="failed")

    assert violations(main) == []


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_mean_of_something_else_than_what_was_sent_is_found(codec):
    async def main(scene):
        for index, value in enumerate([1, 2, 3]):
            scene.train(index)
            scene.results[PEERS[index]] = Result("failed", 1)
            await scene.offer(index, value, codec=codec)
        scene.results["one"] = scene.result(2.3, sorted(PEERS), 90)
        scene.clients[0].decode(ExchangeKey("delta", 0), None)

    the_only(violations(main), "the mean of w in round 0 of delta is off by 0.3")


def test_means_that_differ_in_one_bit_are_found():
    async def main(scene):
        other = scene.result(2 + 2**-20, sorted(PEERS), 90)
        await scene.round([1, 2, 3], three=other)

    the_only(violations(main), "peer 2 has another mean in round 0")


def test_a_member_that_sent_nothing_does_not_count():
    async def main(scene):
        scene.results["one"] = scene.result(1, ["one", "two"], 60)
        await scene.offer(0, 1)

    the_only(violations(main), "counts ['two'], which sent nothing")


def test_in_pairs_a_contribution_has_one_partner():
    async def main(scene):
        for index in range(3):
            scene.results[PEERS[index]] = Result("failed", 1)
            await scene.offer(index, 1)
        for index, pair in ((0, ["one", "two"]), (1, ["one", "two"]), (2, ["three", "two"])):
            scene.results[PEERS[index]] = scene.result(1, pair)
            scene.clients[index].decode(ExchangeKey("delta", 0), None)

    the_only(violations(main, arm="noloco"), "two counts in the pair")


def test_tokens_that_do_not_add_up_are_found():
    async def main(scene):
        await scene.round([1, 2, 3])
        await scene.round([1, 2, 3], number=1, tokens=200)

    the_only(violations(main), "round 1 of delta has 200 tokens after 90")


@pytest.mark.parametrize(("claimed", "is_found"), [(0, False), (500, False), (501, True)])
def test_among_liars_tokens_are_at_most_those_trained_and_what_the_liars_may_claim(
    claimed, is_found
):
    async def main(scene):
        await scene.round([1, 2, 3])
        await scene.round([1, 2, 3], number=1, tokens=90 + 60 + claimed)

    found = violations(main, liars=Distrust(["three"], 500))
    assert [f"round 1 of delta has {150 + claimed} tokens" in each for each in found] == (
        [True] if is_found else []
    )


def test_what_a_liar_applies_is_no_violation_and_what_others_apply_is_one_still():
    async def main(scene):
        for index in range(3):
            scene.state = torch.full((2,), float(index > 0) + (index > 1))
            scene.applied(index)

    the_only(violations(main, liars=Distrust(["three"], 0)), "['peer 0', 'peer 1']")


def test_peers_that_are_told_different_tokens_are_found():
    async def main(scene):
        await scene.round([1, 2, 3])
        scene.results["one"] = scene.result(2, sorted(PEERS), 91)
        scene.clients[0].decode(ExchangeKey("delta", 0), None)

    the_only(violations(main), "ended as")


def test_work_that_counts_twice_is_found_though_the_sums_are_right():
    async def main(scene):
        await scene.round([1, 2, 3])
        # the first trains nothing more, and offers the same
        for index, steps in (
            (0, 0),
            (1, STEPS),
            (2, 2 * STEPS),
        ):
            scene.train(index, steps)
            scene.results[PEERS[index]] = Result("failed", 2)
            await scene.offer(index, 1, 1)
        scene.results["one"] = scene.result(1, sorted(PEERS), 180, 1)
        scene.clients[0].decode(ExchangeKey("delta", 1), None)

    the_only(violations(main), "60 tokens of ('one', 1) count, but it has trained 30")


def test_at_most_twenty_violations_are_kept():
    watch = InvariantChecker("diloco", PEERS)
    for number in range(50):
        watch.violate(str(number))
    assert watch.violations == [str(number) for number in range(20)]


def test_the_digest_is_that_of_what_happened():
    def digest(index):
        async def whole():
            scene = Scene()
            scene.applied(index)
            return scene.watch.digest()

        return run_virtual(whole())

    assert digest(0) == digest(0) != digest(1)


# Looking at peers.


def a_peer(waits=(), size_bytes=0, tasks=0):
    port = SimpleNamespace(store=SimpleNamespace(size_bytes=size_bytes), now=lambda: 1.0)
    return SimpleNamespace(
        me="one", context=port, waits=lambda: list(waits), tasks=range(tasks), run_s=lambda: 100.0
    )


def wait(left_s=1.0, whom=("two",), number=0):
    return OpenWait(Key("delta", number), whom, left_s)


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (a_peer([wait(left_s=DEADLINE_S + 0.1)]), "beyond the deadline"),
        (a_peer([wait(left_s=float("inf"))]), "beyond the deadline"),
        (a_peer([wait(left_s=float("nan"))]), "beyond the deadline"),
        (a_peer([wait(whom=("two", "one"))]), "waits for itself"),
        (a_peer(size_bytes=MAX_STORE_BYTES + 1), "bytes of chunks"),
        (a_peer(tasks=MAX_TASKS + 1), f"{MAX_TASKS + 1} tasks"),
    ],
)
def test_a_look_finds_waits_without_end_and_whatever_has_grown(peer, words):
    watch = InvariantChecker("diloco", PEERS)
    watch.look(peer)
    the_only(watch.violations, words)


def test_a_look_lets_pass_what_is_at_its_bound():
    watch = InvariantChecker("diloco", PEERS)
    watch.look(a_peer([wait(DEADLINE_S), wait(-100.0)], MAX_STORE_BYTES, MAX_TASKS))
    assert watch.violations == []


@pytest.mark.parametrize(("count", "found"), [(MAX_ITEMS, 0), (MAX_ITEMS + 1, 1)])
def test_a_container_that_has_grown_is_a_violation(monkeypatch, count, found):
    monkeypatch.setattr(limits, "longest", lambda peer: (count, "peer.somewhere"))
    watch = InvariantChecker("diloco", PEERS)
    watch.check_memory(a_peer())
    assert len(watch.violations) == found


def a_loop(age_s, done=False):
    """One exchange that was opened this many seconds before 100."""
    key = ExchangeKey("delta", 4)
    exchange = SimpleNamespace(key=key, deadline_s=DEADLINE_S)
    table = (SimpleNamespace(exchange=exchange, since_s=100.0 - age_s),)
    under_way = {key: SimpleNamespace(done=lambda: done)}
    return SimpleNamespace(driver=SimpleNamespace(table=table), under_way=under_way)


@pytest.mark.parametrize(
    ("age_s", "named", "done", "words"),
    [
        (DEADLINE_S, True, False, None),
        (OVERDUE_S, False, False, None),
        (OVERDUE_S + 0.1, False, False, "unnamed"),
        (DEADLINE_S + OVERDUE_S, True, False, None),
        (DEADLINE_S + OVERDUE_S + 0.1, True, False, "has waited for"),
        (1000.0, False, True, None),
    ],
)
def test_at_the_end_nothing_is_open_long_after_its_deadline_or_without_a_name(
    age_s, named, done, words
):
    watch = InvariantChecker("diloco", PEERS)
    watch.check_waits(a_peer([wait(number=4)] if named else []), a_loop(age_s, done))
    assert len(watch.violations) == (words is not None)
    assert words is None or words in watch.violations[0]
