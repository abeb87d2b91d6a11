"""DES-LOC compared with section 9 of its specification: a slow twin, the limits in which it becomes
another method, and joiners."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from farflock.node.model.replica import PlainReplica
from farflock.node.train.driver import Apply, Driver
from farflock.optimizers.contrib.desloc import DesLoc
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.method import Progress, Result
from farflock.optimizers.parts.outer import OuterNesterov, OuterSGD
from farflock.optimizers.parts.state import WrongState

EXACT = {"codec": "fp32", "return_codec": "fp32", "moment_codec": "fp32"}
BETAS, EPS, LR = (0.9, 0.99), 1e-8, 0.05
SIZE = 6


def gradient(peer, step, x):
    """The noisy gradient of a bowl of the peer's own, in float64."""
    chance = np.random.default_rng([peer, step])
    return (x - np.linspace(-1, 1, SIZE) * (peer + 1)) + chance.normal(0, 0.5, SIZE)


class Lockstep:
    """Peers in lockstep with exact means, on real AdamW replicas; `alike` gives all of them the
    first one's gradients."""

    def __init__(self, peers, alike=False, codecs=lambda x: x, scale=1.0, **options):
        self.alike, self.codecs, self.scale = alike, codecs, scale
        self.peers = []
        for _ in range(peers):
            self.add(options)

    def add(self, options):
        module = nn.Module()
        module.x = nn.Parameter(torch.linspace(0.5, -0.5, SIZE))
        inner = torch.optim.AdamW(
            module.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0
        )
        replica = PlainReplica(module, inner, clip_norm=None)
        self.peers.append((DesLoc(**{**EXACT, **options}), replica))
        return self.peers[-1]

    def run(self, first, last):
        """Take steps first..last-1; return which streams were exchanged at which step."""
        asked = []
        for step in range(first, last):
            offers = {}
            for number, (method, replica) in enumerate(self.peers):
                x = replica.read(["x"], "param")["x"].double().numpy()
                g = self.scale * gradient(0 if self.alike else number, step, x)
                replica.write({"x": torch.from_numpy(g).float()}, "grad")
                method.local_step(replica, Progress(step))
                for exchange in method.due(replica, Progress(step + 1)):
                    offers.setdefault(exchange.key, []).append((method, replica, exchange))
            for key, offered in offers.items():
                asked.append((step + 1, key.stream))
                self.close(key, offered)
        return asked

    def close(self, key, offered):
        sent = [self.codecs(exchange.tensors["x"]) for _, _, exchange in offered]
        mean = {"x": self.codecs(torch.stack(sent).double().mean(0).float())}
        names = tuple(map(str, range(len(sent))))
        for (method, replica, exchange), own in zip(offered, sent, strict=True):
            result = Result(
                "ok", key.round + exchange.stride, names, (1.0,) * len(sent), mean, None, {"x": own}
            )
            method.apply(replica, exchange, replace(result, taken={"x": [(0, SIZE)]}))

    def held(self, what):
        return [replica.read(["x"], what)["x"].double().numpy() for _, replica in self.peers]


def twin(peers, steps, kx, ku, kv, rho=math.inf, alike=False):
    """Section 9.2 line by line, for all peers, in float64; a period of math.inf means never."""
    x = [np.linspace(0.5, -0.5, SIZE) for _ in range(peers)]
    u, v = [np.zeros(SIZE) for _ in x], [np.zeros(SIZE) for _ in x]
    for t in range(steps + 1):
        for state, period in ((x, kx), (u, ku), (v, kv)):
            if t > 0 and t % period == 0:
                state[:] = [sum(state) / peers] * peers
        if t == steps:
            return x, u, v
        for m in range(peers):
            g = np.clip(gradient(0 if alike else m, t, x[m]), -rho, rho)
            u[m] = BETAS[0] * u[m] + (1 - BETAS[0]) * g
            v[m] = BETAS[1] * v[m] + (1 - BETAS[1]) * g**2
            fair_u, fair_v = u[m] / (1 - BETAS[0] ** (t + 1)), v[m] / (1 - BETAS[1] ** (t + 1))
            x[m] = x[m] - LR * fair_u / (np.sqrt(fair_v) + EPS)


