"""The laws of `Method` (optimizers/method.py) as functions for tests and for authors of methods.

Each function runs swarms of one method under some misfortune and raises `LawBroken` with the law
and a counterexample. Nothing here knows a method's periods or streams; its trial options
(optimizers/trial_options.py) decide how it is tried.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farflock.optimizers.method import Exchange, Method, Progress, State, Tensors
from farflock.optimizers.testing.loopback import (
    Loopback,
    LoopbackPeer,
    Rig,
    noise,
    nothing,
    same,
    whole,
)
from farflock.optimizers.testing.misfortunes import (
    DAILY_FATES,
    FATES,
    TICKS,
    late,
    play,
    second_half_of,
)
from farflock.optimizers.testing.spy import Spy
from farflock.optimizers.trial_options import TrialIncomplete, law_options, trial_of

LAWS = {
    0: "a method asks for its streams' rounds one after the other, "
    "and no clock or global chance is in it",
    1: "with one participant it runs and gives its documented degenerate result, "
    "and it goes on after any misfortune",
    2: "`failed` leaves outer state untouched and keeps local work",
    3: "once `due` returned, later local steps do not change the exchange's tensors",
    4: "a result is applied at most once; denominators come from `participants` alone",
    5: "`exact` methods: equal state and equal results give equal `snapshot()` bits",
    6: '`restore(snapshot(), "adopt")` gives the same future as never having stopped',
    7: "so does `resume(snapshot() | personal())`, at any moment between two calls",
    8: "work in ranges that were not taken is kept",
}
QUIET_TICKS = 6  # steps without misfortune, after TICKS with it
SPECIMEN_TERMS = (
    "kind",
    "group",
    "codec",
    "return_codec",
    "stride",
    "enough",
    "apply_after",
    "slack",
    "deadline_s",
)
NUDGE = 0.25  # a gradient that must not be forgotten
MIN_TRACE = NUDGE / 2  # the least difference that counts; 4-bit rounding leaves less


class LawBroken(AssertionError):
    """Raised when a method breaks a law, with the law's number, its text, and what was seen."""

    def __init__(self, law: int, counterexample: str) -> None:
        super().__init__(f"law {law} is broken: {LAWS[law]}. {counterexample}")
        self.law, self.counterexample = law, counterexample


def require(kept: bool, law: int, counterexample: str) -> None:
    """Raise `LawBroken` unless the law is kept."""
    if not kept:
        raise LawBroken(law, counterexample)


@dataclass(frozen=True)
class Subject:
    """A method on trial: factory, rig, and the steps after which only its snapshot is held."""

    make: Callable[[], Method]
    rig: Rig
    rest: int | None = None

    @property
    def exact(self) -> bool:
        """True if members promise equal bits."""
        return self.make().equality == "exact"

    def swarm(self, peers: str, **terms: Any) -> Loopback:  # noqa: ANN401 - the loopback's own keywords
        """Return a swarm of this method."""
        return Loopback(self.make, self.rig, peers, **terms)

    def talks(self) -> bool:
        """Return whether the method has streams."""
        return bool(self.swarm("a").peers["a"].templates)


def played(subject: Subject, size: int, fate: str, ticks: int = TICKS) -> Loopback:
    """Return a new swarm of `size` peers with AdamW, after `play` has run on it."""
    return play(subject.swarm("abcdefg"[:size], inner="adamw", lr=0.01), fate, ticks)


def holding(peer: LoopbackPeer) -> State:
    """Return all that a peer has: both states of its method, parameters, gradients and moments."""
    replica = peer.replica
    inner = {
        f"{what}.{name}": x
        for what in ("grad", "exp_avg", "exp_avg_sq", "step")
        for name, x in replica.read(replica.names, what).items()
    }
    return {**peer.outer(), **peer.method.personal(replica), **peer.theta(), **inner}


# 0


def check_streams(subject: Subject) -> None:
    """Check that exchanges match their templates, and that each stream's rounds are consecutive."""
    peer = played(subject, 2, "fail").peers["a"]
    require(
        len(peer.templates) == len(peer.method.streams(peer.replica)),
        0,
        "Two streams have one name.",
    )
    asked: dict[str, list[int]] = {stream: [] for stream in peer.templates}
    for _, exchange in peer.offered:
        asked[exchange.key.stream].append(exchange.key.round)
        _require_likeness(peer.templates[exchange.key.stream], exchange)
    for stream, rounds in asked.items():
        one = peer.templates[stream]
        if len(rounds) < 2:
            raise TrialIncomplete(
                f"stream {stream!r} has fewer than two rounds in {TICKS} steps; "
                "give the method shorter ones, in its module: trial: "
                "ClassVar[TrialOptions] = TrialOptions(law={...})"
            )
        known = sorted(rounds + [key.round for key in peer.replayed if key.stream == stream])
        wanted = [one.key.round + number * one.stride for number in range(len(known))]
        require(
            known == wanted and rounds == sorted(rounds),
            0,
            f"Stream {stream!r} had rounds {known}, not {wanted}.",
        )


