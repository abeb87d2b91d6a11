"""A whole swarm in this process: what a notebook sees of it, and that nothing of it is left."""

import threading
import time

import pytest
import torch
from torch import nn

import farflock
from farflock.node.errors import RefusedByRun, Usage
from farflock.swarm.sim.network import LinkModel

pytestmark = pytest.mark.net

torch.set_num_threads(1)
QUICK = {"view_s": 1.0}  # how soon members are let in


ONE_AT_A_TIME = threading.Lock()  # torch's own generator is everybody's


def net():
    with ONE_AT_A_TIME:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(optimizer, model, steps, seed, seen=lambda step: None):
    """An ordinary loop: the sum of four numbers, each rank on numbers of its own."""
    chance = torch.Generator().manual_seed(seed)
    rounds = set()
    for step in range(steps):
        x = torch.randn(16, 4, generator=chance)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        rounds.add(optimizer.last_round)
        seen(step)
    return sorted(rounds - {None}), loss.item()


def work_of(steps, **options):
    def work(rank, optimize):
        model = net()
        optimizer = optimize(model, lr=1e-2, **options)
        rounds, loss = train(optimizer, model, steps, rank)
        return (
            rounds,
            loss,
            optimizer.eval_params(),
            [entry.detach().clone() for entry in model.parameters()],
        )

    return work


def together(rounds, peers):
    return [entry for entry in rounds if entry.peers == peers]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def ends_as_one(results):
    """Check that all ended with the same round and weights; return each one's rounds.

    A rank that is late for a round takes its result over, and trains on.
    """
    (rounds, _, _, weights), *others = results
    for other_rounds, _, _, other_weights in others:
        assert other_rounds[-1].number == rounds[-1].number
        assert equal(weights, other_weights)
    for each, *_ in results:
        assert len({entry.number for entry in each}) == len(each), "a round came twice"
        assert together(each, len(results)), "no round was of all"
    return [each for each, *_ in results]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = set(threading.enumerate())
    yield
    assert not set(threading.enumerate()) - before


def test_diloco_s_peers_end_a_round_with_the_same_bits():
    with farflock.local_swarm(3, "diloco", period=5, **QUICK) as swarm:
        results = swarm.train(work_of(25))
    assert {rounds[-1].number for rounds in ends_as_one(results)} == {4}
    outer, *others = [outer for _, _, outer, _ in results]
    assert all(equal(outer.values(), other.values()) for other in others)


def test_ddp_s_peers_train_as_one():
    with farflock.local_swarm(2, "ddp", **QUICK) as swarm:
        results = swarm.train(work_of(30))
    ends_as_one(results)
    assert all(loss < 2 for _, loss, _, _ in results)


def test_noloco_s_peers_meet_in_pairs():
    with farflock.local_swarm(2, "noloco", period=5, **QUICK) as swarm:
        for rounds, loss, _, _ in swarm.train(work_of(40)):
            assert together(rounds, 2)
            assert loss < 2


def test_every_rank_sees_all_of_many_peers():
    def work(rank, optimize):
        return optimize(net()).members

    with farflock.local_swarm(8) as swarm:
        seen = swarm.train(work)
    assert {len(members) for members in seen} == {8}


def test_one_peer_alone_is_a_swarm_too():
    with farflock.local_swarm(1, "diloco", period=5) as swarm:
        [(rounds, _, _, _)] = swarm.train(work_of(20))
    assert [entry.status for entry in rounds] == ["alone"] * 4


def test_a_line_has_the_speed_that_it_is_given():
    slow = LinkModel(up_bytes_per_s=4e6, down_bytes_per_s=4e6, latency_s=0.05)

    def work(rank, optimize):
        model = nn.Linear(200, 200)
        optimizer = optimize(model)
        train(optimizer, nn.Sequential(nn.Linear(4, 200), model), 2, rank)
        return optimizer.last_round

    with farflock.local_swarm(
        2, "diloco", period=1, codec="fp32", return_codec="fp32", link=slow, **QUICK
    ) as swarm:
        assert [entry.peers for entry in swarm.train(work)] == [2, 2]
        sent = [swarm.network.line(made.peer).sent_bytes for made in swarm.optimizers.values()]
    assert min(sent) > 2 * 160_000 / 2