def close_to(ours, theirs, tolerance=3e-5):
    for mine, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kx", "ku", "kv"),
    [(1, 1, 1), (2, 6, 12), (3, 3, 3), (4, 4, 8), (2, 8, 4), (5, math.inf, math.inf)],
)
@pytest.mark.parametrize("peers", [1, 2, 5])
@pytest.mark.parametrize("rho", [math.inf, 0.3])
def test_it_is_the_slow_twin_of_its_equations(kx, ku, kv, peers, rho):
    periods = {
        "exp_avg_period": 0 if ku == math.inf else ku,
        "exp_avg_sq_period": 0 if kv == math.inf else kv,
    }
    swarm = Lockstep(peers, period=kx, clip=None if rho == math.inf else rho, **periods)
    swarm.run(0, 26)
    x, u, v = twin(peers, 26, kx, ku, kv, rho)
    close_to(swarm.held("param"), x)
    close_to(swarm.held("exp_avg"), u)
    close_to(swarm.held("exp_avg_sq"), v)


# 9.7, point by point


def test_synced_every_step_it_is_adam_on_the_mean_gradient_only_if_all_gradients_are_equal():
    each_step = {"period": 1, "exp_avg_period": 1, "exp_avg_sq_period": 1}
    alike, apart = Lockstep(3, alike=True, **each_step), Lockstep(3, **each_step)
    for swarm in (alike, apart):
        swarm.run(0, 12)
    close_to(alike.held("param")[:1], twin(1, 12, 1, 1, 1)[0])

    x, u, v = np.linspace(0.5, -0.5, SIZE), np.zeros(SIZE), np.zeros(SIZE)
    for t in range(12):  # DDP: the mean gradient, one optimizer
        g = sum(gradient(m, t, x) for m in range(3)) / 3
        u, v = BETAS[0] * u + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
        x = x - LR * u / (1 - BETAS[0] ** (t + 1)) / (np.sqrt(v / (1 - BETAS[1] ** (t + 1))) + EPS)
    assert np.abs(apart.held("param")[0] - x).max() > 0.01


def test_with_one_period_for_all_it_is_local_adam():
    """Everything is averaged once a period; between averages each peer runs plain AdamW."""
    swarm = Lockstep(3, period=4, exp_avg_period=4, exp_avg_sq_period=4)
    assert swarm.run(0, 8) == [
        (step, what) for step in (4, 8) for what in ("param", "exp_avg", "exp_avg_sq")
    ]
    for what in ("param", "exp_avg", "exp_avg_sq"):
        first, *others = swarm.held(what)
        assert all(np.abs(first - other).max() < 1e-6 for other in others)


def end_of(made):
    """The outer parameters of three peers with this method after 12 steps."""
    swarm = Lockstep(3)
    swarm.peers = [(made(), replica) for _, replica in swarm.peers]
    swarm.run(0, 12)
    assert len({tuple(x) for x in swarm.held("param")}) == 1
    method, replica = swarm.peers[0]
    return method.eval_params(replica)["x"]


@pytest.mark.parametrize("outer", [OuterSGD(1.0), OuterNesterov(0.5, 0.8)])
def test_without_moment_syncs_it_is_diloco_with_the_same_outer_optimizer(outer):
    ours = end_of(lambda: DesLoc(4, 0, 0, outer, **EXACT))
    assert torch.equal(ours, end_of(lambda: DiLoCo(4, outer, "fp32", "fp32")))


def test_alone_it_is_the_inner_optimizer():
    swarm = Lockstep(1, period=2, exp_avg_period=2, exp_avg_sq_period=4)
    swarm.run(0, 20)
    close_to(swarm.held("param"), twin(1, 20, math.inf, math.inf, math.inf)[0])
    assert float(swarm.peers[0][1].read(["x"], "step")["x"]) == 20


def half(x):
    return x.to(torch.float16).float()


@pytest.mark.parametrize(("codec", "rounded"), [("fp32", lambda x: x), ("fp16", half)])
def test_after_a_sync_of_the_second_moment_all_are_equal_and_none_is_negative(codec, rounded):
    swarm = Lockstep(
        4, codecs=rounded, period=2, exp_avg_period=2, exp_avg_sq_period=4, moment_codec=codec
    )
    swarm.run(0, 8)
    first, *others = swarm.held("exp_avg_sq")
    assert all(np.array_equal(first, other) for other in others)
    assert (first > 0).all()


