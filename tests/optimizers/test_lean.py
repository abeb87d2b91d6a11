"""Lean averaging by the class alone: what is sent, where the rest stays, and what leaves the
momentum."""

import numpy as np
import pytest
import torch
from torch import nn
from worlds.codecs import round_trip

from farflock.compression.catalog import codec
from farflock.node.model.replica import PlainReplica
from farflock.optimizers.lean import Lean, rate_of
from farflock.optimizers.method import Progress, Result
from farflock.optimizers.parts.inner import InnerConfig

COUNT = 100
FLAT = {"codec": "fp32", "return_codec": "fp32"}
BETAS, EPS = (0.9, 0.95), 1e-8


def normal(seed, scale=1.0):
    return scale * torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


def integers(seed, count=24):
    """Values made from integers, because torch.randn has other bits on other processors."""
    return torch.randint(-999, 999, (count,), generator=torch.Generator().manual_seed(seed)) / 997


def work(made, replica, *gradients):
    """Take local steps; return the exchange that they lead to, if any."""
    for number, gradient in enumerate(gradients):
        replica.write({"x": gradient}, "grad")
        made.local_step(replica, Progress(number))
    return next(iter(made.due(replica, Progress(len(gradients)))), None)


def answer(made, exchange, *others, taken=((0, COUNT),), **more):
    """Return a group's answer to this message and the others' decoded ones."""
    mine = round_trip(codec(made.codec), exchange.tensors["x"])
    every = [mine, *others] if taken else list(others)
    mean = {"x": round_trip(codec(made.return_codec), torch.stack(every).mean(dim=0))}
    peers = tuple(f"p{number}" for number in range(len(every)))
    number, ranges = exchange.key.round + 1, {"x": taken} if taken else {}
    return Result("ok", number, peers, (1.0,) * len(peers), mean, None, {"x": mine}, ranges, **more)


def failure(exchange):
    return Result("failed", exchange.key.round + 1)


def read(replica, what="param"):
    return replica.read(["x"], what)["x"]


def phi(made, replica):
    return made.eval_params(replica)["x"]


def close(a, b, atol=1e-6):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.fixture
def adam():
    """(start, lr) -> a replica of one vector with AdamW."""

    def made(x, lr=0.01, decay=0.0):
        module = nn.Module()
        module.register_parameter("x", nn.Parameter(x.clone()))
        inner = InnerConfig(lr=lr, betas=BETAS, eps=EPS).build(module)
        for group in inner.param_groups:
            group["weight_decay"] = decay
        return PlainReplica(module, inner, clip_norm=None)

    return made


# What is sent, and what stays


@pytest.mark.parametrize("spec", ["ecsq:100", "ecsq:31", "int8", "topk:4/32"])
@pytest.mark.parametrize("decay", [0.0, 0.8, 1.0])
def test_what_was_not_sent_stays_in_the_replica_and_goes_with_the_next_message(
    vectors, spec, decay
):
    made = Lean(period=1, codec=spec, return_codec=spec, decay=decay)
    replica = vectors(x=normal(0))
    kept = torch.zeros(COUNT)
    for number in range(6):
        before = phi(made, replica)
        exchange = work(made, replica, normal(10 + number, 0.1))
        message = exchange.tensors["x"]
        close(message, kept - normal(10 + number, 0.1))
        assert torch.equal(message, read(replica) - before)
        result = answer(made, exchange, normal(20 + number, 0.1))
        made.apply(replica, exchange, result)
        assert torch.equal(phi(made, replica), before + result.mean["x"])
        kept = decay * (message - result.sent["x"])
        close(read(replica), phi(made, replica) + kept)
    assert bool(kept.any()) == (decay > 0)


