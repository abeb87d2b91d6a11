"""SparseLoCo by the class alone: what is sent, what stays, and where a peer's work is if its
message was not taken."""

import pytest
import torch
from worlds.codecs import round_trip

from farflock.compression.catalog import codec
from farflock.compression.codec import Context
from farflock.optimizers.method import Exchange, ExchangeKey, Progress, Result
from farflock.optimizers.sparseloco import SparseLoCo

COUNT = 100


def normal(seed, scale=1.0):
    return scale * torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


def work(made, replica, *gradients):
    """Take local steps; return the exchange that they lead to, if any."""
    for number, gradient in enumerate(gradients):
        replica.add_gradient(x=gradient)
        made.local_step(replica, Progress(number))
    return next(iter(made.due(replica, Progress(len(gradients)))), None)


def answer(made, exchange, *others, inside=True, **more):
    """Return a group's answer to this message and the others' decoded ones."""
    mine = round_trip(codec(made.codec), exchange.tensors["x"])
    gathered = {
        f"p{number}": {"x": x} for number, x in enumerate(([mine] if inside else []) + list(others))
    }
    mean = {"x": torch.stack([part["x"] for part in gathered.values()]).mean(dim=0)}
    taken, weights = {"x": [(0, COUNT)]} if inside else {}, (1.0,) * len(gathered)
    number = exchange.key.round + 1
    return Result(
        "ok", number, tuple(gathered), weights, mean, gathered, {"x": mine}, taken, **more
    )


def theta(replica):
    return replica.read(["x"], "param")["x"]


def phi(made, replica):
    return made.eval_params(replica)["x"]


def residual(made, replica):
    return made.personal(replica).get("residual.x", torch.zeros(COUNT))


@pytest.mark.parametrize("spec", ["topk:4/32", "topk2:4/32", "topk:16/32", "int8", "fp32"])
@pytest.mark.parametrize("feedback", [0.0, 0.95, 1.0])
def test_a_message_is_what_others_decode_and_what_stays(vectors, spec, feedback):
    """a = beta·e + (phi - theta) = sent + e, with the quantiser's error in e: exact to the bit
    except for values far from their level."""
    made, replica = SparseLoCo(period=1, feedback=feedback, codec=spec), vectors(x=normal(0))
    for number in range(6):
        before, old = phi(made, replica), residual(made, replica)
        exchange = work(made, replica, normal(10 + number, 0.1))
        message = exchange.tensors["x"]
        torch.testing.assert_close(
            message, feedback * old + (before - theta(replica)), atol=1e-6, rtol=0
        )
        result = answer(made, exchange)
        made.apply(replica, exchange, result)
        sent, kept = result.sent["x"], residual(made, replica)
        if spec.startswith("topk2"):
            torch.testing.assert_close(sent + kept, message, atol=1e-7, rtol=1e-6)
        else:
            assert torch.equal(sent + kept, message)
        assert torch.equal(kept[sent == 0], message[sent == 0])


def test_nothing_is_left_over_and_phi_is_the_mean_replica_where_everything_travels(vectors):
    """Density 1, no quantiser, outer rate 1, any decay: FedAvg."""
    made, replica = SparseLoCo(period=2, feedback=0.7, codec="fp32"), vectors(lr=0.1, x=normal(0))
    for number in range(3):
        before = phi(made, replica)
        exchange = work(made, replica, normal(10 + number), normal(20 + number))
        other = normal(30 + number, 0.1)
        mean_replica = (theta(replica) + (before - other)) / 2
        made.apply(replica, exchange, answer(made, exchange, other))
        torch.testing.assert_close(phi(made, replica), mean_replica, atol=1e-6, rtol=0)
        assert torch.equal(theta(replica), phi(made, replica))
        assert not residual(made, replica).any()


@pytest.mark.parametrize(
    ("denominator", "expected"),
    [("participants", [1.0, 0.5, -1.0]), ("selectors", [2.0, 1.0, -1.0])],
)
def test_the_mean_is_over_all_peers_or_over_those_that_sent_the_coordinate(
    vectors, denominator, expected
):
    made, replica = (
        SparseLoCo(period=1, codec="fp32", denominator=denominator),
        vectors(x=torch.zeros(COUNT)),
    )
    mine, other = torch.zeros(COUNT), torch.zeros(COUNT)
    mine[[0, 2]], other[[0, 1, 2]] = torch.tensor([2.0, 1.0]), torch.tensor([0.0, 1.0, -3.0])
    exchange = work(made, replica, mine)
    made.apply(replica, exchange, answer(made, exchange, other))
    assert (-phi(made, replica)[:3]).tolist() == expected


