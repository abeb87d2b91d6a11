"""DeMo by the class alone, compared with a slow reference written from the paper's equations with
scipy's transform."""

import numpy as np
import pytest
import scipy.fft
import torch

from farflock.compression.catalog import codec
from farflock.node.train.shards import ShardLayout, decode_all
from farflock.optimizers.demo_optimizer import DeMo
from farflock.optimizers.method import Exchange, ExchangeKey, Progress, Result
from farflock.optimizers.parts.dct import Grid

SHAPES = {"w": (16, 24), "v": (40,)}


def normal(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def delta(made, replica):
    held = made.personal(replica)
    return {name: held[f"delta.{name}"] for name in SHAPES}


def theta(replica):
    return replica.read(replica.names, "param")


def step(made, replica, gradient, number=0):
    replica.add_gradient(**gradient)
    made.local_step(replica, Progress(number))
    (exchange,) = made.due(replica, Progress(number + 1))
    return exchange


def as_decoded(name, exchange):
    """The tensors as every peer decodes them, cut as in a real run, and the number of bytes
    sent."""
    shapes = {key: tuple(x.shape) for key, x in exchange.tensors.items()}
    cut = ShardLayout.of(shapes, codec(name), 0)
    payloads = [
        cut.encode(index, exchange.key.round, exchange.tensors) for index in range(len(cut.shards))
    ]
    return decode_all(cut, exchange.key.round, payloads, shapes), sum(map(len, payloads))


def largest(x, k):
    """All but the k largest magnitudes of each tensor set to zero."""
    kept = torch.zeros_like(x)
    places = x.abs().argsort(descending=True)[:k]
    kept[places] = x[places]
    return kept


def answer(exchange, gathered, mine="a", inside=True, **more):
    taken = {name: [(0, x.numel())] for name, x in gathered[mine].items()} if inside else {}
    part = {peer: sent for peer, sent in gathered.items() if inside or peer != mine}
    weights = (1.0,) * len(part)
    number = exchange.key.round + 1
    return Result(
        "ok", number, tuple(sorted(part)), weights, None, part, gathered[mine], taken, **more
    )


class Twin:
    """M peers of the paper's algorithm 1 without the sign, on one matrix of one chunk, in float64,
    step by step."""

    def __init__(self, start, peers, decay, lr, k):
        self.theta, self.decay, self.lr, self.k = start.double().numpy(), decay, lr, k
        self.delta = {peer: np.zeros_like(self.theta) for peer in peers}

    def step(self, gradients):
        sums, counts = np.zeros_like(self.theta), np.zeros_like(self.theta)
        for peer, gradient in gradients.items():
            self.delta[peer] = self.decay * self.delta[peer] + gradient.double().numpy()
            c = scipy.fft.dctn(self.delta[peer], type=2, norm="ortho")
            sent = np.zeros_like(c)
            for place in sorted(np.ndindex(c.shape), key=lambda at: -abs(c[at]))[: self.k]:
                sent[place] = c[place]
            self.delta[peer] -= scipy.fft.idctn(sent, type=2, norm="ortho")
            sums += sent
            counts += sent != 0
        self.theta -= self.lr * scipy.fft.idctn(sums / np.maximum(counts, 1), type=2, norm="ortho")


def test_three_peers_follow_the_twin_of_the_paper(vectors):
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(8, 8, generator=generator)
    twin = Twin(start, "abc", decay=0.9, lr=0.25, k=5)
    swarm = {
        peer: (DeMo(chunk=8, decay=0.9, codec="topk:5/64", sign=False), vectors(lr=0.25, w=start))
        for peer in "abc"
    }
    for number in range(12):
        gradients = {peer: torch.randn(8, 8, generator=generator) for peer in "abc"}
        asked = {peer: step(*swarm[peer], {"w": gradients[peer]}, number) for peer in "abc"}
        sent = {peer: {"w": largest(exchange.tensors["w"], 5)} for peer, exchange in asked.items()}
        for peer, (made, replica) in swarm.items():
            made.apply(replica, asked[peer], answer(asked[peer], sent, peer))
        twin.step(gradients)
        for peer, (made, replica) in swarm.items():
            np.testing.assert_allclose(theta(replica)["w"].numpy(), twin.theta, atol=2e-5)
            np.testing.assert_allclose(
                made.personal(replica)["delta.w"].numpy(), twin.delta[peer], atol=2e-5
            )


def test_all_coefficients_without_decay_and_sign_are_a_plain_step(vectors):
    """theta -= lr·g. The paper's code has lr·(lr·g) here, because the rate is also in its
    momentum."""
    made, replica = (
        DeMo(chunk=8, decay=0.0, codec="fp32", sign=False),
        vectors(lr=0.25, **normal(1)),
    )
    before, gradient = theta(replica), normal(2)
    exchange = step(made, replica, gradient)
    made.apply(replica, exchange, answer(exchange, {"a": exchange.tensors}))
    for name, x in theta(replica).items():
        torch.testing.assert_close(x, before[name] - 0.25 * gradient[name], atol=2e-6, rtol=0)


@pytest.mark.parametrize("spec", ["topk:3/64", "topk:32/64", "fp32", "int8", "topk2:3/64"])
def test_what_leaves_the_momentum_is_what_others_decode(vectors, spec):
    """delta = delta' + IDCT(sent), quantiser included, to one unit in the last place."""
    made, replica = DeMo(chunk=8, codec=spec), vectors(**normal(1))
    for number in range(4):
        exchange = step(made, replica, normal(10 + number), number)
        before, (sent, _) = delta(made, replica), as_decoded(spec, exchange)
        made.apply(replica, exchange, answer(exchange, {"a": sent}))
        for name, after in delta(made, replica).items():
            removed = Grid(SHAPES[name], 8).inverse(sent[name])
            assert bool(removed.any())
            largest_part = torch.maximum(before[name].abs(), removed.abs())
            ulp = torch.nextafter(largest_part, torch.tensor(float("inf"))) - largest_part
            assert bool(((after + removed - before[name]).abs() <= ulp).all())


def test_nothing_leaves_the_momentum_of_a_peer_whose_coefficients_were_not_taken(vectors):
    made, replica = DeMo(chunk=8, codec="topk:3/64"), vectors(lr=0.5, **normal(1))
    exchange = step(made, replica, normal(2))
    before, start = delta(made, replica), theta(replica)
    others = {name: torch.ones_like(x) for name, x in exchange.tensors.items()}
    made.apply(
        replica, exchange, answer(exchange, {"a": exchange.tensors, "b": others}, inside=False)
    )
    for name, after in delta(made, replica).items():
        assert torch.equal(after, before[name])
        q = Grid(SHAPES[name], 8).inverse(others[name])
        assert torch.equal(theta(replica)[name], start[name] - 0.5 * torch.sign(q))


def test_a_late_result_leaves_the_momentum_it_would_have_left_in_time(vectors):
    ends = []
    for late in (0, 3):
        made, replica = DeMo(chunk=8, decay=0.5, codec="topk:3/64"), vectors(**normal(1))
        exchange = step(made, replica, normal(2))
        sent = {"a": as_decoded("topk:3/64", exchange)[0]}
        for number in range(late):
            replica.add_gradient(**normal(20 + number))
            made.local_step(replica, Progress(number))
        made.apply(replica, exchange, answer(exchange, sent, steps_since=late))
        for number in range(late, 3):
            replica.add_gradient(**normal(20 + number))
            made.local_step(replica, Progress(number))
        ends.append(delta(made, replica))
    for name in SHAPES:
        torch.testing.assert_close(ends[0][name], ends[1][name], atol=1e-6, rtol=0)


def test_a_round_that_this_peer_slept_through_moves_its_parameters_alike(vectors):
    (awake, one), (asleep, other) = (
        (DeMo(chunk=8, codec="topk:3/64"), vectors(**normal(1))) for _ in range(2)
    )
    exchange = step(awake, one, normal(2))
    result = answer(exchange, {"a": as_decoded("topk:3/64", exchange)[0]})
    awake.apply(one, exchange, result)
    replayed = Result("ok", 1, ("a",), (1.0,), None, result.gathered)
    asleep.apply(
        other, Exchange(ExchangeKey(exchange.key.stream, 0), "mean", exchange.group, {}), replayed
    )
    assert all(torch.equal(x, theta(other)[name]) for name, x in theta(one).items())
    assert int(asleep.snapshot(other)["round"]) == 1


def test_a_failed_round_keeps_parameters_and_momentum(vectors):
    made, replica = DeMo(chunk=8, codec="topk:3/64"), vectors(**normal(1))
    exchange = step(made, replica, normal(2))
    before, start = delta(made, replica), theta(replica)
    made.apply(replica, exchange, Result("failed", 1))
    assert all(torch.equal(x, before[name]) for name, x in delta(made, replica).items())
    assert all(torch.equal(x, start[name]) for name, x in theta(replica).items())
    assert step(made, replica, normal(3)).key.round == 1


def test_a_peer_without_gradient_sends_zeros_and_is_no_voter(vectors):
    made, replica = DeMo(chunk=8, codec="topk:3/64", sign=False), vectors(**normal(1))
    exchange = step(made, replica, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    mine, _ = as_decoded("topk:3/64", exchange)
    assert not any(bool(x.any()) for x in mine.values())
    start, others = (
        theta(replica),
        {name: torch.ones_like(x) for name, x in exchange.tensors.items()},
    )
    made.apply(replica, exchange, answer(exchange, {"a": mine, "b": others}))
    for name, x in theta(replica).items():
        torch.testing.assert_close(x, start[name] - Grid(SHAPES[name], 8).inverse(others[name]))


@pytest.mark.parametrize("factor", [0.125, 1024.0])
def test_gradients_of_another_scale_make_the_same_parameters(vectors, factor):
    ends = []
    for scale in (1.0, factor):
        made, replica = DeMo(chunk=8, codec="topk:3/64"), vectors(lr=0.01, **normal(1))
        for number in range(5):
            exchange = step(made, replica, normal(10 + number, scale), number)
            made.apply(
                replica, exchange, answer(exchange, {"a": as_decoded("topk:3/64", exchange)[0]})
            )
        ends.append(theta(replica))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in SHAPES)


def test_each_chunk_of_a_matrix_keeps_its_own_k_largest(vectors):
    """16 × 24 in chunks of 8 × 8 are six; the codec's granules are these chunks."""
    made, replica = DeMo(chunk=8, codec="topk:3/64"), vectors(**normal(1))
    exchange = step(made, replica, normal(2))
    sent = as_decoded("topk:3/64", exchange)[0]["w"].reshape(6, 64)
    chunks = exchange.tensors["w"].reshape(6, 64)
    for mine, chunk in zip(sent, chunks, strict=True):
        assert set(mine.nonzero().flatten().tolist()) == set(chunk.abs().topk(3).indices.tolist())


@pytest.mark.parametrize(
    ("shape", "kept"), [((128, 192), 6 * 32), ((256,), 32), ((8192,), 64), ((4, 8, 64, 2), 32)]
)
def test_the_bytes_are_those_of_the_formula(vectors, shape, kept):
    """12 bits per position, 8 per value, 4 bytes per scale of 32 values, 4 for the length: a little
    more than 2.5 bytes per coefficient."""
    made, replica = (
        DeMo(),
        vectors(x=torch.randn(shape, generator=torch.Generator().manual_seed(0))),
    )
    exchange = step(
        made, replica, {"x": torch.randn(shape, generator=torch.Generator().manual_seed(1))}
    )
    sent, size = as_decoded(made.codec, exchange)
    assert int((sent["x"] != 0).sum()) <= kept
    assert size == kept * 12 // 8 + kept + 4 * kept // 32 + 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chunk": 1}, "chunks of 1 × 1 are not allowed; choose 2 to 256"),
        ({"chunk": 300}, "chunks of 300 × 300 are not allowed"),
        (
            {"chunk": 32},
            "codec topk:32/4096 chooses among 4096 values, a chunk of 32 × 32 has 1024; "
            "choose topk:32/1024",
        ),
        ({"chunk": 4, "codec": "topk:2/8"}, "has 16; choose topk:8/16"),
        ({"codec": "topk:32"}, "codec 'topk:32' is not known"),
        ({"decay": -0.1}, "a decay of -0.1 is out of range"),
        ({"period": 0}, "a period of 0 steps is out of range"),
    ],
)
def test_options_that_cannot_work_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        DeMo(**options)