def test_without_a_codec_it_is_the_mean_replica(vectors):
    """FedAvg: phi and theta are the mean of all theta, whatever the decay."""
    made, replica = Lean(period=2, decay=0.5, **FLAT), vectors(lr=0.1, x=normal(0))
    for number in range(3):
        before = phi(made, replica)
        exchange = work(made, replica, normal(10 + number), normal(20 + number))
        other = normal(30 + number, 0.1)
        mean_replica = (read(replica) + (before + other)) / 2
        made.apply(replica, exchange, answer(made, exchange, other))
        close(phi(made, replica), mean_replica)
        assert torch.equal(read(replica), phi(made, replica))


@pytest.mark.parametrize("spec", ["ecsq:100", "ecsq:20"])
def test_all_of_a_descent_arrives_in_the_end(vectors, spec):
    """Alone and with gradients of zero, phi moves to theta, and no work is lost on the way."""
    made, replica = Lean(period=1, codec=spec, return_codec="fp32"), vectors(x=normal(0))
    exchange = work(made, replica, normal(1))
    aim = read(replica)
    for _ in range(60):
        made.apply(replica, exchange, answer(made, exchange))
        exchange = work(made, replica, torch.zeros(COUNT))
        close(read(replica), aim, atol=1e-5)
    far, left = float(normal(1).abs().mean()), float((phi(made, replica) - aim).abs().mean())
    assert left < far / 1000


@pytest.mark.parametrize("decay", [0.5, 1.0])
@pytest.mark.parametrize("late", [0, 2])
def test_where_work_was_not_taken_all_of_it_stays_whole(vectors, decay, late):
    made, replica = (
        Lean(period=3, delay=2, decay=decay, codec="int4", return_codec="fp32"),
        vectors(x=normal(0)),
    )
    before = phi(made, replica)
    exchange = work(made, replica, normal(1), normal(2), normal(3))
    work(made, replica, *(normal(10 + number) for number in range(late)))
    since = -sum((normal(10 + number) for number in range(late)), torch.zeros(COUNT))
    result = answer(made, exchange, normal(4), taken=((10, 40), (60, 61)), steps_since=late)
    made.apply(replica, exchange, result)
    inside = torch.zeros(COUNT, dtype=torch.bool)
    inside[10:40], inside[60] = True, True
    message, sent = exchange.tensors["x"], result.sent["x"]
    assert torch.equal(phi(made, replica), before + result.mean["x"])
    expected = phi(made, replica) + torch.where(inside, decay * (message - sent), message) + since
    close(read(replica), expected, atol=3e-6)


def test_a_failed_round_moves_nothing_and_its_work_goes_with_the_next_message(vectors):
    made, replica = Lean(period=1, decay=0.5), vectors(x=normal(0))
    exchange = work(made, replica, normal(1))
    theta, before = read(replica), phi(made, replica)
    made.apply(replica, exchange, failure(exchange))
    assert torch.equal(read(replica), theta)
    assert torch.equal(phi(made, replica), before)
    second = work(made, replica, normal(2))
    assert second.key.round == exchange.key.round + 1
    close(second.tensors["x"], -normal(1) - normal(2))


@pytest.mark.parametrize("replayed", [False, True])
def test_a_round_without_me_moves_the_replica_along_with_phi(vectors, replayed):
    """The message was late, or the round was decided while this peer was away: its work is the same
    as before, on top of another phi."""
    made, replica = Lean(period=3, decay=0.5, **FLAT), vectors(x=normal(0))
    exchange = work(made, replica, *(normal(seed) for seed in (1, 2, 3)))
    theta, before = read(replica), phi(made, replica)
    result = answer(made, exchange, normal(4), taken=())
    if replayed:
        made.restore(replica, made.snapshot(replica), "carry")
        exchange = type(exchange)(exchange.key, "mean", exchange.group, {})
        result = Result("partial", 1, ("p0",), (1.0,), result.mean)
    made.apply(replica, exchange, result)
    assert torch.equal(phi(made, replica), before + normal(4))
    close(read(replica) - phi(made, replica), theta - before)
    assert work(made, replica, *(normal(seed) for seed in (5, 6, 7))).key.round == 1


# Overlap


