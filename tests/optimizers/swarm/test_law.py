"""The law of `Method` (optimizers/method.py), point by point, for every method of the catalogue: with one peer and several,
under every misfortune that a swarm can bring.

Nothing here knows a method's periods or streams; a method takes part by its entry in `OPTIONS`.
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch

from farflock.node.train.driver import Driver
from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.method import Method, Progress

# Short rounds, so that a handful of steps holds several of every stream.
OPTIONS = {
    "local": {},
    "ddp": {"codec": "fp32", "return_codec": "fp32"},
    "diloco": {"period": 3, "codec": "fp32", "return_codec": "fp32"},
    "noloco": {"period": 3, "codec": "fp32"},
    "sparseloco": {"period": 3, "codec": "topk:2/8"},
    "demo": {"chunk": 4, "codec": "topk:2/16", "check_rounds": 3},
    "flexdemo": {"rate": 0.5, "codec": "int8", "check_rounds": 3},
    "streaming": {"period": 3, "fragments": 2, "overlap": 1, "codec": "fp32", "return_codec": "fp32"},
    "delayed": {"period": 3, "codec": "fp32", "return_codec": "fp32"},
    "co2": {"period": 3, "codec": "fp32", "return_codec": "fp32"},
    "desloc": {"period": 2, "exp_avg_period": 4, "exp_avg_sq_period": 6, "moment_codec": "fp32", "codec": "fp32"},
    "sparta": {"one_in": 3, "codec": "fp32", "return_codec": "fp32"},
    "sparta-diloco": {"period": 4, "one_in": 3, "mask_codec": "fp32", "codec": "fp32", "return_codec": "fp32"},
    "edit": {"period": 3, "warmup": 2, "codec": "fp32", "return_codec": "fp32"},
    "async": {"period": 3, "enough": 0, "codec": "fp32"},
    "lean": {"correction": 1.0},
}
VARIANTS = [
    *((name, {}) for name in METHODS),
    ("diloco", {"feedback": 0.5, "codec": "int4", "return_codec": "bf16"}),
    ("diloco", {"codec": "int8", "return_codec": "bf16", "round_s": 3.0, "weights": "steps"}),
    ("noloco", {"gamma": 0.6}),
    ("desloc", {"moment_codec": "bf16", "clip": 0.1}),
    ("sparta", {"period": 2, "delay": 1, "selector": "partition", "codec": "fp16"}),
    ("sparta-diloco", {"period": 6, "mask_period": 2, "delay": 1}),
    ("sparseloco", {"denominator": "selectors"}),
    ("demo", {"period": 3, "sign": False}),
    ("flexdemo", {"replicator": "slicing"}),
    ("flexdemo", {"replicator": "random", "period": 2}),
    ("flexdemo", {"replicator": "full", "codec": "fp32", "return_codec": "fp32"}),
    ("streaming", {"overlap": 0, "mix": 0.0, "pattern": "sequential"}),
    ("streaming", {"feedback": 0.5, "codec": "int4", "return_codec": "bf16"}),
    ("delayed", {"mode": "naive"}),
    ("delayed", {"mode": "keep_pending"}),
    ("delayed", {"eager_mix": 0.5}),
    ("delayed", {"delay": 0}),
    ("co2", {"delay": 0, "clip": 0.01}),
    ("ddp", {"codec": "bf16", "return_codec": "bf16"}),
    ("edit", {"codec": "int8", "return_codec": "bf16", "clip": 0.05, "threshold": None, "relative": True}),
    ("edit", {"round_s": 3.0, "min_steps": 2, "step_ratio": 0.5}),
    ("async", {"codec": "int8", "buffer": 2, "c": 0.25, "staleness": "polynomial"}),
    ("async", {"enough": 1}),
    ("async", {"enough": 2, "staleness": "hinge"}),
    ("lean", {"delay": 2, "decay": 0.5}),
    ("lean", {"period": 1, "codec": "fp32", "return_codec": "fp32"}),
]
# After so many steps these hold nothing but their snapshot: all local work is in it, and nothing is kept for later.
AT_REST = {"local": 6, "ddp": 6, "diloco": 6, "noloco": 6, "desloc": 12, "sparta": 6, "edit": 6, "async": 6}
TICKS, QUIET = 20, 6  # steps of misfortune, and without any after it


def each(keep=lambda name, more: True, daily=lambda name, more: True):
    variants = [
        pytest.param(
            name,
            more,
            id="-".join(map(str, (name, *more.values()))),
            marks=() if daily(name, more) else pytest.mark.long,
        )
        for name, more in VARIANTS
        if keep(name, more)
    ]
    return pytest.mark.parametrize(("name", "more"), variants)


each_method = each()
each_exact_method_of_all = each(lambda name, more: METHODS[name].equality == "exact" and not more.get("enough"))
each_method_at_rest = each(lambda name, more: name in AT_REST and "feedback" not in more)


def each_with_sizes_and_fates():
    """Every method with four peers and every fate, with other numbers and those of `EVERY_SIZE`; its further variants with
    four peers and the worst fates. Of every day are the worst fates of four peers, of further variants the last of them,
    and every sixteenth of the others."""
    cases = [
        (name, more, size, fate)
        for name, more in VARIANTS
        for size in ((4,) if more else (1, 2, 4, 7))
        for fate in (WORST if more else FATES if size == 4 else EVERY_SIZE)
    ]
    return pytest.mark.parametrize(
        ("name", "more", "size", "fate"),
        [
            pytest.param(
                *case,
                id="-".join(map(str, (case[0], *case[1].values(), *case[2:]))),
                marks=()
                if (case[2] == 4 and case[3] in (WORST[-1:] if case[1] else WORST)) or place % 16 == 0
                else pytest.mark.long,
            )
            for place, case in enumerate(cases)
        ],
    )


def maker(name, more):
    return lambda: method(name, **{**OPTIONS[name], **more})


def talks(name):
    return name != "local"


def all_of(what, n):
    return [(0, n)]


def none_of(what, n):
    return []


def tail_of(what, n):
    return [(min(2, n - 1), n)]


# Misfortunes: each sets up a swarm whose last peer is its victim, and may do something at each tick.


@dataclass
class Fate:
    """`begin(swarm, victim)` before the first step, `at(swarm, victim, tick)` before each."""

    begin: object = lambda swarm, victim: None
    at: object = lambda swarm, victim, tick: None


def dropped(swarm, victim):
    swarm.taken = lambda peer, number: none_of if peer == victim and number % 3 == 1 else all_of


def partly(swarm, victim):
    swarm.taken = lambda peer, number: tail_of if peer == victim and number % 3 != 2 else all_of


def delayed(swarm, victim):
    swarm.late = lambda peer, number: 1 if number % 2 else 0


def late(swarm, victim):
    swarm.late = lambda peer, number: (number % 4) * 2 if peer == victim else 0


def failing(swarm, victim):
    swarm.fails = lambda number: number % 3 == 1


def slow(swarm, victim):
    swarm.rests = lambda peer, tick: peer == victim and tick % 3 != 0


def everything(swarm, victim):
    dropped(swarm, victim), late(swarm, "a")
    swarm.fails = lambda number: number % 5 == 3


def joins(swarm, victim, tick):
    if tick == 8:
        swarm.join("z", "a")


def leaves(swarm, victim, tick):
    if tick == 8 and len(swarm.peers) > 1:
        swarm.leave(victim)


def sleeps(swarm, victim, tick):
    if len(swarm.peers) > 1:
        swarm.peers[victim].asleep = 5 <= tick < 14


FATES = {
    "calm": Fate(),
    "drop": Fate(dropped),
    "partial": Fate(partly),
    "delay": Fate(delayed),
    "late": Fate(late),
    "fail": Fate(failing),
    "slow": Fate(slow),
    "join": Fate(at=joins),
    "leave": Fate(at=leaves),
    "sleep": Fate(at=sleeps),
    "everything": Fate(everything, at=joins),
}
EVERY_SIZE = ("drop", "delay", "partial", "join", "leave", "late")
WORST = ("late", "sleep", "everything")
each_method_and_fate = each_with_sizes_and_fates()


def played(loopback, name, more, size, fate, ticks=TICKS, wrap=lambda method: method, **hooks):
    """A swarm after so many ticks of its fate; `wrap` is put around each method, `hooks` are the swarm's."""
    peers = "abcdefg"[:size]
    swarm = loopback(lambda: wrap(maker(name, more)()), peers, inner="adamw", lr=0.01)
    for hook, call in hooks.items():
        setattr(swarm, hook, call)
    FATES[fate].begin(swarm, peers[-1])
    for tick in range(ticks):
        FATES[fate].at(swarm, peers[-1], tick)
        swarm.steps(1)
    return swarm


