"""Three honest nodes and a hostile one, each in a process of its own, with a real directory.

Under each attack of tests/adversaries/hostile.py the rounds of the three go on, none of them ends,
and whoever they say lies is the attacker.
"""

import itertools
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from worlds.node_processes import COMMAND, ROOT, invite_file

from farflock.node.run.manifest import resolve

pytestmark = [pytest.mark.net, pytest.mark.timeout(240, method="signal")]

HOSTILE = ROOT / "tests" / "adversaries" / "hostile.py"
HONEST = 3
WITHIN_S = 10.0  # of the attack's start, and of any round, there is a round of all honest nodes
LASTS_S = 15.0  # how long the attack is watched; the directory is read once in this time
STEP_S = 0.03
MANIFEST = {
    "run": {"name": "attacked", "seed": 1, "total_tokens": 100_000_000},
    "model": {"preset": "tiny"},
    "train": {"batch": 2, "seq": 16},
    "method": {"name": "diloco", "options": {"period": 10}},
    "exchange": {"view_s": 1.0, "deadline_s": 8.0},
}
# What honest nodes say of the attacker (nothing if no member has to lie for the attack), and what
# each counts because of the attack.
UNSIGNED = "a decision that no quorum has signed"
DROPPED = "a view without a member that promised and did not leave"
BEYOND = "more tokens than its line can have trained"
INSIDE = {
    "tokens": ({"offer above its entitlement"}, {"dropped: bad frame"}),
    "record": (set(), {"dropped: bad record"}),
    "void": ({UNSIGNED}, {f"refused: {UNSIGNED}"}),
    "hijack": ({BEYOND}, {"dropped: branch of a line that has its quorum"}),
    # A proposal shows the promises of a quorum: one that it drops may not be among them.
    "evict-by-proposal": ({DROPPED}, {f"refused: {DROPPED}", "views not signed yet"}),
}


class Attacked:
    """A run of honest nodes, its rounds as they wrote them down, and the hostile process."""

    def __init__(self, run, nursery):
        self.run, self.nursery, self.hostile = run, nursery, None
        run.brake(STEP_S)
        self.honest = [run.found(resolve(MANIFEST))]
        self.let_in(HONEST - 1)
        self.train(rounds=2)
        grown = self.honest[0].reaches(lambda status: len(status["members"]) == HONEST)
        self.members = grown["members"]

    def let_in(self, count):
        """Start more honest nodes, and wait until they are members."""
        newcomers = [self.run.join(f"honest-{len(self.honest) + each}") for each in range(count)]
        self.honest += newcomers
        for node in newcomers:
            node.comes_in()

    @property
    def peers(self):
        return {node.status()["peer"] for node in self.honest}

    def rounds(self, node, since_s=0.0):
        """When this node applied rounds with all honest nodes in them."""
        lines = (node.folder / "receipts.jsonl").read_text().splitlines(keepends=True)
        receipts = [json.loads(line) for line in lines if line.endswith("\n")]
        assert all(entry["signers"] and entry["proposer"] for entry in receipts)
        of_all = [entry for entry in receipts if self.peers <= set(entry["participants"])]
        return [entry["time_s"] for entry in of_all if entry["time_s"] > since_s]

    def train(self, rounds, since_s=0.0):
        """Wait until each honest node has applied so many rounds with all of them."""
        for node in self.honest:
            node.reaches(lambda _, node=node: len(self.rounds(node, since_s)) >= rounds)

    def begin(self, attack):
        """Start the hostile process; return when its attack began, and all peers that it is."""
        words = HOSTILE, attack, invite_file(self.run.folder, self.run.invite)
        folder = self.run.folder / "hostile"
        with (self.run.folder / "hostile.txt").open("wb") as log:
            self.hostile = self.nursery.popen(
                [sys.executable, *map(str, words), "--folder", str(folder)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        said = self.hostile.stdout.readline()
        assert said, (self.run.folder / "hostile.txt").read_text()[-2000:]
        begun = json.loads(said)
        return begun["time_s"], set(begun["peers"])

    def suspects(self):
        """By honest node, whom `farflock status` says it accuses, and of what."""
        with ThreadPoolExecutor() as threads:
            return list(threads.map(self._suspects_of, self.honest))

    def _suspects_of(self, node):
        words = [*COMMAND, "status", "--suspects", "--folder", str(node.folder)]
        options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        listed = json.loads(self.nursery.run([*words, "--json"], **options).stdout)["suspects"]
        shown = self.nursery.run(words, **options).stdout
        assert all(f"{each['peer']}  {each['what']}" in shown for each in listed)
        assert ("no peer has made a false statement" in shown) == (not listed)
        return {(each["peer"], each["what"]) for each in listed}

    def end(self):
        if self.hostile is not None:
            self.hostile.kill()
            self.hostile.wait(20)
            self.hostile.stdout.close()


@pytest.fixture
def attacked(run, nursery):
    made = Attacked(run, nursery)
    yield made
    made.end()


def rounds_go_on(attacked, since_s):
    """Watch the honest nodes: none waits long for a round with all of them, from here on."""
    ends_s = time.time() + LASTS_S
    time.sleep(LASTS_S)
    assert attacked.hostile.poll() is None, "the attack has ended"
    for node in attacked.honest:
        assert node.process.poll() is None, node.log[-2000:]
        status = node.status()
        assert (status["is_member"], status["branch"]) == (True, None)
        assert status["members"][:HONEST] == attacked.members, "some were out, and came back"
        moments = [since_s, *attacked.rounds(node, since_s)]
        waits_s = [after - before for before, after in itertools.pairwise(moments)]
        assert max(waits_s) < WITHIN_S, waits_s
        assert ends_s - moments[-1] < WITHIN_S, "the rounds have stopped"


def all_leave(attacked):
    """No honest node ends before it is told to, and then each ends in good order."""
    for node in attacked.honest:
        node.process.send_signal(signal.SIGTERM)
    for node in attacked.honest:
        code, said = node.ends()
        assert (code, said["ended"]) == (0, "left"), node.log[-2000:]


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param("tokens", marks=pytest.mark.ci_more),
        pytest.param("record", marks=pytest.mark.long),
        pytest.param("void", marks=pytest.mark.long),
        pytest.param("evict-by-proposal", marks=pytest.mark.long),
        pytest.param("hijack", marks=pytest.mark.long),
    ],
)
def test_three_members_train_on_beside_one_that_attacks_and_name_nobody_else(attacked, attack):
    what, traces = INSIDE[attack]
    begun_s, hostile = attacked.begin(attack)
    rounds_go_on(attacked, begun_s)
    suspects = attacked.suspects()
    assert {each for said in suspects for _, each in said} == what
    for node, said in zip(attacked.honest, suspects, strict=True):
        assert traces & node.status()["dropped"].keys(), "the attack has not reached it"
        assert len(traces) > 1 or {each for _, each in said} == what
        assert {peer for peer, _ in said} <= hostile
        events = node.events("accused")
        assert {(each["peer"], each["what"]) for each in events} == said
    all_leave(attacked)


@pytest.mark.long
def test_a_newcomer_among_decoys_of_another_line_lands_in_the_run_and_names_them_alone(attacked):
    begun_s, hostile = attacked.begin("eclipse")
    rounds_go_on(attacked, begun_s)
    attacked.let_in(1)
    attacked.train(rounds=2)
    rounds_go_on(attacked, time.time())
    *members, newcomer = attacked.suspects()
    assert not any(members)
    assert {what for _, what in newcomer} == {"a false view"}, "it has met no decoy"
    assert {peer for peer, _ in newcomer} <= hostile
    all_leave(attacked)