@pytest.mark.parametrize("delay", [1, 2])
def test_steps_made_while_a_message_was_on_its_way_stay(vectors, delay):
    made, replica = Lean(period=3, delay=delay, decay=0.8), vectors(x=normal(0))
    exchange = work(made, replica, *(normal(seed) for seed in (1, 2, 3)))
    assert exchange.apply_after == delay
    copy = exchange.tensors["x"].clone()
    for number in range(delay):
        assert work(made, replica, normal(10 + number)) is None
    assert torch.equal(exchange.tensors["x"], copy)
    since = read(replica) - (phi(made, replica) + copy)
    result = answer(made, exchange, normal(4), steps_since=delay)
    made.apply(replica, exchange, result)
    close(read(replica), phi(made, replica) + 0.8 * (copy - result.sent["x"]) + since)
    rest = 3 - delay
    following = work(made, replica, *(torch.zeros(COUNT) for _ in range(rest)))
    assert following.key.round == 1


def test_nothing_is_asked_for_while_a_message_is_on_its_way(vectors):
    made, replica = Lean(period=2, delay=1), vectors(x=normal(0))
    exchange = work(made, replica, normal(1), normal(2))
    for number in range(5):
        assert work(made, replica, normal(3 + number)) is None
    made.apply(replica, exchange, answer(made, exchange, steps_since=5))
    second = work(made, replica, normal(8))
    close(second.tensors["x"], read(replica) - phi(made, replica))


# What leaves the momentum


@pytest.mark.parametrize("steps", [1, 4])
def test_with_all_of_the_correction_the_momentum_points_along_the_mean_step(adam, steps):
    """Period 1, no codec: rate·exp_avg / sqrt(exp_avg_sq) was -q, the replica's own step, and
    becomes -mean, the step of all."""
    made, replica = Lean(period=1, correction=1.0, cap=1e6, **FLAT), adam(normal(0))
    for number in range(steps):
        exchange = work(made, replica, normal(10 + number))
        own, root = exchange.tensors["x"], read(replica, "exp_avg_sq").sqrt()
        rate = rate_of(-own, read(replica, "exp_avg"), read(replica, "exp_avg_sq"))
        close(rate * read(replica, "exp_avg") / root, -own, atol=1e-5)
        result = answer(made, exchange, normal(20 + number, 0.01))
        made.apply(replica, exchange, result)
        close(rate * read(replica, "exp_avg") / root, -result.mean["x"], atol=1e-5)


def test_a_gradient_of_mine_that_the_mean_does_not_follow_leaves_my_momentum(adam):
    """This is a test of the sign: one peer went down, the others went up as far. The exchange takes
    it back, and so it takes its momentum."""
    made, replica = Lean(period=1, correction=1.0, cap=10.0, **FLAT), adam(torch.zeros(COUNT))
    exchange = work(made, replica, torch.ones(COUNT))
    assert bool((exchange.tensors["x"] < 0).all())
    assert bool((read(replica, "exp_avg") > 0).all())
    made.apply(replica, exchange, answer(made, exchange, -exchange.tensors["x"]))
    close(read(replica, "exp_avg"), torch.zeros(COUNT))
    close(read(replica), torch.zeros(COUNT))


@pytest.mark.parametrize("correction", [0.0, 0.25, 0.5])
def test_the_correction_is_its_share_of_all_of_it(adam, correction):
    made, replica = (
        Lean(period=1, correction=correction, cap=10.0, **FLAT),
        adam(torch.zeros(COUNT)),
    )
    exchange = work(made, replica, torch.ones(COUNT))
    before = read(replica, "exp_avg")
    made.apply(replica, exchange, answer(made, exchange, -exchange.tensors["x"]))
    close(read(replica, "exp_avg"), (1 - correction) * before)


