"""Real nodes that are all killed go on together, in whichever order they start again."""

import pytest
from worlds.waiting import until_real

from farflock.node.run.manifest import resolve

pytestmark = pytest.mark.net

TWO = resolve(
    {
        "run": {"name": "back", "total_tokens": 10**9},
        "model": {"preset": "tiny"},
        "train": {"batch": 1, "seq": 16},
        "method": {"name": "diloco", "options": {"period": 20}},
        "exchange": {"view_s": 2.0, "deadline_s": 5.0, "start_peers": 2},
    }
)


def has_rounds_of_two(node, more):
    def made():
        return [event for event in node.events("round") if event["peers"] == 2]

    before = len(made())
    until_real(lambda: len(made()) >= before + more, "rounds of two", node.told)


def test_two_nodes_come_back_after_both_were_killed_the_joiner_first(run):
    first = run.found(TWO), run.join("joiner")
    for node in first:
        has_rounds_of_two(node, 3)
    # a state on a disk of each
    until_real(
        lambda: all(list(node.folder.glob("checkpoints/step-*")) for node in first), "states"
    )
    for node in first:
        node.kill()
    joiner = run.join("joiner")
    joiner.reaches(
        lambda status: status["pid"] == joiner.process.pid and "waits for" in status["doing"]
    )
    founder = run.start("founder", "run", run.folder / "run.toml")
    for node in (founder, joiner):
        has_rounds_of_two(node, 2)
    branches = [tuple(node.status()["branch"]) for node in (founder, joiner)]
    assert branches[0] == branches[1]
