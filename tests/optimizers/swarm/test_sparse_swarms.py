"""The sparse methods in whole swarms: compared with slow reference implementations, and under
faults."""

import hashlib

import numpy as np
import pytest
import torch

from farflock.optimizers.contrib.flexdemo import FlexDeMo
from farflock.optimizers.demo_optimizer import DeMo
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.local import Local
from farflock.optimizers.parts.outer import OuterSGD
from farflock.optimizers.sparseloco import SparseLoCo


def smooth(peer, step, name, theta):
    """A gradient of normal numbers, so that no two magnitudes are equal. It depends on the peer,
    the step and the name alone."""
    seed = int.from_bytes(hashlib.sha256(f"{peer} {step} {name}".encode()).digest()[:6], "little")
    return torch.randn(theta.shape, generator=torch.Generator().manual_seed(seed))


def total(swarm, peer, lr):
    """The sum of a peer's local work over all of its steps, by name: lr times its gradients, in
    float64."""
    one = swarm.peers[peer]
    return {
        name: lr * sum(smooth(peer, step, name, x).double() for step in range(one.step))
        for name, x in one.theta().items()
    }


def part(swarm, peer):
    """A peer's part in all rounds, in float64: the decoded message of each result that took it."""
    found = {}
    for result in swarm.peers[peer].results:
        for name in result.taken:
            found[name] = found.get(name, 0) + result.sent[name].double()
    return found


class Twin:
    """SparseLoCo as specified, with plain SGD inside, one value at a time in float64: chunks,
    sorting, int8 with one scale for k values."""

    def __init__(self, start, peers, *, feedback, outer_lr, denominator, k, chunk, lr):
        self.phi = {name: x.double().numpy().reshape(-1).copy() for name, x in start.items()}
        self.theta = {peer: {name: x.copy() for name, x in self.phi.items()} for peer in peers}
        self.e = {peer: {name: np.zeros_like(x) for name, x in self.phi.items()} for peer in peers}
        self.feedback, self.outer_lr, self.denominator = feedback, outer_lr, denominator
        self.k, self.chunk, self.lr = k, chunk, lr

    def compressed(self, a):
        sent = np.zeros_like(a)
        for start in range(0, len(a), self.chunk):
            places = range(start, min(start + self.chunk, len(a)))
            kept = sorted(places, key=lambda place: -abs(a[place]))[: self.k]
            scale = max(abs(a[place]) for place in kept) / 127
            for place in kept:
                sent[place] = round(a[place] / scale) * scale
        return sent

    def local_step(self, peer, gradients):
        for name, gradient in gradients.items():
            self.theta[peer][name] -= self.lr * gradient.double().numpy().reshape(-1)

    def sync(self, part):
        """Run a round in which only the peers of `part` are taken; the work of the others stays on
        top of the new phi."""
        for name, phi in self.phi.items():
            sums, counts, sent, messages = np.zeros_like(phi), np.zeros_like(phi), {}, {}
            for peer in part:
                messages[peer] = self.feedback * self.e[peer][name] + phi - self.theta[peer][name]
                sent[peer] = self.compressed(messages[peer])
                sums += sent[peer]
                counts += sent[peer] != 0
            divisor = len(part) if self.denominator == "participants" else np.maximum(counts, 1)
            new = phi - self.outer_lr * sums / divisor
            for peer in self.theta:
                if peer in part:
                    self.e[peer][name] = messages[peer] - sent[peer]
                    self.theta[peer][name] = new.copy()
                else:
                    self.theta[peer][name] += new - phi
            self.phi[name] = new