@pytest.mark.parametrize("cap", [1e-3, 0.5])
def test_no_value_of_the_momentum_moves_by_more_than_the_cap_of_its_gradients_size(adam, cap):
    made, replica = Lean(period=1, correction=1.0, cap=cap, **FLAT), adam(normal(0))
    exchange = work(made, replica, normal(1))
    before, root = read(replica, "exp_avg"), read(replica, "exp_avg_sq").sqrt()
    mean = normal(2, 100.0)  # far beyond any step
    made.apply(replica, exchange, answer(made, exchange, mean))
    close((read(replica, "exp_avg") - before).abs(), cap * root)
    assert torch.equal(torch.sign(before - read(replica, "exp_avg")), torch.sign(mean))


def test_only_where_work_was_taken_does_the_momentum_change(adam):
    made, replica = Lean(period=1, correction=1.0, **FLAT), adam(normal(0))
    exchange = work(made, replica, normal(1))
    before = read(replica, "exp_avg")
    made.apply(replica, exchange, answer(made, exchange, normal(2), taken=((10, 20),)))
    changed = (read(replica, "exp_avg") != before).nonzero().flatten().tolist()
    assert changed == list(range(10, 20))


@pytest.mark.parametrize("fate", ["failed", "not taken"])
def test_a_round_without_my_work_leaves_the_momentum(adam, fate):
    made, replica = Lean(period=1, correction=1.0, **FLAT), adam(normal(0))
    exchange = work(made, replica, normal(1))
    before = read(replica, "exp_avg")
    result = failure(exchange) if fate == "failed" else answer(made, exchange, normal(2), taken=())
    made.apply(replica, exchange, result)
    assert torch.equal(read(replica, "exp_avg"), before)


def test_an_optimizer_without_second_moments_is_never_corrected(vectors):
    made, replica = Lean(period=1, correction=1.0), vectors(x=normal(0))
    plain, other = Lean(period=1, correction=0.0), vectors(x=normal(0))
    for number in range(3):
        for method, place in ((made, replica), (plain, other)):
            exchange = work(method, place, normal(1 + number))
            method.apply(place, exchange, answer(method, exchange, normal(9)))
    assert torch.equal(read(replica), read(other))
    assert not read(replica, "exp_avg").any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("rate", [1e-5, 0.01])
def test_the_rate_is_that_of_the_step_with_adams_bias_corrections(adam, rate, weight_decay):
    """Weight decay is not part of it: it moves weights whatever the momentum is."""
    replica = adam(normal(0), decay=weight_decay)
    for number in range(1, 8):
        replica.write({"x": normal(number)}, "grad")
        before = read(replica)
        replica.inner_step(rate)
        found = rate_of(
            before - read(replica), read(replica, "exp_avg"), read(replica, "exp_avg_sq")
        )
        expected = rate * np.sqrt(1 - BETAS[1] ** number) / (1 - BETAS[0] ** number)
        assert float(found) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_there_is_no_rate_without_moments_or_a_step(step):
    nothing = torch.zeros(COUNT)
    assert float(rate_of(torch.full((COUNT,), step), nothing, nothing)) == 0.0
    assert float(rate_of(nothing, normal(0), normal(1).square())) == 0.0


def test_a_step_that_moved_nothing_corrects_nothing(adam):
    made, replica = Lean(period=1, correction=1.0, **FLAT), adam(normal(0), lr=1e-30)
    exchange = work(made, replica, normal(1))
    before = read(replica, "exp_avg")
    made.apply(replica, exchange, answer(made, exchange, normal(2)))
    assert torch.equal(read(replica, "exp_avg"), before)


# What each peer holds


def test_phi_has_the_same_bits_at_peers_whose_replicas_differ(vectors):
    peers = [(Lean(period=1), vectors(x=integers(0))) for _ in range(3)]
    for number in range(4):
        asked = [
            work(made, replica, integers(10 * number + who))
            for who, (made, replica) in enumerate(peers)
        ]
        sent = [
            round_trip(codec(made.codec), one.tensors["x"])
            for (made, _), one in zip(peers, asked, strict=True)
        ]
        mean = {"x": round_trip(codec("ecsq:100"), (sent[0] + sent[1] + sent[2]) / 3)}
        for (made, replica), one, mine in zip(peers, asked, sent, strict=True):
            result = Result(
                "ok",
                number + 1,
                ("a", "b", "c"),
                (1.0,) * 3,
                mean,
                None,
                {"x": mine},
                {"x": [(0, 24)]},
            )
            made.apply(replica, one, result)
        agreed = [made.agreed(replica, "lean") for made, replica in peers]
        for state in agreed[1:]:
            assert all(torch.equal(x, state[name]) for name, x in agreed[0].items())
        thetas = [read(replica) for _, replica in peers]
        assert not torch.equal(thetas[0], thetas[1])


