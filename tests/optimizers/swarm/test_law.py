"""The law of `Method` (optimizers/method.py), point by point, for every method of the catalogue:
with one peer and several, under every fault that a swarm can have. The laws themselves are
functions (optimizers/testing/check.py).

A method takes part through its trial options; only its further variants are here.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from farflock.node.simulate.method_check import NodeRig, check_method
from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.testing import check, misfortunes
from farflock.optimizers.trial_options import TrialIncomplete, TrialOptions, law_options, trial_of

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
    (
        "edit",
        {
            "codec": "int8",
            "return_codec": "bf16",
            "clip": 0.05,
            "threshold": None,
            "relative": True,
        },
    ),
    ("edit", {"round_s": 3.0, "min_steps": 2, "step_ratio": 0.5}),
    ("async", {"codec": "int8", "buffer": 2, "c": 0.25, "staleness": "polynomial"}),
    ("async", {"enough": 1}),
    ("async", {"enough": 2, "staleness": "hinge"}),
    ("lean", {"delay": 2, "decay": 0.5}),
    ("lean", {"period": 1, "codec": "fp32", "return_codec": "fp32"}),
]
EVERY_SIZE = ("drop", "delay", "partial", "join", "leave", "late")


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
each_exact_method_of_all = each(
    lambda name, more: METHODS[name].equality == "exact" and not more.get("enough")
)
each_method_at_rest = each(
    lambda name, more: trial_of(METHODS[name]).rest is not None and "feedback" not in more
)


def each_with_sizes_and_fates():
    """Every method with four peers and every fate, with other numbers and those of `EVERY_SIZE`;
    its further variants with four peers and the worst fates. The everyday tests are the worst fates
    of four peers, the last of them for further variants, and every sixteenth of the others."""
    worst = misfortunes.DAILY_FATES
    cases = [
        (name, more, size, fate)
        for name, more in VARIANTS
        for size in ((4,) if more else (1, 2, 4, 7))
        for fate in (worst if more else misfortunes.FATES if size == 4 else EVERY_SIZE)
    ]
    return pytest.mark.parametrize(
        ("name", "more", "size", "fate"),
        [
            pytest.param(
                *case,
                id="-".join(map(str, (case[0], *case[1].values(), *case[2:]))),
                marks=()
                if (case[2] == 4 and case[3] in (worst[-1:] if case[1] else worst))
                or place % 16 == 0
                else pytest.mark.long,
            )
            for place, case in enumerate(cases)
        ],
    )


def subject(name, more):
    """A method of the catalogue on trial."""
    options = {**law_options(METHODS[name]), **more}
    return check.Subject(lambda: method(name, **options), NodeRig(), trial_of(METHODS[name]).rest)


def daily(every, *others):
    """One value for the everyday tests; the others are long tests."""
    return [*(pytest.param(other, marks=pytest.mark.long) for other in others), every]


# Law 0


@each_method
def test_streams_are_specimens_of_what_it_asks_for_and_its_rounds_follow_each_other(name, more):
    check.check_streams(subject(name, more))


@each_method
def test_nothing_is_due_before_the_first_step(name, more):
    check.check_nothing_is_due_before_the_first_step(subject(name, more))


@each_method
def test_no_global_random_number_is_drawn(name, more):
    check.check_no_global_chance(subject(name, more))


@each_method
def test_gradients_stay_only_where_the_method_says_so(name, more):
    check.check_gradients(subject(name, more))


# Laws 1 to 5


@each_with_sizes_and_fates()
def test_whatever_happens(name, more, size, fate):
    check.check_whatever_happens(subject(name, more), size, fate)


@each_method
def test_alone_every_round_is_its_own(name, more):
    check.check_alone(subject(name, more))


@each_exact_method_of_all
def test_denominators_come_from_the_participants_alone(name, more):
    check.check_denominators(subject(name, more))


# Law 6


@each_method_at_rest
def test_adopting_ones_own_snapshot_after_a_round_changes_nothing_that_follows(name, more):
    check.check_adopting_ones_own_snapshot(subject(name, more))


@each_method
@pytest.mark.parametrize("tick", daily(11, 4, 7))
def test_adopting_leaves_nothing_of_what_was_before(name, more, tick):
    check.check_adopting_leaves_nothing(subject(name, more), tick)


@each_method
@pytest.mark.parametrize("tick", daily(13, 3, 8))
def test_a_joiner_that_adopts_has_the_snapshot_and_evaluates_alike(name, more, tick):
    check.check_joiner(subject(name, more), tick)


@each_method
def test_a_snapshot_is_a_copy(name, more):
    check.check_snapshot_is_a_copy(subject(name, more))


# Law 7


@each(daily=lambda name, more: not more)
@pytest.mark.parametrize(
    ("size", "fate"),
    [
        pytest.param(1, "late", marks=pytest.mark.long),
        (3, "everything"),
        pytest.param(2, "sleep", marks=pytest.mark.long),
    ],
)
def test_stopping_and_going_on_at_every_moment_changes_no_bit(name, more, size, fate):
    check.check_stopping_at_every_moment(subject(name, more), size, fate)


@each_method
@pytest.mark.parametrize("moment", daily(25, 3, 12))
def test_stopping_and_going_on_once_changes_no_bit(name, more, moment):
    check.check_stopping_once(subject(name, more), moment)


# Law 8


@each_method
def test_work_in_ranges_that_were_not_taken_is_kept(name, more):
    check.check_untaken_work_is_kept(subject(name, more))


# Methods that break a law are found


@dataclass(slots=True)
class Careless(DiLoCo):
    """A method that checks whether anything of a tensor was taken, but not which ranges: the mean
    replaces the rest as well."""

    def _take(self, replica, exchange, result):
        theta, moved = replica.read(replica.names, "param"), {}
        for name in replica.names:
            before = self._state.phi[name]
            after = self._state.step(name, self.outer, result.mean[name])
            if result.taken.get(name):
                moved[name] = self._follow(name, theta[name], before, after, result)
        replica.write(moved, "param")

    def _follow(self, name, theta, before, after, result):
        base = before - result.sent[name] if result.taken.get(name) else before
        return after + (theta - base)


@dataclass(slots=True)
class Forgetful(DiLoCo):
    """A method that omits the steps since the last message from what it resumes from."""

    def personal(self, replica):
        return {
            key: x * 0 if key == "since" else x for key, x in DiLoCo.personal(self, replica).items()
        }


@dataclass(slots=True)
class Drawing(DiLoCo):
    """A method that asks the global generator whether to step."""

    def local_step(self, replica, progress):
        DiLoCo.local_step(self, replica, progress)
        torch.rand(1)


@dataclass(slots=True)
class Moving(DiLoCo):
    """A method that moves the replica when a round has failed."""

    def apply(self, replica, exchange, result):
        if result.status == "failed":
            replica.write(self.eval_params(replica), "param")
        return DiLoCo.apply(self, replica, exchange, result)


@dataclass(slots=True)
class Sharing(DiLoCo):
    """A method whose message changes with the replica that it is computed from."""

    def local_step(self, replica, progress):
        self._book.message = None
        DiLoCo.local_step(self, replica, progress)


@pytest.mark.parametrize(
    ("wrong", "law"), [(Careless, 8), (Forgetful, 7), (Drawing, 0), (Moving, 2), (Sharing, 3)]
)
def test_a_method_that_breaks_a_law_is_refused_with_its_number(wrong, law):
    with pytest.raises(check.LawBroken, match=f"law {law} is broken") as refused:
        check_method(wrong)
    assert refused.value.law == law
    assert refused.value.counterexample


def test_only_the_law_of_untaken_work_finds_a_method_that_looks_at_no_ranges():
    """It passes all others, which is the reason for this law."""
    careless = check.Subject(lambda: Careless(**law_options(Careless)), NodeRig())
    check.check_whatever_happens(careless, 4, "everything")
    check.check_stopping_once(careless, 25)
    with pytest.raises(
        check.LawBroken, match=r"gradient of the first step at weight\[0\] was in no range"
    ):
        check.check_untaken_work_is_kept(careless)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_what_a_lossy_codec_rounds_away_does_not_hide_it(codec):
    careless = check.Subject(
        lambda: Careless(**{**law_options(Careless), "codec": codec}), NodeRig()
    )
    with pytest.raises(check.LawBroken, match="law 8 is broken"):
        check.check_untaken_work_is_kept(careless)


def test_choosing_by_range_mends_it():
    @dataclass(slots=True)
    class Mended(Careless):
        def _follow(self, name, theta, before, after, result):
            moved = Careless._follow(self, name, theta, before, after, result)
            return choose(result.taken.get(name, ()), moved, theta)

    check.check_untaken_work_is_kept(
        check.Subject(lambda: Mended(**law_options(Mended)), NodeRig())
    )


# Missing options are named


@dataclass(slots=True)
class Needy(DiLoCo):
    """An option without a default."""

    power: int = None
    trial: ClassVar[TrialOptions] = TrialOptions(law={"powr": 2})


def test_a_trial_that_does_not_fit_says_what_to_change_and_where():
    with pytest.raises(
        TrialIncomplete, match=r"has no option 'powr'; remove it from trial: .*class Needy \("
    ):
        check_method(Needy)


def test_an_option_without_a_default_says_where_to_name_one():
    @dataclass(slots=True)
    class Lacking:
        power: int

    with pytest.raises(
        TrialIncomplete,
        match=r"no value for its option 'power' in a trial; name one in trial: .*law=",
    ):
        check_method(Lacking)


def test_rounds_that_are_too_long_for_a_trial_say_so():
    with pytest.raises(
        TrialIncomplete, match=r"fewer than two rounds in 20 steps; give the method shorter ones"
    ):
        check_method(lambda: DiLoCo(period=50))


def test_what_is_no_dataclass_says_so():
    with pytest.raises(TrialIncomplete, match="put @dataclass"):
        check_method(object)
