"""A recipe is checked to the last word before anything runs, and what ships is whole."""

import math
from pathlib import Path

import pytest

from farflock.experiments.reproduce import recipe
from farflock.experiments.reproduce.command import TIERS
from farflock.experiments.reproduce.job import key
from farflock.experiments.reproduce.study import Study
from farflock.node.errors import Usage
from farflock.optimizers.catalog import unfolded

SHIPPED = recipe.names()
TRAINING = [name for name in SHIPPED if isinstance(recipe.load(name), recipe.Recipe)]


def refused(text):
    with pytest.raises(Usage) as error:
        checked = recipe.read("mine", text)
        for tier in checked.tiers:
            checked.sizes(tier)
    return str(error.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_recipe_has_three_tiers_and_an_explanation_of_half_a_page(name):
    shipped = recipe.load(name)
    assert set(shipped.tiers) == set(TIERS)
    for tier in TIERS:
        shipped.needs_gpu(tier)
    words = len(recipe.explanation(name).split())
    assert 80 < words < 400


@pytest.mark.parametrize("name", TRAINING)
def test_each_shipped_recipe_can_become_jobs_in_every_tier(name):
    for tier in TIERS:
        study = Study(recipe.load(name), tier)
        assert all(len(key(study.job(arm, 1, (1e-3, 0.25)))) == 64 for arm in study.arms)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_text_says_what_the_recipe_says(name):
    words = " ".join(recipe.explanation(name).split())
    shipped = recipe.load(name)
    assert all(
        " ".join(said.split()) in words
        for said in (shipped.question, shipped.claim, shipped.reproduced_if)
    )


def test_the_claims_of_the_specification_and_of_every_method_are_there():
    methods = {arm.method for name in TRAINING for arm in recipe.load(name).arms.values()}
    wanted = (
        "sparseloco streaming delayed co2 demo flexdemo desloc edit "
        "sparta sparta-diloco async noloco diloco"
    )
    assert methods >= set(wanted.split())
    assert len(TRAINING) >= 18


def test_a_recipe_is_read_with_its_defaults(recipe_text):
    mine = recipe.read("mine", recipe_text)
    sizes = mine.sizes("cpu")
    assert (sizes.batch, sizes.seeds, sizes.lr, sizes.peers) == (4, [1, 2], [1e-3, 4e-3], 2)
    assert mine.verdict[0].tolerance == 3
    assert list(mine.expanded()) == ["short", "long"]


def test_a_sweep_becomes_an_arm_for_each_value_of_an_option_inside_a_table(recipe_text):
    sweep = 'sweep = { option = "outer.lr", values = [0.5, 1.0] }\n'
    text = recipe_text.replace("period = 1,", 'period = 1, outer = { name = "sgd", lr = 0.1 },')
    text = text.replace('[arms.long]\nlabel = "H = 2"\n', f'[arms.long]\nlabel = "H = 2"\n{sweep}')
    text = text.replace('arms = ["short", "long"]', 'arms = ["short", "long@1"]')
    arms = recipe.read("mine", text).expanded()
    assert list(arms) == ["short", "long@0.5", "long@1"]
    assert arms["long@0.5"].options["outer"] == {"lr": 0.5}
    assert arms["long@1"].label == "H = 2, outer.lr 1"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("question", "qestion", "did you mean 'question'"),
        ("[arms.short]", "[arms.ddp]", "every recipe includes this baseline; leave it out"),
        (
            "label",
            "lable",
            "mine.toml, arms.short: lable: there is no such key; did you mean 'label'",
        ),
        ('method = "diloco"\noptions', 'method = "noloco"\noptions', "there is no 'return_codec'"),
        ("period = 1", "period = 0", "a period of 0 steps is out of range; choose 1 or more"),
        ("period = 1", "perod = 1", "there is no 'perod'; did you mean 'period'"),
        ('"ordering"', '"order"', "'order' is not known; did you mean 'ordering'"),
        (
            'arms = ["short", "long"]',
            'arms = ["short", "lang"]',
            "there is no arm 'lang'; did you mean 'long'",
        ),
        (
            'arms = ["short", "long"]',
            'arms = ["short"]',
            "ordering takes at least two arms and no limits",
        ),
        ("says =", 'metric = "los"\nsays =', "'los' is not known; did you mean 'loss'"),
        ('"ordering"', '"within"', "within needs a limit; give it `low`, `high` or both"),
        ('"ordering"', '"bound"\nhigh = 1', "bound compares 1 arms, not 2"),
        ('"ordering"', '"within"\nlow = 2\nhigh = 1', "low 2.0 is above high 1.0; swap them"),
        ('"ordering"', '"optimum"', "arm short has no sweep"),
        (
            "batch = 4",
            "batch = 5",
            "5 sequences per step cannot be shared evenly by the 2 peers of all arms; "
            "choose a multiple of 2",
        ),
        ('model = "tiny"', 'model = "tinny"', "did you mean 'tiny'"),
        ('model = "tiny"', "model = { dim = 3 }", "correct its sizes"),
        ("seq = 8", "seq = 800", "800 tokens do not fit the model's context of 64; give a smaller"),
        ("seeds = [1]\n", "", "seeds"),
        ("seeds = [1]\n", "seeds = [1]\nsteps = 0\n", "steps"),
        (
            'label = "H = 1"',
            'label = "H = 1"\nspeeds = [1.0]',
            "arm short has 1 speeds for 2 peers; give one for each peer",
        ),
        ('label = "H = 1"', 'label = "H = 1"\nlate = 1.0', "late"),
        (
            "[arms.short]",
            "[arms]\nx = 1\n[arms.short]",
            "each arm must be a table; write it as [arms.NAME]",
        ),
        ("[[verdict]]", "[[verdicts]]", "did you mean 'verdict'"),
        ("[[verdict]]", "[verdict]", "each rule must be a table; write it as [[verdict]]"),
        ("tiers.ci", "tiers.cy", "tiers"),
    ],
)
def test_a_bad_recipe_is_refused_with_its_place_and_a_remedy(recipe_text, before, after, said):
    assert before in recipe_text
    assert said in refused(recipe_text.replace(before, after, 1))