def test_the_bits_of_three_rounds_are_those_of_the_golden_file(vectors, golden):
    made = Lean(period=1, decay=0.75, codec="ecsq:100", return_codec="ecsq:100")
    replica = vectors(x=integers(0))
    for number in range(3):
        exchange = work(made, replica, integers(10 + number))
        sent = round_trip(codec(made.codec), exchange.tensors["x"])
        mean = {
            "x": round_trip(
                codec(made.return_codec),
                (sent + round_trip(codec(made.codec), integers(20 + number))) / 2,
            )
        }
        result = Result(
            "ok", number + 1, ("a", "b"), (1, 1), mean, None, {"x": sent}, {"x": [(0, 24)]}
        )
        made.apply(replica, exchange, result)
    held = {"phi": phi(made, replica), "theta": read(replica)}
    now = {name: x.view(torch.int32).tolist() for name, x in held.items()}
    assert golden("lean", now) == now


def test_a_joiner_begins_at_phi_with_moments_of_its_own(adam):
    made, replica = Lean(period=1, codec="ecsq:31"), adam(normal(0))
    exchange = work(made, replica, normal(1))
    made.apply(replica, exchange, answer(made, exchange, normal(2)))
    assert not torch.equal(read(replica), phi(made, replica))
    joiner, fresh = Lean(period=1), adam(normal(5))
    joiner.restore(fresh, made.snapshot(replica), "adopt")
    assert torch.equal(read(fresh), phi(made, replica))
    assert torch.equal(phi(joiner, fresh), phi(made, replica))
    assert not read(fresh, "exp_avg").any()
    assert work(joiner, fresh, normal(6)).key.round == 1


def test_carrying_puts_all_own_work_on_the_new_phi(adam):
    made, replica = Lean(period=1, codec="ecsq:31"), adam(normal(0))
    exchange = work(made, replica, normal(1))
    made.apply(replica, exchange, answer(made, exchange, normal(2)))
    work(made, replica, normal(3))  # residual, work on its way
    own = read(replica) - phi(made, replica)
    moments = read(replica, "exp_avg")
    made.restore(replica, {"phi.x": normal(7), "round": torch.tensor(9)}, "carry")
    close(read(replica), normal(7) + own)
    assert torch.equal(read(replica, "exp_avg"), moments)
    assert work(made, replica, normal(4)).key.round == 9


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"period": 0}, "a period of 0 steps is out of range"),
        (
            {"delay": 3},
            "a delay of 3 steps does not fit between exchanges 3 steps apart; choose 0 to 2",
        ),
        ({"delay": -1}, "a delay of -1 steps"),
        ({"decay": 1.1}, r"a decay of 1.1 is none; choose one in \[0, 1\]"),
        ({"decay": float("nan")}, "a decay of nan"),
        ({"correction": 1.5}, r"a correction of 1.5 is out of range; choose one in \[0, 1\]"),
        ({"correction": float("nan")}, "a correction of nan"),
        ({"cap": 0.0}, "a cap of 0.0 is out of range"),
        ({"cap": float("inf")}, "a cap of inf"),
        ({"deadline_s": 0.0}, "a deadline of 0.0 s is out of range"),
        ({"codec": "ecsq:999"}, "ecsq at 999 hundredths of a bit"),
        ({"return_codec": "int9"}, "codec 'int9' is not known"),
    ],
)
def test_options_that_cannot_work_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        Lean(**options)
