"""A recipe whose numbers are computed: read, computed once, judged like one that trains."""

import json

import pytest

from farflock.experiments.pipelines.catalog import COMPUTATIONS
from farflock.experiments.pipelines.table import Computation as Entry
from farflock.experiments.pipelines.table import Parameters, Table, exact, sampled
from farflock.experiments.reproduce import computation, recipe, report
from farflock.experiments.reproduce.shelf import Shelf
from farflock.experiments.reproduce.verdict import NO, UNKNOWN, YES
from farflock.node.errors import Failure, Usage

TEXT = """
question = "Is it so?"
method = "sums"
claim = "It is so"
source = "a paper"
reproduced_if = "the numbers are near."
computation = "sums"
quantity = "apples"

[common]
seeds = [1, 2, 3]

[tiers.ci]
by = 1.0

[tiers.cpu]
by = 2.0

[tiers.gpu]

[[verdict]]
kind = "near"
says = "twice"
rows = ["one", "two"]
paper = [2, 4.5]
within = 0.5

[[verdict]]
kind = "ordering"
says = "more is more"
rows = ["seeded", "seeded more"]
paper = "less < more"
"""


class Sizes(Parameters, frozen=True, kw_only=True):
    by: float = 3.0
    seeds: list[int]


@pytest.fixture
def calls(monkeypatch):
    """There is one computation, `sums`; returns the sizes that it was asked for."""
    asked = []

    def compute(sizes, progress):
        asked.append(sizes)
        progress(1.0)
        noisy = [
            sampled("seeded", sizes.seeds),
            sampled("seeded more", [seed + 10 for seed in sizes.seeds]),
        ]
        return Table([exact("one", sizes.by), exact("two", 2 * sizes.by), *noisy], "four sums")

    compute.__module__ = "farflock.experiments.pipelines.table"
    monkeypatch.setitem(COMPUTATIONS, "sums", Entry(Sizes, compute))
    return asked


@pytest.fixture
def mine(calls):
    return computation.read("mine", TEXT)


class Forgetful:
    """A shelf that keeps nothing."""

    def find_table(self, key):
        return None

    def keep_table(self, key, described, table):
        pass


def ignored(share):
    pass


def words(read, table):
    return [finding.word for finding in read.judged(table)]


def test_near_becomes_a_bound_for_each_row_with_the_paper_s_number_beside_it(mine):
    rules = mine.rules
    assert [(rule.kind, rule.arms, rule.paper) for rule in rules[:2]] == [
        ("bound", ["one"], "2"),
        ("bound", ["two"], "4.5"),
    ]
    assert (rules[1].low, rules[1].high) == (4.0, 5.0)
    assert rules[1].says == "twice: two"
    assert rules[2].kind == "ordering"


def test_an_exact_number_needs_no_second_seed_and_another_one_does(mine, calls):
    table = mine.table("cpu", Forgetful(), ignored)
    assert words(mine, table) == [YES, YES, YES]
    off = Table(
        [exact("one", 2.6), exact("two", 4.0), sampled("seeded", [1]), sampled("seeded more", [9])],
        "",
    )
    assert words(mine, off) == [NO, YES, UNKNOWN]


def test_a_table_is_computed_once_whatever_it_is_compared_to(mine, calls, tmp_path):
    shelf = Shelf(tmp_path)
    first = mine.table("cpu", shelf, ignored)
    stricter = computation.read("other", TEXT.replace("within = 0.5", "within = 0.1"))
    assert stricter.table("cpu", shelf, ignored) == first
    assert len(calls) == 1
    assert words(stricter, first)[1] == NO
    mine.table("ci", shelf, ignored)
    assert [sizes.by for sizes in calls] == [2.0, 1.0]
    (kept, *_) = (tmp_path / "tables").glob("*/computation.json")
    assert json.loads(kept.read_text())["computation"] == "sums"


def test_a_table_that_was_cut_short_counts_as_none(mine, calls, tmp_path):
    shelf = Shelf(tmp_path)
    mine.table("cpu", shelf, ignored)
    (path,) = (tmp_path / "tables").glob("*/table.json")
    path.write_bytes(path.read_bytes()[:30])
    mine.table("cpu", shelf, ignored)
    assert len(calls) == 2


def test_another_code_computes_anew(mine, monkeypatch):
    before = mine.key("cpu")
    monkeypatch.setattr(computation, "sources_hash", lambda roots: "other")
    assert mine.key("cpu") != before


