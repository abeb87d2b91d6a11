"""The loopback swarm itself: rounds of several streams, gathers, second phases, early closing,
replays, and the alarm when members that must be equal are not."""

from dataclasses import dataclass, field

import pytest
import torch

from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress


@dataclass
class Probe:
    """A method that asks for the next round of each of its specimens' streams after every
    `every`-th step, and remembers all results. Each value that it sends is the number of steps it
    has taken."""

    templates: list
    every: int = 1
    equality: str = "exact"
    second: Exchange | None = None  # asked for when a result of the first stream is applied
    state: float = 0.0
    steps: int = 0
    rounds: dict = field(default_factory=dict)
    pending: set = field(default_factory=set)
    seen: list = field(default_factory=list)

    def streams(self, replica):
        return self.templates + ([self.second] if self.second else [])

    def local_step(self, replica, progress):
        assert isinstance(progress, Progress)
        self.steps += 1

    def ask(self, one):
        number = self.rounds.setdefault(one.key.stream, one.key.round)
        self.pending.add(one.key.stream)
        tensors = {name: torch.full_like(x, float(self.steps)) for name, x in one.tensors.items()}
        fields = {
            name: getattr(one, name)
            for name in ("codec", "return_codec", "stride", "enough", "uniform", "weight")
        }
        return Exchange(ExchangeKey(one.key.stream, number), one.kind, one.group, tensors, **fields)

    def due(self, replica, progress):
        idle = [one for one in self.templates if one.key.stream not in self.pending]
        return [self.ask(one) for one in idle] if self.steps % self.every == 0 else []

    def apply(self, replica, exchange, result):
        stream = exchange.key.stream
        self.rounds[stream] = result.next_round
        self.pending.discard(stream)
        self.seen.append((exchange.key, bool(exchange.tensors), result))
        first = bool(exchange.tensors) and stream == self.templates[0].key.stream
        return [self.ask(self.second)] if self.second and first else []

    def snapshot(self, replica):
        return {"state": torch.tensor(self.state)}

    def agreed(self, replica, stream):
        return {"state": torch.tensor(self.state)}


def one(stream, kind="gather", first=0, **more):
    return Exchange(
        ExchangeKey(stream, first),
        kind,
        All(),
        {"x": torch.zeros(3)},
        codec="fp32",
        return_codec="fp32",
        **more,
    )


def results(peer, stream):
    return [result for key, _, result in peer.method.seen if key.stream == stream]


def test_a_gather_gives_everybodys_tensors_in_sorted_order_and_their_mean(loopback):
    swarm = loopback(lambda: Probe([one("g")]), "cab")
    swarm.rests = lambda peer, tick: False
    swarm.peers["b"].method.steps = 7
    swarm.steps(1)
    (result,) = results(swarm.peers["c"], "g")
    assert result.status == "ok"
    assert list(result.gathered) == ["a", "b", "c"]
    assert [x["x"].tolist() for x in result.gathered.values()] == [[1.0] * 3, [8.0] * 3, [1.0] * 3]
    torch.testing.assert_close(result.mean["x"], torch.full((3,), 10 / 3))
    assert (result.participants, result.weights, result.next_round) == (
        ("a", "b", "c"),
        (1.0,) * 3,
        1,
    )


def test_what_is_gathered_is_what_the_codec_makes_of_it(loopback):
    swarm = loopback(
        lambda: Probe(
            [
                Exchange(
                    ExchangeKey("g", 0), "gather", All(), {"x": torch.zeros(64)}, codec="topk:1/64"
                )
            ]
        )
    )
    swarm.steps(1)
    (result,) = results(swarm.peers["a"], "g")
    assert sorted(result.gathered["b"]["x"].tolist()) == [0.0] * 63 + [1.0]


def test_streams_move_along_one_axis_at_their_strides(loopback):
    swarm = loopback(lambda: Probe([one("p", "mean"), one("q", first=2, stride=3)]))
    swarm.steps(4)
    keys = [(key.stream, key.round) for key, _, _ in swarm.peers["a"].method.seen]
    assert sorted(keys) == [
        ("p", 0),
        ("p", 1),
        ("p", 2),
        ("p", 3),
        ("q", 2),
        ("q", 5),
        ("q", 8),
        ("q", 11),
    ]
    assert [result.next_round for result in results(swarm.peers["b"], "q")] == [5, 8, 11, 14]


def test_a_round_that_is_none_of_its_stream_is_an_error(loopback):
    swarm = loopback(lambda: Probe([one("q", first=2, stride=3)]))
    swarm.peers["a"].method.rounds["q"] = 3
    with pytest.raises(AssertionError, match=r"none of the rounds 2, 5, "):
        swarm.steps(1)


def test_a_second_phase_is_carried_in_the_same_tick(loopback):
    swarm = loopback(lambda: Probe([one("first")], every=2, second=one("second", "mean")), "abc")
    swarm.steps(4)
    for peer in swarm.peers.values():
        assert [key for key, _, _ in peer.method.seen] == [
            ExchangeKey(stream, number) for number in (0, 1) for stream in ("first", "second")
        ]