def test_a_lossy_codec_carries_the_root_of_the_second_moment_and_keeps_its_scale():
    """Squares of gradients of 1e-5, times 1 - beta2, are below half of fp16's smallest number;
    their roots are not."""
    small = Lockstep(
        2,
        codecs=half,
        scale=1e-5,
        period=1,
        exp_avg_period=0,
        exp_avg_sq_period=3,
        moment_codec="fp16",
    )
    exact = Lockstep(2, scale=1e-5, period=1, exp_avg_period=0, exp_avg_sq_period=3)
    for swarm in (small, exact):
        swarm.run(0, 3)
    assert not half(torch.from_numpy(exact.held("exp_avg_sq")[0])).any()
    ratio = small.held("exp_avg_sq")[0] / exact.held("exp_avg_sq")[0]
    assert (
        ratio < 1.1
    ).all()  # (mean sqrt v)^2 is at most mean v, except for the rounding of small halves
    assert (ratio > 0.45).all()  # and for two values at least half of it


def test_without_loss_the_second_moment_itself_is_averaged_and_a_negative_mean_is_cut_off():
    (method, replica), *_ = Lockstep(1, period=1, exp_avg_sq_period=1).peers
    replica.write({"x": torch.ones(SIZE)}, "grad")
    method.local_step(replica, Progress(0))
    exchange = method.due(replica, Progress(1))[-1]
    assert exchange.key.stream == "exp_avg_sq"
    assert torch.equal(exchange.tensors["x"], replica.read(["x"], "exp_avg_sq")["x"])
    hostile = {"x": torch.tensor([-1.0, 0.0, 0.5, 1.0, -0.0, 2.0])}
    result = Result(
        "ok", 1, ("a", "b"), (1, 1), hostile, None, dict(exchange.tensors), {"x": [(0, SIZE)]}
    )
    method.apply(replica, exchange, result)
    assert replica.read(["x"], "exp_avg_sq")["x"].tolist() == [0.0, 0.0, 0.5, 1.0, 0.0, 2.0]


@pytest.mark.parametrize("rho", [0.05, 0.5])
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_clipped_moments_drift_no_farther_than_the_bound(rho, steps):
    swarm = Lockstep(3, period=1, exp_avg_period=0, exp_avg_sq_period=0, clip=rho, scale=10)
    swarm.run(0, 5)
    before = swarm.held("exp_avg"), swarm.held("exp_avg_sq")
    swarm.run(5, 5 + steps)
    bounds = 2 * rho * (1 - BETAS[0] ** steps), 2 * rho**2 * (1 - BETAS[1] ** steps)
    for then, now, bound in zip(
        before, (swarm.held("exp_avg"), swarm.held("exp_avg_sq")), bounds, strict=True
    ):
        assert max(np.abs(a - b).max() for a, b in zip(then, now, strict=True)) <= bound * (
            1 + 1e-5
        )
    # the clip did not suppress it
    assert np.abs(swarm.held("exp_avg")[0]).max() > rho * (1 - BETAS[0] ** steps) / 100


def join(swarm, options):
    method, replica = swarm.add(options)
    teacher, source = swarm.peers[0]
    method.restore(replica, teacher.snapshot(source), "adopt")
    return method, replica


def test_a_joiner_takes_the_last_means_with_their_step_count_and_counts_become_equal():
    options = {"period": 2, "exp_avg_period": 4, "exp_avg_sq_period": 6}
    swarm = Lockstep(2, **options)
    swarm.run(0, 6)
    averaged = swarm.held("exp_avg_sq")[0]
    swarm.run(6, 10)
    _, replica = join(swarm, options)
    assert np.array_equal(swarm.held("exp_avg_sq")[2], averaged)
    assert swarm.held("exp_avg")[2].any()
    assert float(replica.read(["x"], "step")["x"]) == 6
    close_to([swarm.held("param")[2]], [swarm.held("param")[0]])
    swarm.run(10, 12)
    assert {float(one.read(["x"], "step")["x"]) for _, one in swarm.peers} == {12.0}


def test_a_joiners_first_update_is_no_larger_than_others():
    """With a second moment of zero and the group's step count it would be 1/sqrt(1 - beta2) times
    as large, here 10 times."""
    options = {"period": 2, "exp_avg_period": 2, "exp_avg_sq_period": 100}
    swarm = Lockstep(2, **options)
    swarm.run(0, 60)
    _, replica = join(swarm, options)
    before = swarm.held("param")[2]
    assert not swarm.held("exp_avg")[
        2
    ].any()  # a first moment without the second would be 10 times too large as well
    swarm.run(60, 61)
    assert np.abs(swarm.held("param")[2] - before).max() < 1.01 * LR
    assert float(replica.read(["x"], "step")["x"]) == 1