def test_its_facts_and_its_section_read_like_those_of_a_recipe_that_trains(mine, tmp_path):
    table = mine.table("cpu", Shelf(tmp_path), ignored)
    told = report.computed(mine, "cpu", table, mine.judged(table))
    assert told["verdict"] == YES
    assert told["rows"][0] == {
        "name": "one",
        "mean": 2.0,
        "error": None,
        "seeds": "exact",
        "values": [2.0],
    }
    text = report.markdown(told)
    assert text.startswith("### mine (cpu)\n\n**Reproduced.** Is it so?")
    assert "| twice: two | 4.5 | 4 | reproduced |" in text
    assert "| row | apples | ± SE | seeds |" in text
    assert "| seeded | 2 | 0.577 | 3 |" in text
    assert "- the value is 4, wanted 4 to 5\n" in text
    assert "four sums." in text


def test_tier_ci_has_no_verdict(mine, tmp_path):
    table = mine.table("ci", Shelf(tmp_path), ignored)
    told = report.computed(mine, "ci", table, mine.judged(table))
    assert told["verdict"] is None
    assert all(rule["verdict"] is None for rule in told["rules"])


def test_a_rule_about_a_row_that_is_not_there_says_which_is_near(calls, tmp_path):
    lost = computation.read("mine", TEXT.replace('rows = ["one", "two"]', 'rows = ["one", "tow"]'))
    with pytest.raises(Failure, match=r"no row 'tow'.*did you mean 'two'"):
        lost.judged(lost.table("cpu", Shelf(tmp_path), ignored))


def test_exact_rows_and_seeds_cannot_be_compared(calls, tmp_path):
    mixed = computation.read(
        "mine", TEXT.replace('rows = ["seeded", "seeded more"]', 'rows = ["one", "seeded"]')
    )
    with pytest.raises(Failure, match="cannot be compared"):
        mixed.judged(mixed.table("cpu", Shelf(tmp_path), ignored))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("quantity", "qantity", "did you mean 'quantity'"),
        (
            'computation = "sums"',
            'computation = "sum"',
            "there is no computation 'sum'; did you mean 'sums'",
        ),
        (
            "by = 2.0",
            "buy = 2.0",
            "mine.toml, tiers.cpu: buy: there is no such key; did you mean 'by'",
        ),
        ("by = 2.0", 'by = "two"', "by"),
        ("[tiers.cpu]\nby = 2.0\n", "", "mine has no tier 'cpu'"),
        ("paper = [2, 4.5]", "paper = [2]", "give each row one number"),
        ("paper = [2, 4.5]", 'paper = "2"', "`near` takes a list"),
        ("within = 0.5", "", "`near` takes a list"),
        ("within = 0.5", "within = 0.5\nlow = 1", "takes no limit but `within`"),
        ('"ordering"', '"bound"\nlow = 1', "bound compares 1 arms, not 2"),
        ('"ordering"', '"ordering"\nhigh = 1', "no limits"),
        ('"ordering"', '"optimum"', "optimum"),
        ("[[verdict]]", "[verdict]", "write it as [[verdict]]"),
    ],
)
def test_a_bad_recipe_is_refused_with_its_place_and_a_remedy(calls, before, after, said):
    assert before in TEXT
    text = (
        TEXT.replace(before, after) if before == "[[verdict]]" else TEXT.replace(before, after, 1)
    )
    text = text.partition("[verdict]")[0] + "[verdict]\n" if before == "[[verdict]]" else text
    with pytest.raises(Usage) as error:
        computation.read("mine", text).parameters("cpu")
    assert said in str(error.value)


COMPUTED = [
    name for name in recipe.names() if isinstance(recipe.load(name), computation.Computation)
]


def test_each_computation_has_a_recipe():
    assert {recipe.load(name).computation for name in COMPUTED} == set(COMPUTATIONS)


@pytest.mark.parametrize("name", COMPUTED)
def test_each_shipped_one_is_computed_in_tier_ci_and_has_every_row_that_it_judges(
    farflock, tmp_path, name
):
    code, out, err = farflock("reproduce", name, "--tier", "ci", "--json", "--folder", tmp_path)
    assert code == 0, err
    told = json.loads(out)
    assert told["verdict"] is None
    assert {path.name for path in (tmp_path / name / "ci").iterdir()} == {"result.json", "table.md"}
    known = {row["name"] for row in told["rows"]}
    assert all(set(rule["arms"]) <= known for rule in told["rules"])


def test_a_dry_run_prints_the_configuration_and_computes_nothing(farflock, tmp_path):
    code, out, _ = farflock("reproduce", "depth", "--dry-run", "--json", "--folder", tmp_path)
    told = json.loads(out)
    assert code == 0
    assert told["parameters"]["stages"] == 8
    assert len(told["hash"]) == 64
    assert list(tmp_path.iterdir()) == []