def test_enough_closes_with_the_first_and_the_others_get_what_was_gathered_without_them(loopback):
    swarm = loopback(lambda: Probe([one("g", enough=2)], equality="per-peer"), "abcd")
    swarm.steps(5)
    inside = [result.participants for result in results(swarm.peers["a"], "g")]
    assert all(len(names) == 2 for names in inside)
    assert len(set(inside)) > 1
    for name, peer in swarm.peers.items():
        for result, names in zip(results(peer, "g"), inside, strict=True):
            assert (result.status, tuple(result.gathered)) == ("partial", names)
            assert bool(result.taken) == (name in names)
            assert (
                result.sent["x"].tolist()
                == [float(peer.method.steps - 4 + result.next_round - 1)] * 3
            )


def test_a_late_question_gets_a_closed_rounds_result_and_a_silent_peer_has_it_replayed(
    loopback,
):
    swarm = loopback(lambda: Probe([one("g", enough=1)], equality="per-peer"), "ab")
    swarm.rests = lambda peer, tick: peer == "b" and tick < 3
    swarm.steps(3)
    b = swarm.peers["b"]
    swarm.steps(1)
    assert b.replayed == [ExchangeKey("g", 0), ExchangeKey("g", 1), ExchangeKey("g", 2)]
    told = [(key.round, asked, result.participants) for key, asked, result in b.method.seen]
    assert told[:3] == [(number, False, ("a",)) for number in range(3)]
    assert told[3][:2] == (3, True)
    assert all(
        result.sent is None and not result.taken for _, asked, result in b.method.seen if not asked
    )


def test_a_sleeping_peer_is_not_waited_for_and_catches_up_before_its_next_step(loopback):
    swarm = loopback(lambda: Probe([one("m", "mean")]), "ab")
    swarm.steps(1)
    swarm.peers["b"].asleep = True
    swarm.steps(2)
    swarm.peers["b"].asleep = False
    swarm.steps(1)
    keys = [(key.round, asked) for key, asked, _ in swarm.peers["b"].method.seen]
    assert keys == [(0, True), (1, False), (2, False), (3, True)]
    assert [result.status for result in results(swarm.peers["a"], "m")] == [
        "ok",
        "alone",
        "alone",
        "ok",
    ]


def test_without_an_offer_of_everybody_a_round_closes_after_a_while(loopback):
    swarm = loopback(lambda: Probe([one("m", "mean")]), "ab")
    swarm.timeout_ticks = 3
    swarm.peers["b"].method.every = 100
    swarm.steps(3)
    assert not results(swarm.peers["a"], "m")
    swarm.steps(1)
    (result,) = results(swarm.peers["a"], "m")
    assert (result.status, result.participants) == ("partial", ("a",))


def test_a_gather_takes_a_contribution_wholly_or_not_at_all(loopback):
    swarm = loopback(lambda: Probe([one("g"), one("m", "mean")]), "ab")
    swarm.taken = lambda peer, number: (
        (lambda what, n: [(1, n)]) if peer == "b" else (lambda what, n: [(0, n)])
    )
    swarm.steps(1)
    (gathered,), (mean,) = (results(swarm.peers["b"], stream) for stream in "gm")
    assert (gathered.participants, gathered.taken) == (("a",), {})
    assert (mean.participants, mean.taken) == (("a", "b"), {"x": [(1, 3)]})


def test_a_uniform_mean_takes_a_contribution_wholly_or_not_at_all(loopback):
    swarm = loopback(lambda: Probe([one("m", "mean", uniform=True)]), "ab")
    swarm.taken = lambda peer, number: lambda what, n: [(0, n - 1)] if peer == "b" else [(0, n)]
    swarm.steps(1)
    (result,) = swarm.peers["b"].results
    assert result.participants == ("a",)
    assert not result.taken


def test_misfortune_can_strike_one_stream_alone(loopback):
    swarm = loopback(lambda: Probe([one("g"), one("m", "mean")]))
    swarm.struck, swarm.fails = {"g"}, lambda number: True
    swarm.steps(2)
    assert {result.status for result in results(swarm.peers["a"], "g")} == {"failed"}
    assert {result.status for result in results(swarm.peers["a"], "m")} == {"ok"}


def test_members_that_must_be_equal_and_are_not_are_found_when_a_round_begins(loopback):
    swarm = loopback(lambda: Probe([one("m", "mean")]))
    swarm.steps(1)
    swarm.peers["b"].method.state = -0.0  # equal in value, not in bits
    with pytest.raises(AssertionError, match=r"another state .*\['state'\]"):
        swarm.steps(1)


def test_too_few_for_a_round_fail_it(loopback):
    swarm = loopback(lambda: Probe([one("m", "mean")]))
    swarm.taken = lambda peer, number: (
        (lambda what, n: []) if peer == "b" else (lambda what, n: [(0, n)])
    )
    for peer in swarm.peers.values():
        peer.method.ask = lambda entry, ask=peer.method.ask: Exchange(
            ask(entry).key,
            "mean",
            All(),
            entry.tensors,
            codec="fp32",
            return_codec="fp32",
            min_participants=2,
        )
    swarm.steps(1)
    assert [result.status for result in results(swarm.peers["a"], "m")] == ["failed"]