def test_where_the_second_moment_is_zero_the_step_count_is_not_the_groups():
    """Such a value's first gradient would be corrected as if it had been averaged over all those
    steps."""
    options = {"period": 2, "exp_avg_period": 2, "exp_avg_sq_period": 2}
    swarm = Lockstep(2, scale=0.0, **options)
    swarm.run(0, 8)
    _, replica = join(swarm, options)
    assert float(replica.read(["x"], "step")["x"]) == 0


def test_a_peer_that_carries_keeps_its_own_moments():
    options = {"period": 2, "exp_avg_period": 2, "exp_avg_sq_period": 2}
    swarm, other = Lockstep(2, **options), Lockstep(1, scale=2, **options)
    swarm.run(0, 4)
    other.run(0, 3)
    (teacher, source), (method, replica) = swarm.peers[0], other.peers[0]
    before = other.held("exp_avg")[0], other.held("exp_avg_sq")[0]
    method.restore(replica, teacher.snapshot(source), "carry")
    assert np.array_equal(before, (other.held("exp_avg")[0], other.held("exp_avg_sq")[0]))
    assert float(replica.read(["x"], "step")["x"]) == 3
    assert torch.equal(method.eval_params(replica)["x"], teacher.eval_params(source)["x"])


def test_a_missed_sync_of_moments_changes_nothing_here_and_is_repaired_by_the_next():
    (method, replica), *_ = Lockstep(1, period=1, exp_avg_period=1, exp_avg_sq_period=1).peers
    for step, taken in enumerate(({}, {"x": [(0, SIZE)]})):
        replica.write({"x": torch.ones(SIZE)}, "grad")
        method.local_step(replica, Progress(step))
        own = {what: replica.read(["x"], what)["x"] for what in ("exp_avg", "exp_avg_sq")}
        mean = {"x": torch.full((SIZE,), 0.25)}
        for exchange in method.due(replica, Progress(step + 1))[1:]:
            result = Result(
                "partial", step + 1, ("b",), (1,), mean, None, dict(exchange.tensors), taken
            )
            method.apply(replica, exchange, result)
        for what, before in own.items():
            assert torch.equal(replica.read(["x"], what)["x"], mean["x"] if taken else before)
            assert torch.equal(method.snapshot(replica)[f"{what}.x"], mean["x"])
        method.apply(
            replica,
            replace(exchange, key=replace(exchange.key, stream="param")),
            Result("failed", step + 1),
        )


def test_a_second_moment_that_comes_late_brings_the_step_count_with_the_steps_since():
    (method, replica), *_ = Lockstep(1, period=1, exp_avg_period=0, exp_avg_sq_period=1).peers
    asked = []
    for step in range(4):
        replica.write({"x": torch.ones(SIZE)}, "grad")
        method.local_step(replica, Progress(step))
        asked += method.due(replica, Progress(step + 1))
    _, exchange = asked  # both still pending
    mean, taken = {"x": torch.ones(SIZE)}, {"x": [(0, SIZE)]}
    replica.write({"x": torch.tensor(99.0)}, "step")
    result = Result("ok", 1, ("a", "b"), (1, 1), mean, None, exchange.tensors, taken, steps_since=3)
    method.apply(replica, exchange, result)
    assert float(replica.read(["x"], "step")["x"]) == 4
    assert int(method.snapshot(replica)["steps"]) == 1  # what a joiner gets with that mean


@pytest.mark.parametrize("stream", ["exp_avg", "exp_avg_sq"])
def test_a_failed_round_of_moments_changes_nothing_but_the_round(stream):
    (method, replica), *_ = Lockstep(1, period=1, exp_avg_period=1, exp_avg_sq_period=1).peers
    replica.write({"x": torch.ones(SIZE)}, "grad")
    method.local_step(replica, Progress(0))
    exchange = next(one for one in method.due(replica, Progress(1)) if one.key.stream == stream)
    before, own = method.snapshot(replica), replica.read(["x"], stream)["x"]
    method.apply(replica, exchange, Result("failed", 1))
    assert torch.equal(replica.read(["x"], stream)["x"], own)
    changed = {
        name for name, x in method.snapshot(replica).items() if not torch.equal(x, before[name])
    }
    assert changed == {f"round.{stream}"}