@pytest.mark.parametrize("outer_lr", [1.0, 0.65])
def test_the_outer_rate_is_the_length_of_the_step(vectors, outer_lr):
    made, replica = SparseLoCo(period=1, outer_lr=outer_lr, codec="topk:4/32"), vectors(x=normal(0))
    exchange = work(made, replica, normal(1))
    result = answer(made, exchange)
    made.apply(replica, exchange, result)
    torch.testing.assert_close(phi(made, replica), normal(0) - outer_lr * result.sent["x"])


@pytest.mark.parametrize(("spec", "last"), [("topk:4/32", 4), ("topk2:8/32", 1)])
def test_each_chunk_sends_k_values_and_the_last_its_share_at_least_one(vectors, spec, last):
    """100 values are three chunks of 32 and one of 4: `topk2` sends round(k·4/32),
    `topk` up to k."""
    made, replica = SparseLoCo(period=1, codec=spec), vectors(x=normal(0))
    sent = answer(made, work(made, replica, normal(1))).sent["x"]
    k = int(spec.split(":")[1].split("/")[0])
    assert [int((chunk != 0).sum()) for chunk in sent.split(32)] == [k, k, k, last]


def test_two_peers_with_equal_state_send_equal_bytes(vectors):
    payloads = []
    for _ in range(2):
        made, replica, out = (
            SparseLoCo(period=1, codec="topk2:4/32"),
            vectors(x=normal(0)),
            bytearray(),
        )
        codec(made.codec).encode(work(made, replica, normal(1)).tensors["x"], Context(), out)
        payloads.append(bytes(out))
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize("spec", ["topk:2/32", "topk2:2/32"])
def test_with_undecayed_feedback_all_of_a_constant_descent_arrives(vectors, spec):
    """Every coordinate is sent sooner or later, and what is still to be sent stays bounded while
    the sum grows."""
    made, replica, gradient = (
        SparseLoCo(period=1, feedback=1.0, codec=spec),
        vectors(x=torch.zeros(COUNT)),
        normal(1),
    )
    gradient = gradient + 0.5 * gradient.sign()
    sent_once, largest = torch.zeros(COUNT, dtype=torch.bool), []
    for number in range(400):
        exchange = work(made, replica, gradient)
        result = answer(made, exchange)
        made.apply(replica, exchange, result)
        sent_once |= result.sent["x"] != 0
        behind = (number + 1) * gradient + phi(made, replica)
        torch.testing.assert_close(behind, residual(made, replica), atol=1e-2, rtol=0)
        largest.append(float(behind.abs().max()))
    assert bool(sent_once.all())
    assert max(largest[300:]) < 1.1 * max(largest[100:200])


def test_no_gradient_moves_nothing(vectors):
    made, replica = SparseLoCo(period=1, codec="topk2:4/32"), vectors(x=normal(0))
    exchange = work(made, replica, torch.zeros(COUNT))
    result = answer(made, exchange)
    made.apply(replica, exchange, result)
    assert not result.sent["x"].any()
    assert torch.equal(phi(made, replica), normal(0))
    assert torch.equal(theta(replica), normal(0))
    assert not residual(made, replica).any()


@pytest.mark.parametrize("spec", ["topk:4/32", "topk2:4/32", "int8"])
@pytest.mark.parametrize("power", [-6, 3])
def test_gradients_times_a_power_of_two_make_everything_that_much_larger(vectors, spec, power):
    ends = []
    for scale in (1.0, 2.0**power):
        made, replica = SparseLoCo(period=1, codec=spec), vectors(x=torch.zeros(COUNT))
        for number in range(5):
            exchange = work(made, replica, normal(number, scale))
            made.apply(replica, exchange, answer(made, exchange))
        ends.append((phi(made, replica) / scale, residual(made, replica) / scale))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_work_that_was_not_taken_stays_in_the_replica_which_follows_the_others(vectors):
    """It is not in the residual, and counts once. The next message is that of a peer that did the
    work of both rounds in one."""
    made, replica = (
        SparseLoCo(period=1, feedback=1.0, codec="topk:4/32"),
        vectors(x=torch.zeros(COUNT)),
    )
    first = work(made, replica, normal(1))
    made.apply(replica, first, answer(made, first))
    kept = residual(made, replica)
    start, others = phi(made, replica), round_trip(codec("topk:4/32"), normal(7))
    second = work(made, replica, normal(2))
    made.apply(replica, second, answer(made, second, others, inside=False))
    assert torch.equal(phi(made, replica), start - others)
    torch.testing.assert_close(theta(replica), phi(made, replica) - normal(2))
    assert torch.equal(residual(made, replica), kept)
    third = work(made, replica, normal(3))
    torch.testing.assert_close(third.tensors["x"], kept + normal(2) + normal(3), atol=1e-6, rtol=0)