@pytest.mark.parametrize("denominator", ["participants", "selectors"])
def test_sparseloco_follows_its_twin_also_where_a_message_is_lost_or_a_round_fails(
    loopback, denominator
):
    options = {"feedback": 0.9, "outer_lr": 0.65, "denominator": denominator}
    swarm = loopback(
        lambda: SparseLoCo(period=3, codec="topk:2/8", **options), "abc", gradient=smooth, lr=0.05
    )
    swarm.taken = lambda peer, number: (
        lambda what, n: [] if (peer, number) == ("c", 1) else [(0, n)]
    )
    swarm.fails = lambda number: number == 3
    twin = Twin(swarm.peers["a"].theta(), "abc", k=2, chunk=8, lr=0.05, **options)
    for number in range(7):
        swarm.steps(3)
        for peer in "abc":
            for step in range(3 * number, 3 * number + 3):
                shapes = swarm.peers[peer].theta()
                twin.local_step(
                    peer, {name: smooth(peer, step, name, x) for name, x in shapes.items()}
                )
        if number != 3:
            twin.sync("ab" if number == 1 else "abc")
        for peer in "abc":
            made, replica = swarm.peers[peer].method, swarm.peers[peer].replica
            phi, own = made.eval_params(replica), made.personal(replica)
            for name, x in swarm.peers[peer].theta().items():
                np.testing.assert_allclose(phi[name].reshape(-1).numpy(), twin.phi[name], atol=2e-6)
                np.testing.assert_allclose(x.reshape(-1).numpy(), twin.theta[peer][name], atol=2e-6)
                if number:
                    residual = own[f"residual.{name}"].reshape(-1).numpy()
                    np.testing.assert_allclose(residual, twin.e[peer][name], atol=2e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_sparseloco_where_everything_travels_is_local_sgd_to_the_bit(loopback, same, size):
    ours, theirs = (
        loopback(make, "abc"[:size], inner="adamw", lr=0.01)
        for make in (
            lambda: SparseLoCo(period=3, codec="fp32", feedback=0.5),
            lambda: DiLoCo(3, OuterSGD(1.0), codec="fp32", return_codec="fp32"),
        )
    )
    for swarm in (ours, theirs):
        swarm.steps(9)
    assert same(
        ours.peers["a"].outer(),
        {k: x for k, x in theirs.peers["a"].outer().items() if "momentum" not in k},
    )


def test_one_peer_of_sparseloco_where_everything_travels_is_the_inner_optimizer(loopback):
    """With dyadic values, whose differences are exact: phi - (phi - theta) is theta."""
    ours, theirs = (
        loopback(make, "a", lr=0.5)
        for make in (lambda: SparseLoCo(period=3, codec="fp32", feedback=0.5), Local)
    )
    for swarm in (ours, theirs):
        swarm.steps(9)
    for name, x in ours.peers["a"].theta().items():
        assert torch.equal(x, theirs.peers["a"].theta()[name])


def trouble(swarm):
    """Give a swarm the faults that conservation must survive: lost messages, late results, failed
    rounds, a slow peer."""
    swarm.taken = lambda peer, number: (
        lambda what, n: [] if peer == "b" and number % 3 == 1 else [(0, n)]
    )
    swarm.late = lambda peer, number: number % 3 if peer == "c" else 0
    swarm.fails = lambda number: number % 5 == 3
    swarm.rests = lambda peer, tick: peer == "d" and tick % 3 != 0
    swarm.timeout_ticks = 3


@pytest.mark.parametrize("denominator", ["participants", "selectors"])
def test_every_bit_of_local_work_is_in_exactly_one_of_message_residual_and_replica(
    loopback, denominator
):
    """With undecayed error feedback, for every peer at every time: all that was sent and taken + e
    + (phi - theta) = all local work."""
    options = {"feedback": 1.0, "codec": "topk:2/8", "denominator": denominator}
    swarm = loopback(lambda: SparseLoCo(period=2, **options), "abcd", gradient=smooth, lr=0.05)
    trouble(swarm)
    for _ in range(30):
        swarm.steps(1)
        for name, peer in swarm.peers.items():
            own, phi, sent = (
                peer.method.personal(peer.replica),
                peer.method.eval_params(peer.replica),
                part(swarm, name),
            )
            for what, work in total(swarm, name, 0.05).items():
                kept = own[f"residual.{what}"].double() if f"residual.{what}" in own else 0
                accounted = sent.get(what, 0) + kept + (phi[what] - peer.theta()[what]).double()
                torch.testing.assert_close(accounted, work, atol=3e-6, rtol=0)
    statuses = {result.status for peer in swarm.peers.values() for result in peer.results}
    assert statuses == {"ok", "partial", "failed"}
    assert swarm.peers["d"].replayed


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (lambda: DeMo(chunk=4, decay=0.0, codec="topk:2/16"), False),
        (lambda: FlexDeMo(replicator="full", decay=0.0), True),
    ],
    ids=["demo", "flexdemo"],
)
def test_momentum_without_memory_forgets_what_was_not_sent_with_the_next_step(
    loopback, make, whole
):
    swarm = loopback(make, "ab", gradient=smooth, lr=0.01)
    swarm.steps(4)
    for name, x in swarm.peers["a"].theta().items():
        left = swarm.peers["a"].method.personal(swarm.peers["a"].replica)[f"delta.{name}"]
        size = float(left.norm()) / float(smooth("a", 3, name, x).norm())
        assert size < 0.01 if whole else 0.1 < size < 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeMo(chunk=4, codec="topk:2/16"),
        lambda: DeMo(chunk=4, codec="topk2:2/16", period=2, sign=False),
        lambda: FlexDeMo(replicator="striding", rate=0.5),
        lambda: FlexDeMo(replicator="slicing", rate=0.5, codec="int8"),
        lambda: FlexDeMo(replicator="random", rate=0.5),
        lambda: FlexDeMo(replicator="full", period=2),
    ],
    ids=["demo", "demo-plain", "striding", "slicing", "random", "full"],
)
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_parameters_are_equal_to_the_bit_on_all_peers_also_on_late_slow_and_new_ones(
    loopback, same, make, inner
):
    """This holds on machines of one kind. A joiner needs parameters, moments and the round, and
    nothing else."""
    swarm = loopback(make, "abcd", gradient=smooth, inner=inner, lr=0.01)
    trouble(swarm)
    swarm.steps(12)
    swarm.join("e", "a")
    swarm.steps(10)
    swarm.taken = lambda peer, number: lambda what, n: [(0, n)]
    swarm.late, swarm.fails, swarm.rests = (
        lambda peer, number: 0,
        lambda number: False,
        lambda peer, tick: False,
    )
    swarm.steps(8)
    start = swarm.build("new").theta()
    first, *others = [peer.outer() for peer in swarm.peers.values()]
    assert all(same(first, other) for other in others)
    assert len(others) == 4
    assert all(bool((swarm.peers["a"].theta()[name] != x).any()) for name, x in start.items())