def holding(peer):
    """All that a peer holds: two of these with equal bits have the same future."""
    replica = peer.replica
    inner = {f"{what}.{name}": x for what in ("grad", "exp_avg", "exp_avg_sq", "step") for name, x in read(peer, what)}
    return {**peer.outer(), **peer.method.personal(replica), **peer.theta(), **inner}


def read(peer, what):
    return peer.replica.read(peer.replica.names, what).items()


@dataclass
class Spy:
    """A method under watch: what was asked for as it was then, and what each result did."""

    inner: Method
    copies: list = field(default_factory=list)  # (exchange, a copy of its tensors then)
    failures: list = field(default_factory=list)  # (floating state and parameters before, and after)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def due(self, replica, progress):
        return self._noted(self.inner.due(replica, progress))

    def apply(self, replica, exchange, result):
        before = self._floating(replica)
        second = self.inner.apply(replica, exchange, result)
        if result.status == "failed":
            self.failures.append((before, self._floating(replica)))
        return self._noted(second)

    def _noted(self, exchanges):
        self.copies += [(one, {name: x.clone() for name, x in one.tensors.items()}) for one in exchanges]
        return exchanges

    def _floating(self, replica):
        state = self.inner.snapshot(replica)
        theta = {f"theta.{name}": x for name, x in replica.read(replica.names, "param").items()}
        return {name: x.clone() for name, x in state.items() if x.is_floating_point()} | theta


