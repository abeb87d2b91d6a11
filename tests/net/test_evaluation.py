"""Real processes evaluate the run that they train: all of them, and a visitor, have one value."""

import json
import subprocess

import pytest
from worlds.node_processes import COMMAND, FOREVER, ROOT, SEQ, SEQUENCES
from worlds.waiting import output_of, until_real

from farflock.node.run.manifest import resolve

pytestmark = pytest.mark.net

EVERY = 3
MANIFEST = {
    "run": {"name": "evaluated", "seed": 1, "total_tokens": FOREVER * SEQUENCES * SEQ},
    "model": {"preset": "tiny"},
    "train": {"batch": SEQUENCES, "seq": SEQ},
    "method": {"name": "diloco", "options": {"period": 4}},
    "exchange": {"view_s": 1.0, "start_peers": 2, "deadline_s": 10.0},
    "evaluation": {"every": EVERY, "sequences": 32},
}


def values(node):
    """The values that a node knows, by round and member."""
    return {
        (event["round"], event["by"]): (event["loss"], event["standard_error"], event["tokens"])
        for event in node.events("evaluation")
    }


def test_two_members_and_a_visitor_have_the_same_values_and_a_sample(run, nursery):
    run.brake(0.05)
    founder = run.found(resolve(MANIFEST))
    mate = run.join("mate")

    def common():
        """The values that both know, of three rounds or more."""
        both = values(founder).keys() & values(mate).keys()
        return both if len({number for number, _ in both}) >= 3 else None

    both = until_real(
        common, "values of three rounds at both", lambda: founder.told() + mate.told()
    )
    assert all(values(founder)[place] == values(mate)[place] for place in both)
    seen = [node.reaches(lambda status: status["evaluation"]) for node in (founder, mate)]
    first = values(founder)[0, seen[0]["peer"]]
    assert 5.0 < first[0] < 6.2, "random weights on bytes"
    assert values(founder)[max(both)][0] < first[0], "it has learnt something"
    shown = seen[0]["evaluation"]
    assert shown["sample"]
    assert shown["bits_per_byte"] == pytest.approx(shown["loss"] / 0.6931, rel=1e-3)
    assert all(not status["evaluation"]["difference"] for status in seen)

    words = [*COMMAND, "status", run.invite, "--folder", str(run.folder / "visitor"), "--json"]
    visitor = nursery.popen(words, cwd=ROOT, stdout=subprocess.PIPE)
    said = output_of(visitor, "the visitor")
    assert visitor.returncode == 0
    found = json.loads(said.splitlines()[-1])["evaluation"]
    assert values(founder)[found["round"], found["by"]][0] == found["loss"]

    before, late = values(founder), run.join("late")
    until_real(lambda: before.keys() <= values(late).keys(), "the values from before", late.told)
    assert all(values(late)[place] == value for place, value in before.items())
    assert late.reaches(lambda status: status["evaluation"])
    for node in (late, mate, founder):
        node.leaves()