def test_where_only_a_part_was_taken_only_that_part_follows():
    (method, replica), *_ = Lockstep(1, period=1, exp_avg_period=1, exp_avg_sq_period=0).peers
    replica.write({"x": torch.ones(SIZE)}, "grad")
    method.local_step(replica, Progress(0))
    _, exchange = method.due(replica, Progress(1))
    own, mean = replica.read(["x"], "exp_avg")["x"], {"x": torch.full((SIZE,), 9.0)}
    taken = {"x": [(2, 4)]}
    method.apply(
        replica,
        exchange,
        Result("partial", 1, ("a", "b"), (1, 1), mean, None, exchange.tensors, taken),
    )
    now = replica.read(["x"], "exp_avg")["x"]
    assert now.tolist() == [*own[:2].tolist(), 9.0, 9.0, *own[4:].tolist()]


# periods, streams and the axis


def test_moments_travel_at_their_own_periods_on_the_axis_of_x():
    swarm = Lockstep(2, period=2)
    asked = swarm.run(0, 24)
    assert [step for step, stream in asked if stream == "param"] == list(range(2, 25, 2))
    assert [step for step, stream in asked if stream == "exp_avg"] == [6, 12, 18, 24]
    assert [step for step, stream in asked if stream == "exp_avg_sq"] == [12, 24]
    method, replica = swarm.peers[0]
    templates = {one.key.stream: (one.key.round, one.stride) for one in method.streams(replica)}
    assert templates == {"param": (0, 1), "exp_avg": (2, 3), "exp_avg_sq": (5, 6)}


def test_at_the_papers_periods_it_sends_half_of_what_local_adam_sends():
    """(1 + 1/3 + 1/6) / Kx values per step and parameter instead of 3 / Kx: half."""
    swarm = Lockstep(1, period=4)
    asked = swarm.run(0, 48)
    assert len(asked) == 48 / 4 * 1.5


def test_a_late_moment_waits_for_its_result_and_then_catches_up_with_x():
    (method, replica), *_ = Lockstep(1, period=1, exp_avg_period=1, exp_avg_sq_period=0).peers
    driver = Driver(method, replica)
    late = None
    seen = []
    for step in range(5):
        replica.write({"x": torch.ones(SIZE)}, "grad")
        method.local_step(replica, Progress(step))
        for exchange in driver.after_step(Progress(step + 1)):
            seen.append((step, exchange.key.stream, exchange.key.round))
            tensors, everything = dict(exchange.tensors), {"x": [(0, SIZE)]}
            result = Result(
                "alone", exchange.key.round + 1, ("a",), (1,), tensors, None, tensors, everything
            )
            if exchange.key.stream == "exp_avg" and late is None:
                late = (exchange.key, result)
            else:
                driver.resolve(exchange.key, result)
        if step == 2:
            driver.resolve(*late)
        while isinstance(action := driver.next(Progress(step + 1, run_time_s=100)), Apply):
            driver.apply(action, Progress(step + 1))
    assert [entry for entry in seen if entry[1] == "exp_avg"] == [
        (0, "exp_avg", 0),
        (3, "exp_avg", 1),
        (4, "exp_avg", 2),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"period": 4, "exp_avg_period": 10},
            r"exp_avg_period=10 is not a multiple of the period 4; choose 8",
        ),
        ({"period": 32, "exp_avg_sq_period": 47}, r"exp_avg_sq_period=47 .* choose 32"),
        ({"period": 32, "exp_avg_sq_period": 5}, "choose 32"),
        ({"exp_avg_period": -32}, "choose 32"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": math.nan}, "clip=nan"),
        ({"period": 0}, "period of 0"),
        ({"moment_codec": "topk:64/4096"}, "moment codec topk:64/4096 is biased"),
        ({"codec": "topk:64/4096"}, "biased"),
        ({"deadline_s": 0.0}, "deadline"),
    ],
)
def test_impossible_options_are_refused_with_the_nearest_choice(options, message):
    with pytest.raises(ValueError, match=message):
        DesLoc(**options)


def test_a_snapshot_with_a_negative_second_moment_is_refused():
    swarm = Lockstep(1, period=1, exp_avg_sq_period=1)
    swarm.run(0, 2)
    method, replica = swarm.peers[0]
    state = method.snapshot(replica)
    state["exp_avg_sq.x"][3] = -1e-9
    with pytest.raises(WrongState, match="negative"):
        method.restore(replica, state, "adopt")