def test_the_others_go_on_without_a_peer_whose_line_is_dead():
    def work(rank, optimize):
        model = net()
        optimizer = optimize(model)
        me = optimizer.peer

        def seen(step):
            if rank == 2 and step == 14:
                swarm.disturb(lambda network: network.kill(me))

        rounds, _ = train(optimizer, model, 30 if rank < 2 else 15, rank, seen)
        return rounds, None, None, [entry.detach().clone() for entry in model.parameters()]

    with farflock.local_swarm(3, "diloco", period=5, **QUICK) as swarm:
        results = swarm.train(work)
    assert {rounds[-1].number for rounds in ends_as_one(results[:2])} == {5}


def test_a_program_that_fails_in_its_block_says_goodbye_and_the_others_go_on():
    began_s = []

    def work(rank, optimize):
        model = net()
        optimizer = optimize(model, lr=1e-2)
        if rank == 2:
            with pytest.raises(ZeroDivisionError, match="a mistake"), optimizer:
                train(optimizer, model, 7, rank)
                began_s.append(time.monotonic())
                raise ZeroDivisionError("a mistake in the loop")
            return optimizer.status()
        here_s = time.monotonic()
        while len(optimizer.members) == 3 and time.monotonic() - here_s < 40:
            train(optimizer, model, 1, rank)
        took_s = time.monotonic() - began_s[0]
        # The view of the two, once known, begins with a later round. Both end with its first one:
        # of one that made more steps than the other, the last round would wait for that.
        while optimizer.last_round.status != "ok" or optimizer.last_round.peers != 2:
            assert time.monotonic() - here_s < 60, optimizer.last_round
            train(optimizer, model, 1, rank)
        return took_s, optimizer.last_round

    with farflock.local_swarm(3, "diloco", period=5, deadline_s=60.0, **QUICK) as swarm:
        *others, failed = swarm.train(work)
    assert failed.waits_for == ()
    for took_s, last in others:
        assert took_s < 20  # a silent member would be waited for
        assert (last.status, last.peers) == ("ok", 2)


def test_an_error_of_one_rank_ends_all_and_is_raised():
    def work(rank, optimize):
        model = net()
        optimizer = optimize(model)
        if rank == 1:
            raise ZeroDivisionError("a mistake in the notebook")
        train(optimizer, model, 1_000_000, rank)

    with (
        farflock.local_swarm(2, "diloco", period=2, **QUICK) as swarm,
        pytest.raises(ZeroDivisionError, match="mistake"),
    ):
        swarm.train(work)


def test_a_founder_that_is_refused_does_not_leave_the_others_waiting():
    with farflock.local_swarm(3, "dilocko") as swarm, pytest.raises(Usage, match="diloco"):
        swarm.train(work_of(1))


def test_ranks_that_name_other_terms_are_told():
    def work(rank, optimize):
        optimize(net(), period=5 + rank)

    with (
        farflock.local_swarm(2, "diloco") as swarm,
        pytest.raises(RefusedByRun, match="period: it is 6 here and 5"),
    ):
        swarm.train(work)


def test_a_swarm_trains_once_and_a_rank_has_one_optimizer():
    def work(rank, optimize):
        optimize(net())
        with pytest.raises(Usage, match="one peer"):
            optimize(net())

    with farflock.local_swarm(1) as swarm:
        swarm.train(work)
        with pytest.raises(Usage, match="make a new local_swarm"):
            swarm.train(work)
        with pytest.raises(Usage, match="this process only"):
            _ = swarm.optimizers[0].invite


@pytest.mark.parametrize("peers", [0, 65])
def test_a_swarm_has_one_to_sixty_four_peers(peers):
    with pytest.raises(Usage, match="1 to 64"):
        farflock.local_swarm(peers)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.ci_more) for name in ("sparseloco", "lean")),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("diloco", "streaming", "noloco", "ddp")
        ),
    ],
)
def test_torch_s_default_type_is_the_program_s_own_affair(name):
    """Some programs set it for good once their model is loaded."""
    options = {"ddp": {}, "streaming": {"period": 4, "fragments": 2}}.get(name, {"period": 2})
    models = [net() for _ in range(4)]

    def work(rank, optimize):
        model = models.pop()
        optimizer = optimize(model, inner="adamw", lr=1e-2)
        chance = torch.Generator().manual_seed(rank)
        for _ in range(4):
            x = torch.randn(16, 4, generator=chance, dtype=torch.float32)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        return optimizer.eval_params()

    results = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            with farflock.local_swarm(2, method=name, **QUICK, **options) as swarm:
                results.append(swarm.train(work))
        finally:
            torch.set_default_dtype(torch.float32)
    assert equal(results[0][0].values(), results[1][0].values())
