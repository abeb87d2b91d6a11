"""Trials are checked before anything runs: each method of the catalogue, four trials,
options that exist."""

import pytest

from farflock.experiments.quality import arms as quality_arms
from farflock.node.errors import Usage
from farflock.optimizers import catalog
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.trial_options import TrialOptions

LINES = (
    "[lines.ddp]\nlr = [1e-3, 2e-3]\nwarmup = [0.1, 0.2]\n"
    "[lines.none]\nlr = [1e-3]\nwarmup = [0.1]\n"
)
TRIAL = (
    '[[arms.diloco.trials.{}]]\nwhy = "{}"\nlr = 1e-3\nwarmup = 0.1\noptions = {{ period = {} }}\n'
)


def text(at_100=4, at_500=4, why="to see", period=16):
    return LINES + TRIAL.format(100, why, period) * at_100 + TRIAL.format(500, why, 80) * at_500


@pytest.fixture
def one_method(monkeypatch):
    """A catalogue of both lines' methods and DiLoCo."""
    few = {name: catalog.METHODS[name] for name in ("local", "ddp", "diloco")}
    monkeypatch.setattr(quality_arms, "METHODS", few)


def test_the_arms_of_this_version_cover_the_catalogue_with_four_trials_a_budget():
    arms = quality_arms.load()
    assert {*arms.arms, "local", "ddp"} == set(catalog.METHODS)
    assert all(len(arm.at(budget)) == 4 for arm in arms.arms.values() for budget in (100, 500))


@pytest.mark.parametrize("preset", catalog.PRESETS)
def test_a_preset_that_is_named_for_a_budget_is_its_method_s_first_trial(preset):
    method, options = catalog.PRESETS[preset]
    first, *others = quality_arms.load().arms[method].at(int(preset.partition("-")[2]))
    assert first.options == options
    assert all(options.keys() <= other.options.keys() for other in others)


def test_a_preset_that_does_not_exist_is_refused(one_method):
    with pytest.raises(
        Usage, match="preset 'best-10': there is no preset with this name; did you mean 'best-100'"
    ):
        quality_arms.read(text().replace("why =", 'preset = "best-10"\nwhy ='))


def test_each_trial_of_a_method_is_another_one():
    for name, arm in quality_arms.load().arms.items():
        for budget in (100, 500):
            tried = [
                (trial.lr, trial.warmup, trial.beta2, trial.options) for trial in arm.at(budget)
            ]
            assert all(one not in tried[:place] for place, one in enumerate(tried)), name


def test_every_trial_names_its_period_because_its_cost_is_foreseen_by_it():
    arms = quality_arms.load().arms.values()
    assert all(
        "period" in trial.options
        for arm in arms
        for budget in (100, 500)
        for trial in arm.at(budget)
    )


def test_a_line_s_grid_is_all_combinations(one_method):
    found = quality_arms.read(text()).lines["ddp"].trials()
    assert [(trial.lr, trial.warmup) for trial in found] == [
        (1e-3, 0.1),
        (1e-3, 0.2),
        (2e-3, 0.1),
        (2e-3, 0.2),
    ]
    assert {trial.beta2 for trial in found} == {0.95}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (text(at_100=3), "diloco at 1/100: it has 3 trials; give it 4"),
        (text(at_500=0), "diloco at 1/500: it has 0 trials"),
        (text(period=0), "diloco at 1/100, trial 1: a period of 0 steps"),
        (text().replace("period =", "priod ="), "period"),
        (text(why=""), "why"),
        (text().replace("diloco", "dilco"), "no method diloco"),
        (text().replace("lines.none", "lines.nobody"), "no line none"),
        (
            text().replace("lr = 1e-3\nwarmup = 0.1\noptions", "lr = -1.0\nwarmup = 0.1\noptions"),
            "lr",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(one_method, written, said):
    with pytest.raises(Usage, match=said):
        quality_arms.read(written)


def test_a_method_without_trials_is_named(monkeypatch):
    monkeypatch.setattr(quality_arms, "METHODS", {**catalog.METHODS, "newest": object})
    with pytest.raises(Usage, match="it has no method newest; give each 4 trials per budget"):
        quality_arms.load()


def test_a_line_s_own_method_is_no_arm(one_method):
    with pytest.raises(Usage, match="there is no method ddp"):
        quality_arms.read(text() + TRIAL.replace("diloco", "ddp").format(100, "to see", 1) * 4)


def test_a_method_that_is_not_named_has_the_trials_of_its_class(one_method, monkeypatch):
    one = {"why": "to see", "lr": 1e-3, "warmup": 0.1, "options": {"period": 16}}
    monkeypatch.setattr(DiLoCo, "trial", TrialOptions(quality={"100": [one] * 4, "500": [one] * 4}))
    assert quality_arms.read(LINES + "[arms]").arms["diloco"].at(500)[0].options == {"period": 16}