def _require_likeness(template: Exchange, exchange: Exchange) -> None:
    shapes = [
        [(key, tuple(x.shape)) for key, x in one.tensors.items()] for one in (template, exchange)
    ]
    require(
        shapes[0] == shapes[1],
        0,
        f"{exchange.key} has tensors {shapes[1]}, its specimen {shapes[0]}.",
    )
    for what in SPECIMEN_TERMS:
        seen, wanted = getattr(exchange, what), getattr(template, what)
        require(seen == wanted, 0, f"{exchange.key} has {what}={seen!r}, its specimen {wanted!r}.")
    plain = all(key and x.dtype == torch.float32 for key, x in exchange.tensors.items())
    require(
        plain,
        0,
        f"{exchange.key} has tensors that are not float32, or one without a name.",
    )


def check_nothing_is_due_before_the_first_step(subject: Subject) -> None:
    """Check that nothing is due before any training."""
    peer = subject.swarm("a").peers["a"]
    require(
        peer.method.due(peer.replica, Progress(0)) == [],
        0,
        "`due` asked for an exchange before any local step.",
    )


def check_gradients(subject: Subject) -> None:
    """Check that only a method that says so leaves gradients in the replica after a step."""
    swarm = subject.swarm("ab")

    def look(peer: LoopbackPeer) -> None:
        left = [n for n, x in peer.replica.read(peer.replica.names, "grad").items() if x.any()]
        require(
            peer.method.keeps_gradients or not left,
            0,
            f"A gradient stays in {left[:1]}, and `keeps_gradients` is not set.",
        )

    swarm.between = look
    swarm.steps(5)


def check_no_global_chance(subject: Subject) -> None:
    """Check that a run draws nothing from the process's generators."""
    before = subject.rig.chance()
    played(subject, 2, "late")
    require(
        subject.rig.chance() == before,
        0,
        "A global random generator was used; draw from the round and a seed.",
    )


# 1 to 5


def check_whatever_happens(subject: Subject, size: int, fate: str) -> None:
    """Check five laws in one run; the loopback itself compares `agreed` at the start of an exact
    method's rounds."""
    rounds: list[tuple[str, dict[str, int]]] = []
    spied = Subject(lambda: Spy(subject.make()), subject.rig)
    swarm = spied.swarm("abcdefg"[:size], inner="adamw", lr=0.01)
    swarm.drops = False  # so that the exchanges' tensors can be compared later
    swarm.between = lambda peer: rounds.append((peer.name, dict(peer.applied)))
    start = swarm.build("new").theta()
    play(swarm, fate)
    make_quiet(swarm, QUIET_TICKS)
    talks = subject.talks()
    for peer in swarm.peers.values():
        _require_it_goes_on(peer, start, talks)
        _require_each_round_once(peer)
        spy = peer.method
        assert isinstance(spy, Spy)
        require(
            all(same(*pair) for pair in spy.failures),
            2,
            f"After {fate!r} with {size} peers {peer.name} has moved.",
        )
        require(not spy.changed, 3, f"The tensors of {spy.changed[:1]} changed in a local step.")
        require(
            len(spy.copies) == len(peer.offered),
            3,
            f"{peer.name} returned exchanges that were not started.",
        )
        require(
            bool(spy.failures) or fate != "fail" or not talks,
            2,
            "No round failed, so nothing was tried.",
        )
    _require_rounds_in_order(rounds, swarm.peers["a"].templates)
    if subject.exact:
        _require_equal_snapshots(swarm)


def make_quiet(swarm: Loopback, ticks: int) -> None:
    """Run steps without misfortune, until all peers know the same rounds."""
    swarm.late, swarm.fails = (lambda peer, number: 0), (lambda number: False)
    swarm.taken, swarm.rests = (lambda peer, number: whole), (lambda peer, tick: False)
    swarm.steps(ticks)
    for _ in range(ticks):
        for peer in swarm.peers.values():
            swarm.catch_up(peer)
        if all(peer.applied == swarm.peers["a"].applied for peer in swarm.peers.values()):
            return
        swarm.steps(1)