def test_every_method_is_held_to_the_law():
    assert OPTIONS.keys() == METHODS.keys()


@each_method
def test_streams_are_specimens_of_what_it_asks_for_and_its_rounds_follow_each_other(loopback, name, more):
    swarm = played(loopback, name, more, 2, "fail")
    peer = swarm.peers["a"]
    specimens = peer.specimens
    assert len(specimens) == len(peer.method.streams(peer.replica))
    asked = {stream: [] for stream in specimens}
    for _, exchange in peer.offered:
        one = specimens[exchange.key.stream]
        asked[exchange.key.stream].append(exchange.key.round)
        shapes = [[(key, tuple(x.shape)) for key, x in e.tensors.items()] for e in (one, exchange)]
        assert shapes[0] == shapes[1]
        for what in ("kind", "group", "codec", "return_codec", "stride", "enough", "apply_after", "deadline_s"):
            assert getattr(one, what) == getattr(exchange, what), what
        assert all(x.dtype == torch.float32 and x.device.type == "cpu" for x in exchange.tensors.values())
        assert all(key for key in exchange.tensors)
    for stream, rounds in asked.items():
        one = specimens[stream]
        assert len(rounds) >= 2, f"{stream} has fewer than two rounds in {TICKS} steps; give it shorter ones in OPTIONS"
        replayed = [key.round for key in peer.replayed if key.stream == stream]
        assert sorted(rounds + replayed) == [
            one.key.round + number * one.stride for number in range(len(rounds + replayed))
        ]
        assert rounds == sorted(rounds)
    assert bool(specimens) == talks(name)


@each_method
def test_nothing_is_due_before_the_first_step(loopback, name, more):
    peer = loopback(maker(name, more), "a").peers["a"]
    assert peer.method.due(peer.replica, Progress(0)) == []


# 1 to 5: whatever happens


@each_method_and_fate
def test_whatever_happens(loopback, same, name, more, size, fate):
    """One play for five laws; the loopback itself compares `agreed` at the begin of each round of an exact method."""
    rounds = []
    watched = played(loopback, name, more, size, fate, wrap=Spy, between=lambda peer: rounds.append(rounds_of(peer)))
    quiet(watched, QUIET)
    start = watched.build("new").theta()
    for peer in watched.peers.values():
        require_it_goes_on_with_finite_values(peer, start, talks(name))
        require_failures_to_change_nothing(peer, same)
        require_exchanges_as_they_were_asked_for(peer, same)
        require_each_round_once(peer)
    require_rounds_in_order(rounds, watched.peers["a"].specimens)
    if fate == "fail" and talks(name):
        assert all(peer.method.failures for peer in watched.peers.values())
    if METHODS[name].equality == "exact":
        require_equal_snapshots(watched, same)


def rounds_of(peer):
    return peer.name, dict(peer.applied)


