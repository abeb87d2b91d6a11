"""Voters of a run, in processes of their own, are killed and started again: its rounds go on."""

import json
import time

import pytest

from farflock.node.run.manifest import resolve

pytestmark = [pytest.mark.net, pytest.mark.ci_more, pytest.mark.timeout(300, method="signal")]

STEP_S = 0.03
SOON_S = 60.0
MANIFEST = {
    "run": {"name": "back", "seed": 1, "total_tokens": 100_000_000},
    "model": {"preset": "tiny"},
    "train": {"batch": 2, "seq": 16},
    "method": {"name": "diloco", "options": {"period": 10}},
    "exchange": {"view_s": 1.0, "deadline_s": 8.0},
}
FOUNDER_ALONE = {"vote_after": 255, "vote_at_once_below": 1}


def rounds(node, since_s):
    """The participants of the rounds that this node has applied since then."""
    lines = (node.folder / "receipts.jsonl").read_text().splitlines(keepends=True)
    receipts = [json.loads(line) for line in lines if line.endswith("\n")]
    return [set(each["participants"]) for each in receipts if each["time_s"] > since_s]


def go_on(nodes, since_s):
    """Wait until each of these nodes has applied a round with all of them, within a minute."""
    peers = {node.comes_in()["peer"] for node in nodes}
    for node in nodes:
        node.reaches(lambda _, node=node: any(peers <= each for each in rounds(node, since_s)))
    assert time.time() - since_s < SOON_S
    assert {node.status()["branch"] for node in nodes} == {None}


def grown(run, **trust):
    run.brake(STEP_S)
    founder = run.found(resolve({**MANIFEST, "trust": {"level": "trusted", **trust}}))
    nodes = [founder, run.join("one"), run.join("two")]
    for node in nodes:
        node.comes_in()
    go_on(nodes, time.time())
    return nodes


def test_the_only_voter_is_killed_and_comes_back(run):
    founder, one, two = grown(run, **FOUNDER_ALONE)
    me = founder.status()["peer"]
    assert founder.reaches(lambda status: len(status["members"]) == 3)["voters"] == [me]
    founder.kill()
    time.sleep(2)
    since_s = time.time()
    back = run.start("founder", "run", run.folder / "run.toml")
    go_on([back, one, two], since_s)
    assert not back.events("resumed"), "it took the others' state, not its checkpoint"
    for node in (one, two):
        (event,) = node.events("refounded")
        assert not event["state_lost"]


def test_two_of_three_voters_are_killed_and_come_back(run):
    founder, one, two = grown(run)
    founder.reaches(lambda status: len(status["voters"]) == 3)
    for node in (one, two):
        node.kill()
    since_s = time.time()
    back = [run.join("one"), run.join("two")]
    go_on([founder, *back], since_s)