def _require_it_goes_on(peer: LoopbackPeer, start: Tensors, talks: bool) -> None:
    state = [*holding(peer).values(), *peer.method.eval_params(peer.replica).values()]
    require(
        all(bool(torch.isfinite(x).all()) for x in state), 1, f"{peer.name} holds NaN or infinity."
    )
    moved = any(not torch.equal(x, start[what]) for what, x in peer.theta().items())
    require(moved, 1, f"The parameters of {peer.name} have never moved.")
    ends = any(result.status != "failed" for result in peer.results[-2:])
    require(
        ends == talks,
        1,
        f"Without any more misfortune the last rounds of {peer.name} came to nothing.",
    )


def _require_each_round_once(peer: LoopbackPeer) -> None:
    keys = [exchange.key for _, exchange in peer.offered]
    require(len(set(keys)) == len(keys), 4, f"{peer.name} asked twice for one of {keys}.")
    require(
        len(peer.results) + len(peer.driver.pending) == len(keys),
        4,
        f"{peer.name} has another number of results.",
    )
    require(
        not set(peer.replayed) & set(keys), 4, f"{peer.name} asked for a round that was replayed."
    )


def _require_rounds_in_order(
    rounds: Sequence[tuple[str, dict[str, int]]], templates: dict[str, Exchange]
) -> None:
    for name in dict.fromkeys(name for name, _ in rounds):
        for stream, one in templates.items():
            numbers = [
                applied[stream] for whose, applied in rounds if whose == name and stream in applied
            ]
            steps = {later - earlier for earlier, later in itertools.pairwise(numbers)}
            require(steps <= {0, one.stride}, 4, f"{name} applied rounds {numbers} of {stream!r}.")


def _require_equal_snapshots(swarm: Loopback) -> None:
    first, *others = swarm.peers.values()
    for other in others:
        require(
            other.applied == first.applied,
            5,
            f"{other.name} knows of other rounds than {first.name}.",
        )
        require(
            same(other.outer(), first.outer()),
            5,
            f"The snapshots of {first.name} and {other.name} differ.",
        )


def check_alone(subject: Subject) -> None:
    """Check that a single peer's rounds are all its own."""
    statuses = {result.status for result in played(subject, 1, "calm").peers["a"].results}
    require(
        statuses == ({"alone"} if subject.talks() else set()),
        1,
        f"A single peer's rounds were {statuses}.",
    )


def check_denominators(subject: Subject) -> None:
    """Check that rounds for which c was late equal those of a swarm without c."""
    with_c, without_c = (subject.swarm(peers, inner="adamw", lr=0.01) for peers in ("abc", "ab"))
    with_c.taken = lambda peer, number: nothing if peer == "c" else whole
    for swarm in (with_c, without_c):
        swarm.steps(TICKS)
    in_it = {result.participants for result in with_c.peers["a"].results}
    require(in_it <= {("a", "b")}, 4, f"Rounds had the participants {in_it}.")
    equal = same(with_c.peers["a"].outer(), without_c.peers["a"].outer())
    require(equal, 4, "A peer whose work was in no mean has changed the outer state of the others.")


# 6


def check_adopting_ones_own_snapshot(subject: Subject) -> None:
    """Check that adopting a peer's own snapshot, if nothing else is held, changes nothing later."""
    if subject.rest is None:
        return
    through, stopped = (subject.swarm("ab") for _ in range(2))
    for swarm in (through, stopped):
        swarm.steps(subject.rest)
    for peer in stopped.peers.values():
        old = peer.outer()
        peer.driver.method = subject.make()
        peer.driver.method.restore(peer.replica, old, "adopt")
        require(same(peer.outer(), old), 6, "A snapshot that was adopted is another one.")
    for swarm in (through, stopped):
        swarm.steps(subject.rest)
    for name, peer in through.peers.items():
        _require_same_peer(
            peer, stopped.peers[name], 6, f"after adopting its own snapshot at step {subject.rest}"
        )


def _require_same_peer(one: LoopbackPeer, other: LoopbackPeer, law: int, when: str) -> None:
    require(same(one.outer(), other.outer()), law, f"The snapshot of {one.name} is another {when}.")
    require(
        same(one.theta(), other.theta()), law, f"The parameters of {one.name} are others {when}."
    )