def require_it_goes_on_with_finite_values(peer, start, talks):
    """Law 1, and what it is for: rounds come to an end whatever happened."""
    state = [*holding(peer).values(), *peer.method.eval_params(peer.replica).values()]
    assert all(bool(torch.isfinite(x).all()) for x in state)
    assert any(not torch.equal(x, start[what]) for what, x in peer.theta().items())
    assert bool([result for result in peer.results[-2:] if result.status != "failed"]) == talks


def require_failures_to_change_nothing(peer, same):
    """Law 2: neither outer state nor local work."""
    assert all(same(before, after) for before, after in peer.method.failures)


def require_exchanges_as_they_were_asked_for(peer, same):
    """Law 3: later steps did not change their tensors."""
    assert all(same(dict(one.tensors), then) for one, then in peer.method.copies)
    assert len(peer.method.copies) == len(peer.offered)


def require_each_round_once(peer):
    """Law 4: no key is asked for twice, none applied twice."""
    keys = [exchange.key for _, exchange in peer.offered]
    assert len(set(keys)) == len(keys)
    assert len(peer.results) + len(peer.driver.pending) == len(keys)
    assert not set(peer.replayed) & set(keys)


def require_rounds_in_order(rounds, specimens):
    """Law 4: at every peer, a stream's rounds follow each other without a gap."""
    for name in {name for name, _ in rounds}:
        for stream, one in specimens.items():
            numbers = [applied[stream] for whose, applied in rounds if whose == name and stream in applied]
            assert all(later - earlier in (0, one.stride) for earlier, later in itertools.pairwise(numbers))


def require_equal_snapshots(swarm, same):
    """Law 5, at the end, when everybody knows of the same rounds."""
    first, *others = swarm.peers.values()
    assert all(other.applied == first.applied for other in others)
    assert all(same(other.outer(), first.outer()) for other in others)


def quiet(swarm, ticks):
    """Some steps without misfortune, until all know of the same rounds."""
    swarm.late, swarm.fails = (lambda peer, number: 0), (lambda number: False)
    swarm.taken, swarm.rests = (lambda peer, number: all_of), (lambda peer, tick: False)
    swarm.steps(ticks)
    for _ in range(ticks):
        for peer in swarm.peers.values():
            swarm.catch_up(peer)
        if all(peer.applied == swarm.peers["a"].applied for peer in swarm.peers.values()):
            return
        swarm.steps(1)


@each_method
def test_alone_every_round_is_its_own(loopback, name, more):
    swarm = played(loopback, name, more, 1, "calm")
    assert {result.status for result in swarm.peers["a"].results} == ({"alone"} if talks(name) else set())


@each_exact_method_of_all
def test_denominators_come_from_the_participants_alone(loopback, same, name, more):
    """Law 4: rounds in which c's work came too late equal those of a swarm without c."""
    with_c, without_c = (loopback(maker(name, more), peers, inner="adamw", lr=0.01) for peers in ("abc", "ab"))
    with_c.taken = lambda peer, number: none_of if peer == "c" else all_of
    for swarm in (with_c, without_c):
        swarm.steps(TICKS)
    assert all(result.participants == ("a", "b") for result in with_c.peers["a"].results)
    assert same(with_c.peers["a"].outer(), without_c.peers["a"].outer())


# 6


@each_method_at_rest
def test_adopting_ones_own_snapshot_after_a_round_changes_nothing_that_follows(loopback, same, name, more):
    through, stopped = (loopback(maker(name, more), "ab") for _ in range(2))
    for swarm in (through, stopped):
        swarm.steps(AT_REST[name])
    for peer in stopped.peers.values():
        old = peer.outer()
        peer.driver.method = maker(name, more)()
        peer.driver.method.restore(peer.replica, old, "adopt")
        assert same(peer.outer(), old)
    for swarm in (through, stopped):
        swarm.steps(AT_REST[name])
    for peer, other in zip(through.peers.values(), stopped.peers.values(), strict=True):
        assert same(peer.outer(), other.outer())
        assert same(peer.theta(), other.theta())