def test_a_failed_round_moves_nothing(vectors):
    made, replica = SparseLoCo(period=1, codec="topk:4/32"), vectors(x=normal(0))
    exchange = work(made, replica, normal(1))
    before = theta(replica)
    made.apply(replica, exchange, Result("failed", 1))
    assert torch.equal(theta(replica), before)
    assert torch.equal(phi(made, replica), normal(0))
    assert not residual(made, replica).any()
    following = work(made, replica, torch.zeros(COUNT))
    assert following.key.round == 1
    assert torch.equal(following.tensors["x"], exchange.tensors["x"])


@pytest.mark.parametrize("inside", [True, False])
def test_steps_made_while_the_result_was_on_its_way_stay_on_top(vectors, inside):
    made, replica = SparseLoCo(period=2, codec="topk:4/32"), vectors(x=normal(0))
    exchange = work(made, replica, normal(1), normal(2))
    assert work(made, replica, normal(3)) is None
    made.apply(replica, exchange, answer(made, exchange, normal(5), inside=inside, steps_since=1))
    done = normal(3) if inside else normal(1) + normal(2) + normal(3)
    torch.testing.assert_close(theta(replica), phi(made, replica) - done, atol=1e-6, rtol=0)


def test_a_round_that_this_peer_slept_through_moves_phi_and_the_replica_alike(vectors):
    made, replica = SparseLoCo(period=2, codec="topk:4/32"), vectors(x=normal(0))
    work(made, replica, normal(1))
    others = round_trip(codec("topk:4/32"), normal(7))
    replayed = Result("ok", 1, ("b",), (1.0,), {"x": others}, {"b": {"x": others}})
    made.apply(
        replica,
        Exchange(ExchangeKey("sparse", 0), "mean", made.streams(replica)[0].group, {}),
        replayed,
    )
    assert torch.equal(phi(made, replica), normal(0) - others)
    torch.testing.assert_close(theta(replica), normal(0) - others - normal(1), atol=1e-6, rtol=0)
    assert not residual(made, replica).any()
    exchange = work(made, replica, normal(2))
    assert exchange.key.round == 1
    torch.testing.assert_close(exchange.tensors["x"], normal(1) + normal(2), atol=1e-6, rtol=0)


def test_carrying_keeps_work_and_residual_and_adopting_drops_both(vectors):
    ends = {}
    for mode in ("carry", "adopt"):
        made, replica = SparseLoCo(period=1, codec="topk:4/32"), vectors(x=normal(0))
        exchange = work(made, replica, normal(1))
        made.apply(replica, exchange, answer(made, exchange))
        kept = residual(made, replica)
        work(made, replica, normal(2))
        made.restore(replica, {"phi.x": normal(9), "round": torch.tensor(5)}, mode)
        assert torch.equal(phi(made, replica), normal(9))
        ends[mode] = theta(replica), residual(made, replica)
        assert work(made, replica, normal(3)).key.round == 5
    torch.testing.assert_close(ends["carry"][0], normal(9) - normal(2), atol=1e-6, rtol=0)
    assert torch.equal(ends["carry"][1], kept)
    assert torch.equal(ends["adopt"][0], normal(9))
    assert not ends["adopt"][1].any()


def test_the_bits_of_three_rounds_are_those_of_the_golden_file(vectors, golden):
    def values(seed):
        """Return values made from integers: torch.randn has other bits on other processors."""
        return torch.randint(-999, 999, (24,), generator=torch.Generator().manual_seed(seed)) / 997

    made, replica = (
        SparseLoCo(period=1, outer_lr=0.65, feedback=0.95, codec="topk:2/16"),
        vectors(x=values(0)),
    )
    for number in range(3):
        exchange = work(made, replica, values(10 + number))
        sent = {"x": round_trip(codec(made.codec), exchange.tensors["x"])}
        taken = {"x": [(0, 24)]}
        gathered = {"a": sent, "b": {"x": round_trip(codec(made.codec), values(20 + number))}}
        mean = {"x": (gathered["a"]["x"] + gathered["b"]["x"]) / 2}
        made.apply(
            replica,
            exchange,
            Result("ok", number + 1, ("a", "b"), (1, 1), mean, gathered, sent, taken),
        )
    now = {
        "phi": phi(made, replica).view(torch.int32).tolist(),
        "residual": residual(made, replica).view(torch.int32).tolist(),
    }
    assert golden("sparseloco", now) == now


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"denominator": "senders"},
            "denominator 'senders' is not known; choose participants or selectors",
        ),
        (
            {"feedback": 1.5},
            r"feedback of 1.5 is out of range; choose one in \[0, 1\], usually 0.95",
        ),
        ({"feedback": float("nan")}, "feedback of nan is out of range"),
        ({"outer_lr": 0.0}, "an outer learning rate of 0.0 is out of range"),
        ({"codec": "topk:64"}, "codec 'topk:64' is not known"),
        ({"period": 0}, "a period of 0 steps is out of range"),
        ({"deadline_s": float("inf")}, "a deadline of inf s is out of range"),
    ],
)
def test_options_that_cannot_work_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        SparseLoCo(**options)