def check_adopting_leaves_nothing(subject: Subject, tick: int) -> None:
    """Check that a method that adopts, even with pending exchanges, goes on like a new one."""
    teacher = played(subject, 2, "calm", ticks=9).peers["a"].outer()
    futures = []
    for renewed in (False, True):
        future = subject.swarm("", inner="adamw", lr=0.01)
        for peer in played(subject, 2, "late", ticks=tick).peers.values():
            moved = future.build(peer.name)
            method = moved.method if renewed else peer.method
            moved.replica, moved.step, moved.now_s = peer.replica, peer.step, peer.now_s
            moved.driver = subject.rig.driver(method, peer.replica)
            method.restore(peer.replica, teacher, "adopt")
            require(
                same(moved.outer(), teacher),
                6,
                f"At step {tick} a snapshot that was adopted is another one.",
            )
            evaluated = moved.method.eval_params(moved.replica)
            require(
                same(evaluated, moved.theta()),
                6,
                "After adopting, what is evaluated is not what is trained.",
            )
            future.peers[peer.name] = moved
        future.steps(12)
        futures.append(future.peers)
    for name, peer in futures[0].items():
        _require_same_peer(
            peer,
            futures[1][name],
            6,
            f"than that of a new method, after both adopted at step {tick}",
        )


def check_joiner(subject: Subject, tick: int) -> None:
    """Check that a joiner that adopts has the snapshot, evaluates the same, and takes part."""
    swarm = played(subject, 2, "late", ticks=tick)
    veteran, joiner = swarm.peers["a"], swarm.join("c", "a")
    require(same(joiner.outer(), veteran.outer()), 6, "A joiner's snapshot is not its teacher's.")
    ours, theirs = (peer.method.eval_params(peer.replica) for peer in (veteran, joiner))
    require(same(ours, theirs), 6, "A joiner evaluates other parameters than its teacher.")
    swarm.steps(TICKS)
    together = any("c" in result.participants for result in joiner.results)
    require(together == subject.talks(), 6, f"A joiner was in no round of {TICKS} steps.")


def check_snapshot_is_a_copy(subject: Subject) -> None:
    """Check that later steps change no state, and changes of a state do not change the method."""
    swarm = subject.swarm("ab")
    swarm.steps(5)
    peer = swarm.peers["a"]
    state, own = peer.outer(), peer.method.personal(peer.replica)
    copies = [{key: x.clone() for key, x in one.items()} for one in (state, own)]
    swarm.steps(5)
    require(same(state, copies[0]), 6, "Later steps have changed a snapshot.")
    require(same(own, copies[1]), 7, "Later steps have changed a personal state.")
    before = holding(peer)
    for x in (*peer.outer().values(), *peer.method.personal(peer.replica).values()):
        x.zero_()
    for x in peer.method.eval_params(peer.replica).values():
        x.zero_()
    require(
        same(holding(peer), before),
        6,
        "Overwriting what a method handed out has changed the method.",
    )
    method, both = peer.method, {**peer.outer(), **peer.method.personal(peer.replica)}
    for given, take in (
        (peer.outer(), partial(method.restore, mode="adopt")),
        (both, method.resume),
    ):
        take(peer.replica, given)
        before = holding(peer)
        for x in given.values():
            x.zero_()
        require(same(holding(peer), before), 6, "Overwriting what it took changed a method.")


# 7


def check_stopping_at_every_moment(subject: Subject, size: int, fate: str) -> None:
    """Check that a swarm whose peers restart between any two calls ends in the same bits."""
    ran = played(subject, size, fate)
    stopped = subject.swarm("abcdefg"[:size], inner="adamw", lr=0.01)
    stopped.between = stopped.restart
    _require_equal_ends(ran, play(stopped, fate), "stopped at every moment")


def check_stopping_once(subject: Subject, moment: int) -> None:
    """Check a single restart: if every restart lost the same thing, no comparison would show it."""
    ran, stopped = (subject.swarm("ab", inner="adamw", lr=0.01) for _ in range(2))
    stopped.between = _restarting(stopped, moment)
    for swarm in (ran, stopped):
        late(swarm, "b")
        swarm.steps(TICKS)
    _require_equal_ends(ran, stopped, f"stopped at moment {moment}")


def _require_equal_ends(ran: Loopback, stopped: Loopback, how: str) -> None:
    for name, peer in ran.peers.items():
        require(
            same(holding(stopped.peers[name]), holding(peer)),
            7,
            f"{name} {how} and ended elsewhere.",
        )


