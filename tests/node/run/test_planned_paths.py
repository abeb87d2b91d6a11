"""Planned paths in the manifest: read, written, and made from measured hosts.

A plan that no run can follow is refused by name.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run import planned_paths
from farflock.node.run.composition import Uncomposable
from farflock.node.run.manifest import load, parse, resolve
from farflock.node.run.planned_paths import (
    MAX_TEXT,
    HostTerms,
    kinds_of,
    plan_of_texts,
    planned,
    require_plan,
    texts_of,
)
from farflock.node.run.policies import shares_of
from farflock.node.run.sections import MAX_LINE_CHARS
from farflock.swarm.identity import Identity
from farflock.swarm.paths.skippipe import BadPlan, Stop

LAYERS = (1, 2, 2, 1)
GOOD = [["0:0 1:1 3:0", "0:1 2:0 3:1"], ["0:1 1:0 3:1", "0:0 2:1 3:0"]]
PEER = Identity.from_seed(bytes(32)).peer
EQUAL = {"visited": 3, "forward_s": [[0.1, 0.1]] * 4, "line_s": [[0.05, 0.05]] * 4}


def share_of(manifest, stage):
    pipeline = manifest.pipeline_plan()
    return shares_of(pipeline.policy, pipeline.layers, pipeline.paths)[stage]


def resolved(plan, layers=LAYERS, **pipeline):
    terms = (
        {"stages": list(layers), "policy": "planned"}
        | pipeline
        | ({} if plan is None else {"plan": plan})
    )
    model = {"preset": "demo", "tied": False, "layers": sum(layers)}
    return resolve({"model": model, "data": {"sha256": "0" * 64}, "pipeline": terms})


# reading and writing

stops = st.tuples(
    st.integers(0, 20),
    st.integers(0, 30) | st.binary(min_size=32, max_size=32).map(Identity.from_seed),
)


@given(st.lists(st.lists(stops, min_size=1, max_size=6), min_size=1, max_size=5))
@settings(deadline=None)
def test_what_is_written_is_read_back(drawn):
    lane = [
        " ".join(f"{stage}:{who if isinstance(who, int) else who.peer}" for stage, who in path)
        for path in drawn
    ]
    plan = plan_of_texts([lane, lane])
    assert texts_of(plan) == [lane, lane]
    assert [[stop.stage for stop in path] for path in plan.lanes[0]] == [
        [stage for stage, _ in path] for path in drawn
    ]


@given(st.text(max_size=30) | st.from_regex(r"[0-9: ]{0,12}", fullmatch=True))
def test_any_text_is_a_path_that_is_written_the_same_or_refused(text):
    try:
        assert texts_of(plan_of_texts([[text]])) == [[text]]
    except BadPlan as error:
        assert error.rule == "stage's server"


def test_a_stop_is_a_place_or_a_peers_whole_id():
    (path,) = plan_of_texts([[f"0:0 1:{PEER} 2:13"]]).paths
    assert path == (Stop(0, "0:0"), Stop(1, PEER), Stop(2, "2:13"))
    for word in (
        "",
        "1",
        "1:",
        ":1",
        "01:1",
        "1:01",
        "1:100",
        "1:-1",
        "1:0x",
        f"1:{PEER[:-1]}",
        "1:\u0661",
        "1: 1",
    ):
        with pytest.raises(BadPlan, match="stage's server"):
            plan_of_texts([[word]])


# the manifest


def test_a_plan_is_spelt_out_and_survives_the_round_trip():
    manifest = resolved({"lanes": GOOD})
    assert manifest.pipeline.plan.servers == (2, 2, 2, 2)
    again = parse(manifest.canonical())
    assert again == manifest
    assert again.canonical() == manifest.canonical()
    paths = again.pipeline_plan().paths
    assert texts_of(paths) == GOOD
    assert [share_of(again, stage) for stage in range(4)] == [1, 0.5, 0.5, 1]
    other = [GOOD[0], GOOD[1][::-1]]
    assert resolved({"lanes": [["0:0 1:0 3:0", "0:0 2:0 3:0"]]}).hash() != manifest.hash()
    with pytest.raises(Uncomposable, match="'collision'"):
        resolved({"lanes": other})


def test_many_paths_make_no_line_that_a_joiner_would_refuse():
    lane = [f"0:{at % 30} {1 + at % 2}:0 3:0" for at in range(240)]
    text = resolved({"servers": [30, 1, 1, 1], "lanes": [lane]}).canonical()
    assert max(map(len, text.decode().splitlines())) < MAX_LINE_CHARS
    assert parse(text).pipeline.plan.lanes == (tuple(lane),)


def test_hosts_become_paths_in_which_no_host_is_named_any_more():
    slow = EQUAL | {"forward_s": [[0.1, 0.1], [0.1, 2.0], [0.1, 0.1], [0.1, 0.1]]}
    manifest = resolved(slow)
    text = manifest.canonical().decode()
    assert "forward_s" not in text
    assert manifest.pipeline.plan.servers == (2, 2, 2, 2)
    assert "1:0" in text
    assert "1:1 " not in text, "the slow host is a spare"
    assert resolved(slow) == manifest
    assert parse(text) == manifest


def test_the_run_that_is_shipped_can_be_started(pytestconfig):
    manifest = load(pytestconfig.rootpath / "experiments/runs/planned.toml")
    assert manifest.pipeline.plan.servers == (2, 2, 2, 2)
    assert parse(manifest.canonical()) == manifest


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=5),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=12, deadline=None)
def test_whatever_is_planned_keeps_to_every_rule(sizes, turns, swaps, skipped, chance):
    layers = (1,) * len(sizes)
    visited = max(len(sizes) - skipped, min(3, len(sizes)))
    rows = [
        tuple(tuple(chance.uniform(0.01, 1) for _ in range(size)) for size in sizes)
        for _ in range(2)
    ]
    hosts = HostTerms(visited=visited, forward_s=rows[0], line_s=rows[1], turns=turns, swaps=swaps)
    optional = len(sizes) - 2
    try:
        plan = planned(hosts, layers, seed=1)
        require_plan(plan, sizes, layers, batch=64)
    except BadPlan as error:  # fewer paths than stages
        assert error.rule == "stage balance"
        assert sizes[0] * turns * (visited - 2) < 2 * optional
    else:
        assert {tuple(sorted(paths, key=str)) for paths in plan.lanes} == {
            tuple(sorted(plan.lanes[0], key=str))
        }


def test_ends_are_of_another_kind_than_what_is_between():
    kinds = kinds_of((1, 2, 2, 3, 1))
    assert kinds[1] == kinds[2] != kinds[3]
    assert kinds[0] != kinds[4]
    assert kinds_of((4,))[0].takes == "tokens"
    assert kinds_of((4,))[0].gives == "logits"


# what is wrong

WRONG = [
    ([["1:0 2:0 3:0"]], "'first stage': a path visits stages [1, 2, 3]", "begin with stage 0"),
    ([["0:0 1:0 2:0"]], "'missing stage'", "whose output differs in kind"),
    ([["0:0 1:0 1:1 3:0"]], "'one visit'", "visit each stage at most once"),
    ([["0:0 1:0 3:0", "0:0 2:0 1:0 3:0"]], "'skip ratio'", "visit 3"),
    ([["0:0 3:0", "0:0"]], "'skip ratio'", "visit 2"),
    ([["0:0 1:0 3:0 2:0"]], "'swap of unequal stages'", "in their own order"),
    ([["0:0 1:0 4:0"]], '"stage\'s server": a path goes to 4:0', "plan again"),
    (
        [["0:0 1:1 3:0", "0:0 2:0 3:0"]],
        "goes to place 1 of stage 1, whose number of servers is 1",
        "number places from 0",
    ),
    (
        [[f"0:0 1:{PEER} 3:0", f"0:0 2:{PEER} 3:0"]],
        f"goes to {PEER} for stage 2, which it does not serve",
        "plan again",
    ),
    (
        [["0:0 1:0 3:0", "0:0 2:x 3:0"]],
        "'2:x' in the path '0:0 2:x 3:0' is not a stage with a server",
        "write a path as",
    ),
    (
        [["0:0 1:0 3:0"]],
        "'stage balance': no path visits stage 2",
        "put each stage on some paths",
    ),
    (
        [["0:0 1:0 3:0"], ["0:1 2:0 3:0"]],
        "'stage balance': lane 1 visits stage 1 0 times, and lane 0 1 times",
        "equally",
    ),
    (
        [["0:0 1:0 3:0"] * 5 + ["0:0 2:0 3:0"]],
        "'stage balance': stage 1 is visited 5 times by 6",
        "up to one visit",
    ),
    (
        [[f"0:0 {1 + (at > 9)}:0 3:0" for at in range(20)]],
        "visits stage 1 9 times on its first 9 paths, and 10 times on all 20",
        "mix the paths",
    ),
    (
        [["0:0 1:0 3:0", "0:0 2:0 3:0"]] * 2,
        "'collision': lanes 0 and 1 both begin path 0 at 0:0",
        "fewer lanes",
    ),
    ([["0:0 1:0 3:0", "0:0 2:0 3:0"], ["0:1 1:0 3:0"]], "'horizon'", "equally many paths"),
    ([[]], "pipeline.plan.lanes", "length >= 1"),
    ([["0:0 1:0 3:0", 7]], "pipeline.plan.lanes", "must be text"),
]


@pytest.mark.parametrize(("lanes", "says", "offers"), WRONG, ids=lambda given: str(given)[:40])
def test_a_plan_that_no_run_can_follow_is_refused_with_the_rule_and_what_is_possible(
    lanes, says, offers
):
    with pytest.raises(Usage) as refused:
        resolved({"lanes": lanes})
    assert says in str(refused.value)
    assert offers in str(refused.value)


@pytest.mark.parametrize(
    ("layers", "lane", "rule"),
    [
        ((1, 2, 1, 1), ["0:0 2:0 1:0 3:0"], "swap of unequal stages"),
        ((1, 1, 1, 1, 1), ["0:0 3:0 2:0 1:0 4:0"], "swap bound"),
        ((1, 1, 1, 1, 1, 1), ["0:0 2:0 1:0 4:0 3:0 5:0"], "swap bound"),
    ],
)
def test_only_equal_neighbours_change_places(layers, lane, rule):
    with pytest.raises(Uncomposable, match=f"'{rule}'"):
        resolved({"lanes": [lane]}, layers)
    resolved({"lanes": [["0:0 2:0 1:0 3:0"]]}, (1, 2, 2, 1))


def test_batches_are_whole_shares():
    lane = [
        f"0:0 {' '.join(f'{stage}:0' for stage in pair)} 4:0"
        for pair in itertools.combinations((1, 2, 3), 2)
    ]
    with pytest.raises(Uncomposable, match=r"'whole batches'.*set pipeline.batch to 18"):
        resolved({"lanes": [lane]}, (1, 1, 1, 1, 1))
    assert share_of(resolved({"lanes": [lane]}, (1, 1, 1, 1, 1), batch=18), 1) * 3 == 2


def test_a_plan_goes_with_its_policy_and_no_other():
    with pytest.raises(
        Usage,
        match=r"pipeline\.plan: policy planned has no paths to follow; "
        r"give paths in \[pipeline\.plan\]",
    ):
        resolved(None)
    with pytest.raises(
        Usage, match=r"pipeline\.plan: policy 'swarm' does not use the planned paths"
    ):
        resolved({"lanes": GOOD}, policy="swarm")


def test_a_plan_has_as_many_servers_as_a_run_may_have_and_fits_a_manifest():
    with pytest.raises(Uncomposable, match="64 servers and a trainer are more than the 64 members"):
        resolved({"servers": [16] * 4, "lanes": GOOD})
    with pytest.raises(Uncomposable, match="has servers for 3 stages, and the model has 4"):
        resolved({"servers": [2] * 3, "lanes": GOOD})
    lane = [f"0:{PEER} {1 + at % 2}:0 3:{PEER[::-1]}" for at in range(2)]
    with pytest.raises(Uncomposable, match="is not the id"):
        resolved({"lanes": [lane]})
    long = [[f"0:{at} {1 + turn % 2}:0 3:0" for turn in range(256)] for at in range(20)]
    with pytest.raises(
        Uncomposable, match=f"'horizon': the paths have .* and a manifest has room for {MAX_TEXT:,}"
    ):
        resolved({"lanes": long})


def test_too_many_hosts_are_refused_before_a_plan_is_made_for_them(monkeypatch):
    monkeypatch.setattr(planned_paths, "plan_paths", lambda *given: pytest.fail("it was planned"))
    rows = [[0.1] * 20] * 4
    with pytest.raises(Uncomposable, match="80 servers and a trainer are more than the 64 members"):
        resolved({"visited": 3, "forward_s": rows, "line_s": rows})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"visited": 5}, "'skip ratio': paths cannot visit 5 of 4 stages"),
        ({"visited": 0}, ">= 1"),
        (
            {"line_s": [[0.1]] * 4},
            "forward_s is given for [2, 2, 2, 2] hosts, line_s for [1, 1, 1, 1]",
        ),
        ({"forward_s": [[0.1, 0.1]] * 3, "line_s": [[0.1, 0.1]] * 3}, "there are 4 stages"),
        ({"forward_s": [[0.1, -1.0]] * 4}, ">= 0"),
        ({"forward_s": [[0.1, float("nan")]] * 4}, ">= 0"),
        ({"turns": 17}, "<= 16"),
        ({"turn": 2}, "unknown field `turn`"),
        ({"lanes": GOOD}, "pipeline.plan.visited: there is no such key"),
    ],
    ids=str,
)
def test_hosts_that_cannot_be_planned_are_refused(change, says):
    with pytest.raises(Usage) as refused:
        resolved(EQUAL | change)
    assert says in str(refused.value)


@pytest.mark.parametrize("plan", [[], "lanes", {}, {"lanes": {}}, {"lanes": [[["0:0"]]]}], ids=str)
def test_what_is_no_plan_at_all_is_refused(plan):
    with pytest.raises(Usage, match=r"pipeline\.plan"):
        resolved(plan)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("servers = [2, 2, 2, 2]", "servers = [2, 1, 2, 2]"),
        ("servers = [2, 2, 2, 2]", "servers = [2, 2, 2, 9223372036854775807]"),
        ("servers = [2, 2, 2, 2]\n", ""),
        ('"0:0 1:1 3:0"', '"0:0 1:1 3:0 "'),
        ('"0:0 1:1 3:0"', '"0:0 1:1 2:0"'),
        ('"0:0 1:1 3:0"', '"' + "0:0 " * 220 + '3:0"'),
    ],
)
def test_a_strangers_plan_that_cannot_be_followed_is_refused_by_the_joiner(old, new):
    text = resolved({"lanes": GOOD}).canonical().decode()
    assert text.count(old) == 1
    with pytest.raises(RefusedByRun):
        parse(text.replace(old, new))