def test_late_peers_need_a_period_to_be_late_for(recipe_text):
    text = recipe_text.replace("period = 1, ", "").replace(
        'label = "H = 1"', 'label = "H = 1"\nlate = 0.5'
    )
    assert "set options.period too" in refused(text)


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(Usage, match="did you mean 'interval'"):
        recipe.load("intervall")


def test_a_method_that_this_version_lacks_is_named_and_keeps_the_recipe_from_running_only(
    recipe_text,
):
    text = recipe_text.replace('method = "diloco"\noptions', 'method = "tomorrow"\noptions')
    mine = recipe.read("mine", text)
    assert recipe.missing(mine) == ["tomorrow"]
    with pytest.raises(Usage, match="no method tomorrow; update farflock"):
        Study(mine, "ci")


def test_an_arm_of_a_preset_is_one_of_its_method_with_its_options_spelt_out(recipe_text):
    text = recipe_text.replace('method = "diloco"\noptions', 'method = "best-500"\noptions')
    arm = recipe.read("mine", text).arms["short"]
    assert arm.method == "lean"
    assert arm.options == {
        **unfolded("best-500")[1],
        "period": 1,
        "codec": "fp32",
        "return_codec": "fp32",
    }


def test_a_tier_replaces_only_options_that_an_arm_has(recipe_text):
    mine = recipe.read(
        "mine",
        recipe_text.replace("seeds = [1]\n", "seeds = [1]\noptions = { period = 3, one_in = 7 }\n"),
    )
    options = recipe.options_of(mine.arms["short"], mine.sizes("ci"))
    assert options == {"period": 3, "codec": "fp32", "return_codec": "fp32"}
    assert mine.arms["short"].options["period"] == 1


def test_shipped_limits_are_finite_and_recipes_have_no_stray_files():
    for name in SHIPPED:
        for rule in recipe.load(name).verdict:
            assert all(limit is None or math.isfinite(limit) for limit in (rule.low, rule.high))
    folder = Path(recipe.__file__).parents[1] / "recipes"
    assert {path.suffix for path in folder.iterdir()} == {".toml", ".md"}
    assert {path.stem for path in folder.glob("*.md")} == set(SHIPPED)