@each_method
@pytest.mark.parametrize("tick", [*(pytest.param(tick, marks=pytest.mark.long) for tick in (4, 7)), 11])
def test_adopting_leaves_nothing_of_what_was_before(loopback, same, name, more, tick):
    """Wherever a method was, also with exchanges pending: after adopting it goes on as a new one that adopts."""
    teacher = played(loopback, name, more, 2, "calm", ticks=9).peers["a"].outer()
    futures = []
    for renewed in (False, True):
        peers = played(loopback, name, more, 2, "late", ticks=tick).peers
        future = loopback(maker(name, more), "", inner="adamw", lr=0.01)
        for peer in peers.values():
            moved = future.build(peer.name)
            moved.replica, moved.step, moved.now_s = peer.replica, peer.step, peer.now_s
            moved.driver = Driver(moved.method if renewed else peer.method, peer.replica)
            moved.method.restore(peer.replica, teacher, "adopt")
            assert same(peer.outer() if not renewed else moved.outer(), teacher)
            assert same(dict(moved.method.eval_params(moved.replica)), moved.theta())
            future.peers[peer.name] = moved
        future.steps(12)
        futures.append(future.peers)
    for name_of, peer in futures[0].items():
        assert same(peer.outer(), futures[1][name_of].outer())
        assert same(peer.theta(), futures[1][name_of].theta())


@each_method
@pytest.mark.parametrize("tick", [*(pytest.param(tick, marks=pytest.mark.long) for tick in (3, 8)), 13])
def test_a_joiner_that_adopts_has_the_snapshot_and_evaluates_alike(loopback, same, name, more, tick):
    swarm = played(loopback, name, more, 2, "late", ticks=tick)
    veteran, joiner = swarm.peers["a"], swarm.join("c", "a")
    assert same(joiner.outer(), veteran.outer())
    ours, theirs = (dict(peer.method.eval_params(peer.replica)) for peer in (veteran, joiner))
    assert same(ours, theirs)
    swarm.steps(TICKS)
    together = [result for result in joiner.results if "c" in result.participants]
    assert bool(together) == talks(name)


@each_method
def test_a_snapshot_is_a_copy(loopback, same, name, more):
    swarm = loopback(maker(name, more), "ab")
    swarm.steps(5)
    peer = swarm.peers["a"]
    state, own = peer.outer(), peer.method.personal(peer.replica)
    kept = [{key: x.clone() for key, x in part.items()} for part in (state, own)]
    swarm.steps(5)
    assert same(state, kept[0])
    assert same(own, kept[1])
    before = holding(peer)
    for x in (*peer.outer().values(), *peer.method.personal(peer.replica).values()):
        x.zero_()
    for x in (*peer.method.eval_params(peer.replica).values(), *peer.method.agreed(peer.replica, "").values()):
        x.zero_()
    assert same(holding(peer), before)


# 7


@each(daily=lambda name, more: not more)
@pytest.mark.parametrize(
    ("size", "fate"),
    [
        pytest.param(1, "late", marks=pytest.mark.long),
        (3, "everything"),
        pytest.param(2, "sleep", marks=pytest.mark.long),
    ],
)
def test_stopping_and_going_on_at_every_moment_changes_no_bit(loopback, same, name, more, size, fate):
    ran = played(loopback, name, more, size, fate)
    holder = {}

    def restart(peer):
        holder["swarm"].restart(peer)

    class Stopping(loopback):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            holder["swarm"] = self

    stopped = played(Stopping, name, more, size, fate, between=restart)
    for name_of, peer in ran.peers.items():
        assert same(holding(stopped.peers[name_of]), holding(peer))


@each_method
@pytest.mark.parametrize("moment", [*(pytest.param(moment, marks=pytest.mark.long) for moment in (3, 12)), 25])
def test_stopping_and_going_on_once_changes_no_bit(loopback, same, name, more, moment):
    """At one moment only: where every restart loses the same thing, none of them shows."""
    swarms = []
    for stops in (False, True):
        swarm = loopback(maker(name, more), "ab", inner="adamw", lr=0.01)
        late(swarm, "b")
        moments = iter(range(10_000))

        def between(peer, swarm=swarm, stops=stops, moments=moments):
            if next(moments) in (moment, moment + 1) and stops:
                swarm.restart(peer)

        swarm.between = between
        swarm.steps(TICKS)
        swarms.append(swarm)
    for name_of, peer in swarms[0].peers.items():
        assert same(holding(swarms[1].peers[name_of]), holding(peer))


# no clock, no rank, no global chance


@each_method
def test_global_random_numbers_change_nothing(loopback, same, name, more):
    held = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        held.append(holding(played(loopback, name, more, 2, "late").peers["b"]))
    assert same(*held)