def test_demo_that_sends_everything_is_sign_descent_on_the_mean_gradient(loopback):
    """This holds for any decay: nothing is left in the momentum after a step."""
    swarm = loopback(
        lambda: DeMo(chunk=4, decay=0.9, codec="fp32"), "abc", gradient=smooth, lr=0.01
    )
    expected = {name: x.clone() for name, x in swarm.peers["a"].theta().items()}
    for step in range(5):
        swarm.steps(1)
        for name, x in expected.items():
            x -= 0.01 * torch.sign(sum(smooth(peer, step, name, x) for peer in "abc"))
    one = swarm.peers["a"]
    for name, x in expected.items():
        torch.testing.assert_close(one.theta()[name], x, atol=1e-6, rtol=0)
        assert float(one.method.personal(one.replica)[f"delta.{name}"].abs().max()) < 1e-5


@pytest.mark.parametrize(
    "make",
    [
        lambda: FlexDeMo(replicator="full", decay=0.9, codec="fp32", return_codec="fp32"),
        lambda: FlexDeMo(rate=0.5),
    ],
    ids=["full", "striding"],
)
def test_a_peer_whose_part_was_lost_has_no_share_in_the_step_and_keeps_it(loopback, make):
    """The step is that of a swarm without it, and its momentum that of a peer whose round
    failed."""
    losing, without, failing = (
        loopback(make, peers, gradient=smooth, lr=0.01) for peers in ("abc", "ab", "c")
    )
    losing.taken = lambda peer, number: lambda what, n: [] if peer == "c" else [(0, n)]
    failing.fails = lambda number: True
    for swarm in (losing, without, failing):
        swarm.steps(5)
    held = [
        {
            key: x
            for key, x in swarm.peers["c"].method.personal(swarm.peers["c"].replica).items()
            if "delta" in key
        }
        for swarm in (losing, failing)
    ]
    assert all(torch.equal(x, held[1][key]) for key, x in held[0].items())
    for name, x in losing.peers["c"].theta().items():
        assert torch.equal(x, without.peers["a"].theta()[name])
