"""SPARTA compared with section 13 of its specification, alone and inside DiLoCo."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.compression.catalog import codec
from farflock.compression.codec import Context
from farflock.optimizers.contrib.sparta_diloco import SpartaDiLoCo
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.method import Progress, Result
from farflock.optimizers.parts.outer import OuterSGD
from farflock.optimizers.sparta import Sparta, masked

EXACT = {"codec": "fp32", "return_codec": "fp32"}
INNER = {**EXACT, "mask_codec": "fp32"}
selectors = pytest.mark.parametrize("selector", ["random", "partition"])


def coded(name, x):
    payload, out = bytearray(), torch.empty(x.numel())
    codec(name).encode(x.reshape(-1), Context(), payload)
    codec(name).decode(payload, Context(), out)
    return out.reshape(x.shape)


class Lockstep:
    """Peers in lockstep whose results come `delay` steps later; theta takes a step of 1 along each
    gradient."""

    def __init__(self, vectors, make, peers=3, size=10, delay=0):
        self.delay, self.step = delay, 0
        self.peers = [(make(), vectors(a=self.start(size), b=self.start(4))) for _ in range(peers)]
        self.flying = []  # (step at which it arrives, method, replica, exchange, result)
        self.offered = []

    @staticmethod
    def start(size):
        return torch.arange(size, dtype=torch.float32) / 4

    def gradient(self, peer, name, count):
        generator = torch.Generator().manual_seed(1000 * self.step + 10 * peer + (name == "a"))
        return torch.randint(-8, 9, (count,), generator=generator) / 64  # dyadic: sums are exact

    def steps(self, count, silent=False):
        for _ in range(count):
            offers = {}
            for peer, (method, replica) in enumerate(self.peers):
                if not silent:
                    replica.add_gradient(
                        **{n: self.gradient(peer, n, s[0]) for n, s in replica.shapes.items()}
                    )
                method.local_step(replica, Progress(self.step))
                for exchange in method.due(replica, Progress(self.step + 1)):
                    offers.setdefault(exchange.key, []).append((method, replica, exchange))
            self.step += 1
            for offered in offers.values():
                self.close(offered)
            while self.flying and self.flying[0][0] <= self.step:
                _, method, replica, exchange, result = self.flying.pop(0)
                method.apply(replica, exchange, result)

    def close(self, offered):
        first = offered[0][2]
        self.offered.append((self.step, first))
        sent = [
            {what: coded(one.codec, x) for what, x in one.tensors.items()} for _, _, one in offered
        ]
        mean = {
            what: coded(
                first.return_codec,
                torch.stack([one[what] for one in sent]).double().mean(0).float(),
            )
            for what in sent[0]
        }
        everything = {what: [(0, x.numel())] for what, x in mean.items()}
        names = tuple(map(str, range(len(sent))))
        late = self.delay if first.key.stream == "mask" else 0
        for (method, replica, exchange), own in zip(offered, sent, strict=True):
            number = first.key.round + first.stride
            status = "ok" if len(sent) > 1 else "alone"
            result = Result(
                status,
                number,
                names,
                (1.0,) * len(sent),
                mean,
                None,
                own,
                everything,
                steps_since=late,
            )
            self.flying.append((self.step + late, method, replica, exchange, result))
        self.flying.sort(key=lambda entry: entry[0])

    def thetas(self):
        return [
            torch.cat([*replica.read(replica.names, "param").values()]) for _, replica in self.peers
        ]


# the mask


@given(
    st.sampled_from(["random", "partition"]),
    st.integers(1, 50),
    st.integers(0, 10**6),
    st.integers(1, 500),
)
@settings(max_examples=60, deadline=None)
def test_a_mask_has_one_place_in_each_run(selector, one_in, round_number, count):
    places = masked(selector, one_in, 7, round_number, count)
    assert (places // one_in).tolist() == list(range(-(-count // one_in)))
    assert torch.equal(places, masked(selector, one_in, 7, round_number, count))


@given(st.integers(1, 20), st.integers(0, 5), st.integers(1, 200), st.integers(0, 2**64 - 1))
@settings(max_examples=40, deadline=None)
def test_a_partitions_sweep_takes_each_value_exactly_once(one_in, sweep, count, seed):
    rounds = range(sweep * one_in, (sweep + 1) * one_in)
    taken = torch.cat([masked("partition", one_in, seed, number, count) for number in rounds])
    assert sorted(taken[taken < count].tolist()) == list(range(count))


def test_the_sweeps_of_a_partition_differ():
    first, second = (masked("partition", 50, 1337, number, 5000) for number in (0, 50))
    assert (first == second).float().mean() < 0.2


def test_random_masks_take_each_place_with_its_probability():
    rounds = 4000
    counts = torch.zeros(24)
    for number in range(rounds):
        counts[masked("random", 8, 3, number, 24)] += 1
    expected = rounds / 8
    assert bool(((counts - expected).abs() < 5 * expected**0.5).all())


@selectors
def test_peers_send_the_values_of_one_mask_and_no_index(vectors, selector):
    swarm = Lockstep(vectors, lambda: Sparta(selector, 4, **EXACT))
    before = swarm.thetas()[0]
    swarm.steps(1, silent=True)
    ((_, exchange),) = swarm.offered
    places = masked(selector, 4, 1337, 0, 14)
    expected = [float(before[place]) if place < 14 else 0.0 for place in places.tolist()]
    assert exchange.tensors["values"].tolist() == expected
    assert len(expected) == 4  # of 14 values: p·P, rounded up


def test_another_seed_gives_another_mask(vectors):
    sent = [
        Lockstep(vectors, lambda seed=seed: Sparta(one_in=5, seed=seed, **EXACT), 1, size=996)
        for seed in (1, 2)
    ]
    for swarm in sent:
        swarm.steps(1, silent=True)
    first, second = (swarm.offered[0][1].tensors["values"] for swarm in sent)
    assert (first == second).float().mean() < 0.4


# the update, 13.2 and 13.6


@selectors
def test_only_masked_values_move_and_they_become_the_mean(vectors, selector):
    swarm = Lockstep(vectors, lambda: Sparta(selector, 3, period=2, **EXACT))
    shadow = Lockstep(vectors, lambda: Sparta(selector, 3, period=100, **EXACT))
    for one in (swarm, shadow):
        one.steps(2)
    places = masked(selector, 3, 1337, 0, 14)
    inside = torch.zeros(14, dtype=torch.bool)
    inside[places[places < 14]] = True
    mean = torch.stack(shadow.thetas()).double().mean(0).float()
    for ours, alone in zip(swarm.thetas(), shadow.thetas(), strict=True):
        assert torch.equal(ours, torch.where(inside, mean, alone))


@selectors
def test_everything_every_step_is_local_sgd_with_one_step_a_round(vectors, selector):
    ours = Lockstep(vectors, lambda: Sparta(selector, 1, **EXACT), peers=4)
    theirs = Lockstep(vectors, lambda: DiLoCo(1, OuterSGD(1.0), **EXACT), peers=4)
    for swarm in (ours, theirs):
        swarm.steps(6)
    for mine, other in zip(ours.thetas(), theirs.thetas(), strict=True):
        assert torch.equal(mine, ours.thetas()[0])
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@selectors
@pytest.mark.parametrize("delay", [0, 2])
def test_averaging_leaves_the_mean_of_the_replicas_where_it_was(vectors, selector, delay):
    swarm = Lockstep(
        vectors, lambda: Sparta(selector, 2, period=3, delay=delay, **EXACT), peers=4, delay=delay
    )
    shadow = Lockstep(vectors, lambda: Sparta(selector, 2, period=1000, **EXACT), peers=4)
    for one in (swarm, shadow):
        one.steps(12)
    ours, alone = (torch.stack(one.thetas()).double() for one in (swarm, shadow))
    torch.testing.assert_close(ours.mean(0), alone.mean(0), rtol=0, atol=1e-6)
    assert float(ours.var(0).sum()) < 0.7 * float(alone.var(0).sum())


def test_a_lossy_codec_leaves_what_it_rounds_off_in_each_replica(vectors):
    """Steps of 2^-14 on values near 1 are below half of fp16's unit: with theta <- mean they would
    never make progress."""
    swarm = Lockstep(vectors, lambda: Sparta(one_in=1), peers=2)
    for _, replica in swarm.peers:
        replica.write({"a": torch.ones(10), "b": torch.ones(4)}, "param")
        replica.lr = 2.0**-14
    swarm.gradient = lambda peer, name, count: torch.full((count,), -1.0)
    swarm.steps(40)
    assert all(torch.equal(theta, torch.full((14,), 1 + 40 * 2.0**-14)) for theta in swarm.thetas())


@selectors
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_alone_nothing_is_changed_by_it(vectors, selector, name):
    make = lambda period: Sparta(selector, 2, period=period, codec=name, return_codec=name)  # noqa: E731
    swarm, shadow = (
        Lockstep(vectors, lambda period=period: make(period), peers=1) for period in (1, 1000)
    )
    for one in (swarm, shadow):
        one.steps(9)
    assert torch.equal(swarm.thetas()[0], shadow.thetas()[0])


@selectors
def test_the_asynchronous_form_at_delay_0_is_the_synchronous_one(vectors, selector):
    """theta + (mean - sent), computed on paper, against what the method does."""
    swarm = Lockstep(vectors, lambda: Sparta(selector, 2, **EXACT), peers=2)
    shadow = Lockstep(vectors, lambda: Sparta(selector, 2, period=1000, **EXACT), peers=2)
    for _ in range(6):
        for one in (swarm, shadow):
            one.steps(1)
        places = masked(selector, 2, 1337, swarm.step - 1, 14)
        places = places[places < 14]
        mean = torch.stack(shadow.thetas()).double().mean(0).float()
        for (_, replica), theta in zip(shadow.peers, shadow.thetas(), strict=True):
            theta[places] += mean[places] - theta[places]
            replica.write({"a": theta[:10], "b": theta[10:]}, "param")
        for ours, theirs in zip(swarm.thetas(), shadow.thetas(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_delayed_mean_keeps_the_steps_made_since(vectors):
    swarm = Lockstep(
        vectors, lambda: Sparta(one_in=1, period=4, delay=2, **EXACT), peers=2, delay=2
    )
    swarm.steps(4)
    then = swarm.thetas()
    mean = torch.stack(then).double().mean(0).float()
    swarm.steps(1)
    between = swarm.thetas()
    shadow = [theta.clone() for theta in between]
    for peer, theta in enumerate(shadow):
        theta -= torch.cat([swarm.gradient(peer, "a", 10), swarm.gradient(peer, "b", 4)])
    swarm.steps(1)
    for now, theta, sent in zip(swarm.thetas(), shadow, then, strict=True):
        torch.testing.assert_close(now, mean + (theta - sent), rtol=1e-6, atol=1e-7)
    (_, exchange) = swarm.offered[0]
    assert exchange.apply_after == 2


@pytest.mark.parametrize("status", ["failed", "partial"])
def test_a_missed_round_changes_nothing_and_the_next_one_is_another_mask(vectors, status):
    method, replica = Sparta(one_in=2, **EXACT), vectors(x=torch.arange(8.0))
    method.local_step(replica, Progress(0))
    (exchange,) = method.due(replica, Progress(1))
    mean = {"values": torch.full((4,), 99.0)} if status == "partial" else None
    method.apply(
        replica, exchange, Result(status, 1, ("b",), (1,), mean, None, dict(exchange.tensors))
    )
    assert torch.equal(replica.read(["x"], "param")["x"], torch.arange(8.0))
    method.local_step(replica, Progress(1))
    (again,) = method.due(replica, Progress(2))
    assert again.key.round == 1
    assert again.tensors["values"].tolist() == masked("random", 2, 1337, 1, 8).tolist()


def test_values_whose_shard_was_not_taken_stay(vectors):
    method, replica = (
        Sparta("partition", one_in=2, **EXACT),
        vectors(x=torch.arange(5.0), y=torch.arange(5.0, 8.0)),
    )
    method.local_step(replica, Progress(0))
    (exchange,) = method.due(replica, Progress(1))
    mean, taken = {"values": torch.full((4,), 99.0)}, {"values": [(1, 3)]}
    method.apply(
        replica,
        exchange,
        Result("partial", 1, ("a",), (1,), mean, None, dict(exchange.tensors), taken),
    )
    moved = torch.cat([*replica.read(["x", "y"], "param").values()]) == 99.0
    assert moved.nonzero().flatten().tolist() == masked("partition", 2, 1337, 0, 8)[1:3].tolist()


def test_a_round_decided_without_me_only_moves_the_mask_on(vectors):
    method, replica = Sparta(one_in=2, **EXACT), vectors(x=torch.arange(8.0))
    (template,) = method.streams(replica)
    replayed = Result("ok", 5, ("b", "c"), (1, 1), {"values": torch.zeros(4)})
    method.apply(replica, type(template)(template.key, "mean", template.group, {}), replayed)
    assert torch.equal(replica.read(["x"], "param")["x"], torch.arange(8.0))
    method.local_step(replica, Progress(0))
    assert method.due(replica, Progress(1))[0].key.round == 5


def test_carrying_keeps_ones_own_parameters(vectors):
    teacher, source = Sparta(**EXACT), vectors(x=torch.ones(8))
    state = {**teacher.snapshot(source), "round": torch.tensor(7)}
    method, replica = Sparta(**EXACT), vectors(x=torch.zeros(8))
    method.restore(replica, state, "carry")
    assert not bool(replica.read(["x"], "param")["x"].any())
    assert int(method.snapshot(replica)["round"]) == 7


def test_replicas_draw_together_as_the_mixing_time_says(vectors):
    """After one sweep without gradients each value has been averaged once,
    so all replicas are equal."""
    swarm = Lockstep(vectors, lambda: Sparta("partition", 5, **EXACT), peers=4)
    for peer, (_, replica) in enumerate(swarm.peers):
        replica.write(
            {"a": torch.full((10,), float(peer)), "b": torch.full((4,), -float(peer))}, "param"
        )
    swarm.steps(4, silent=True)
    assert not torch.equal(*swarm.thetas()[:2])
    swarm.steps(1, silent=True)
    assert all(torch.equal(theta, swarm.thetas()[0]) for theta in swarm.thetas())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selector": "sequential"}, "choose random or partition"),
        ({"one_in": 0}, "one value in 0"),
        ({"one_in": 2**31}, "one value in"),
        ({"period": 0}, "period of 0"),
        ({"delay": 1}, "choose 0 to 0, or a longer period"),
        ({"period": 5, "delay": -1}, "choose 0 to 4"),
        ({"seed": -1}, "seed -1"),
        ({"codec": "topk:64/4096"}, "codec topk:64/4096 is biased"),
        ({"return_codec": "topk:64/4096"}, "return codec topk:64/4096 is biased"),
        ({"deadline_s": float("inf")}, "deadline"),
    ],
)
def test_impossible_options_are_refused_with_the_nearest_choice(options, message):
    with pytest.raises(ValueError, match=message):
        Sparta(**options)


# inside DiLoCo


def both(period=6, **options):
    return lambda: SpartaDiLoCo(period, **{"one_in": 2, **INNER, **options})


def test_two_streams_share_the_axis_of_sparse_means(vectors):
    swarm = Lockstep(vectors, both(6, mask_period=2))
    swarm.steps(12)
    rounds = {"mask": [], "delta": []}
    for step, exchange in swarm.offered:
        rounds[exchange.key.stream].append((step, exchange.key.round))
    assert rounds["mask"] == [(2, 0), (4, 1), (6, 2), (8, 3), (10, 4), (12, 5)]
    assert rounds["delta"] == [(6, 2), (12, 5)]
    method, replica = swarm.peers[0]
    templates = [(one.key.stream, one.key.round, one.stride) for one in method.streams(replica)]
    assert templates == [("mask", 0, 1), ("delta", 2, 3)]


@pytest.mark.parametrize("delay", [0, 1])
def test_after_an_outer_step_all_replicas_equal_the_outer_parameters_in_any_order(vectors, delay):
    swarm = Lockstep(vectors, both(6, mask_period=2, delay=delay), delay=delay)
    swarm.steps(6)
    method, replica = swarm.peers[0]
    phi = torch.cat([*method.eval_params(replica).values()])
    assert all(torch.equal(theta, phi) for theta in swarm.thetas())
    shadow = [theta.clone() for theta in swarm.thetas()]
    for peer, theta in enumerate(shadow):
        theta -= torch.cat([swarm.gradient(peer, "a", 10), swarm.gradient(peer, "b", 4)])
    swarm.steps(1)  # with a delay the old sparse mean arrives here, too late to be used
    assert all(torch.equal(now, theta) for now, theta in zip(swarm.thetas(), shadow, strict=True))


def test_between_outer_steps_sparse_means_hold_the_replicas_together(vectors):
    def spread(make):
        swarm = Lockstep(vectors, make, peers=4)
        swarm.steps(19)
        return float(torch.stack(swarm.thetas()).var(0).sum())

    assert spread(both(20)) < 0.2 * spread(lambda: DiLoCo(20, **EXACT))


def test_with_averaging_outer_steps_the_pseudo_gradient_is_the_same_as_without_sparse_means(
    vectors,
):
    """They leave the mean of the replicas where it was, and gradients here do not depend on
    theta."""
    ours = Lockstep(vectors, both(6, outer=OuterSGD(1.0)))
    theirs = Lockstep(vectors, lambda: DiLoCo(6, OuterSGD(1.0), **EXACT))
    for swarm in (ours, theirs):
        swarm.steps(12)
    torch.testing.assert_close(ours.thetas()[0], theirs.thetas()[0], rtol=1e-6, atol=1e-6)


def test_adopting_ones_own_snapshot_after_an_outer_step_changes_nothing_that_follows(vectors):
    through, stopped = (Lockstep(vectors, both(4)) for _ in range(2))
    through.steps(8)
    stopped.steps(4)
    for number, (method, replica) in enumerate(stopped.peers):
        fresh = both(4)()
        fresh.restore(replica, method.snapshot(replica), "adopt")
        stopped.peers[number] = (fresh, replica)
    stopped.steps(4)
    for ours, theirs in zip(stopped.thetas(), through.thetas(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_period_that_is_no_multiple_of_the_masks_is_refused_with_the_nearest():
    with pytest.raises(
        ValueError, match="period of 500 steps is not a multiple of mask_period=7; choose 497"
    ):
        SpartaDiLoCo(500, mask_period=7)
    with pytest.raises(ValueError, match="one value in 0"):
        SpartaDiLoCo(one_in=0)


def test_while_an_outer_step_is_under_way_sparse_means_move_nothing_and_after_it_they_do_again(
    vectors,
):
    method, replica = both(4)(), vectors(a=torch.arange(6.0))
    moved, outer = [], []
    for step in range(7):
        method.local_step(replica, Progress(step))
        exchanges = {one.key.stream: one for one in method.due(replica, Progress(step + 1))}
        outer += [one for one in exchanges.values() if one.key.stream == "delta"]
        mask, before = exchanges["mask"], replica.read(["a"], "param")["a"]
        values = {"values": mask.tensors["values"] + 1}
        taken = {"values": [(0, 3)]}
        method.apply(
            replica,
            mask,
            Result("ok", step + 1, ("p", "q"), (1, 1), values, None, mask.tensors, taken),
        )
        moved.append(not torch.equal(replica.read(["a"], "param")["a"], before))
        if step == 5:
            method.apply(replica, outer.pop(), Result("failed", 7))
    assert moved == [True, True, True, False, False, False, True]