def _restarting(swarm: Loopback, moment: int) -> Callable[[LoopbackPeer], None]:
    moments = itertools.count()

    def between(peer: LoopbackPeer) -> None:
        if next(moments) in (moment, moment + 1):
            swarm.restart(peer)

    return between


# 8


def check_untaken_work_is_kept(subject: Subject) -> None:
    """Check that work outside of the taken ranges of each stream's first round is not lost.

    Two runs differ in the sign of one gradient of a peer, in a range that was not taken; they must
    not end the same there. A gradient and its opposite have one norm, so nothing else tells the
    runs apart. The residual of a lossy codec does, by a little, but is not kept work, so a
    difference counts from `MIN_TRACE` on.
    """
    if not subject.talks():
        return
    runs = [_partial_run(subject, sign) for sign in (1.0, -1.0)]
    require(
        "partial" in {result.status for result in runs[0].results},
        8,
        "No round was partial, so nothing was tried.",
    )
    first, second = (dict(_traces(peer)) for peer in runs)
    for name in runs[0].replica.names:
        seen = [
            what for what in first if what[1] in (name, "") and _differ(first[what], second[what])
        ]
        require(
            bool(seen),
            8,
            f"The gradient of the first step at {name}[0] was in no range that a result's `taken` "
            "named, and it is neither in the parameters nor in any state or later exchange of its "
            "peer: choose by range what of a tensor was taken (optimizers/parts/feedback.py, "
            "choose)",
        )


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or bool(
        ((one.double() - other.double()).abs() >= MIN_TRACE).any()
    )


def _partial_run(subject: Subject, sign: float) -> LoopbackPeer:
    """Return the peer whose work is only partly taken at first."""

    def gradient(peer: str, step: int, name: str, theta: Tensor) -> Tensor:
        x = noise(peer, step, name, theta)
        if peer == "b":
            x.view(-1)[0] = 0.0 if step else sign * NUDGE
        return x

    swarm = subject.swarm("ab", gradient=gradient)
    last = max(one.key.round for one in swarm.peers["b"].templates.values())
    swarm.taken = lambda peer, number: second_half_of if peer == "b" and number <= last else whole
    swarm.steps(TICKS)
    return swarm.peers["b"]


def _traces(peer: LoopbackPeer) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield a peer's values at each parameter's first place, keyed by (where it is, parameter).

    The parameter is "" for requests in another form after the first rounds."""
    last = max(one.key.round for one in peer.templates.values())
    held = holding(peer) | {f"theta.{name}": x for name, x in peer.theta().items()}
    for _, exchange in peer.offered:
        if exchange.key.round > last:
            held |= {f"{exchange.key}.{what}": x for what, x in exchange.tensors.items()}
            for what, x in exchange.tensors.items():
                if tuple(x.shape) not in peer.replica.shapes.values():
                    yield (f"{exchange.key}.{what}", ""), x
    for name, shape in peer.replica.shapes.items():
        for what, x in held.items():
            if what.endswith(f".{name}") and tuple(x.shape) == shape:
                yield (what, name), x.reshape(-1)[0]


def check_method(make: Callable[[], Method], rig: Rig, *, long: bool = False) -> None:
    """Raise `LawBroken` if a method that `make` returns breaks a law, `TrialIncomplete` if it
    cannot be tried. A class as `make` is called with its trial options. `long` also runs the rarer
    misfortunes."""
    subject = subject_of(make, rig)
    check_streams(subject)
    check_nothing_is_due_before_the_first_step(subject)
    check_gradients(subject)
    check_no_global_chance(subject)
    check_alone(subject)
    for fate in FATES if long else DAILY_FATES:
        check_whatever_happens(subject, 4, fate)
    if subject.exact:
        check_denominators(subject)
    check_adopting_ones_own_snapshot(subject)
    check_snapshot_is_a_copy(subject)
    for tick in (4, 7, 11) if long else (11,):
        check_adopting_leaves_nothing(subject, tick)
        check_joiner(subject, tick + 2)
    check_stopping_at_every_moment(subject, 3, "everything")
    for moment in (3, 12, 25) if long else (25,):
        check_stopping_once(subject, moment)
    check_untaken_work_is_kept(subject)


def subject_of(make: Callable[[], Method], rig: Rig) -> Subject:
    """Return a method on trial; a class is made with its trial options."""
    if not isinstance(make, type):
        return Subject(make, rig)
    options = law_options(make)
    return Subject(lambda: make(**options), rig, trial_of(make).rest)
