"""`farflock status` shows the status that a node wrote, and says so if there is none."""

import json

import msgspec
import pytest
from worlds.peers import node_status

from farflock.node.assembly.learnt import LearntTerms, shown
from farflock.node.cli.commands.status import _seen
from farflock.node.process.inspect_run import PAIRED, MemberInspection, RunInspection
from farflock.node.process.status import PartnerStatus, Status, Waiting
from farflock.node.run.manifest import load
from farflock.node.simulate.chaos_methods import ARMS
from farflock.optimizers.method import RandomGroups

STATUS = node_status(
    pid=1,
    peer="12D3KooWme",
    step=12,
    tokens=600,
    total_tokens=1200,
    view=3,
    members=("12D3KooWme", "12D3KooWother"),
    partners=(PartnerStatus("12D3KooWother", "suspect", "direct", None),),
    waits=(Waiting("pairs", 5, ("12D3KooWother",), 4.2),),
    sent_bytes=1234567,
    received_bytes=10,
)


@pytest.fixture
def node(tmp_path):
    """The folder of a node that wrote its status."""
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(STATUS))
    return tmp_path


def test_status_says_how_far_the_run_is_and_whom_it_waits_for(farflock, node):
    code, out, _ = farflock("status", "--folder", node)
    assert code == 0
    assert "50.0% of 1,200 tokens" in out
    assert "sent 1,234,567 bytes" in out
    assert "waits for ooWother (pairs, round 5, 4 s left)" in out


def test_status_says_where_outer_state_is_if_not_on_the_cpu(farflock, node):
    assert "outer state" not in farflock("status", "--folder", node)[1]
    there = msgspec.structs.replace(STATUS, exchanges="cuda:0, ecsq:98 on the CPU")
    (node / "status.json").write_bytes(msgspec.json.encode(there))
    _, out, _ = farflock("status", "--folder", node)
    assert "outer state and exchanges: cuda:0, ecsq:98 on the CPU" in out


def test_status_says_whom_a_node_serves(farflock, node):
    served = PartnerStatus(
        "12D3KooWother", "alive", "direct", 3.0, sent_bytes=3_400_000, relayed_bytes=1_000_000
    )
    there = msgspec.structs.replace(STATUS, partners=(served,))
    (node / "status.json").write_bytes(msgspec.json.encode(there))
    _, out, _ = farflock("status", "--folder", node)
    assert "  ooWother  alive    direct    3 ms  sent 3.4 MB, forwarded 1.0 MB" in out


def test_status_says_who_draws_the_same_data(farflock, node):
    assert "the same data" not in farflock("status", "--folder", node)[1]
    twin = PartnerStatus("12D3KooWother", "alive", "direct", 3.0, twin=True, slow="line")
    there = msgspec.structs.replace(STATUS, partners=(twin,))
    (node / "status.json").write_bytes(msgspec.json.encode(there))
    _, out, _ = farflock("status", "--folder", node)
    assert "  ooWother  alive    direct    3 ms  draws the same data as this node" in out
    assert "  is slower than it was: its line" in out


def test_status_for_programs_is_the_whole_of_it(farflock, node):
    _, out, _ = farflock("status", "--folder", node, "--json")
    said = json.loads(out)
    assert msgspec.convert(said, Status) == STATUS
    assert said["running"] is False


def test_before_the_first_step_there_is_no_loss_to_show(farflock, node):
    _, out, _ = farflock("status", "--folder", node)
    assert "None" not in out
    assert "no step yet" in out
    assert "no round applied yet" in out


def test_a_node_that_trains_shows_loss_pace_and_rounds_and_that_it_lives(
    farflock, node, monkeypatch
):
    training = msgspec.structs.replace(
        STATUS,
        loss=2.34567,
        tokens_per_s=1234.5,
        rounds={"ok": 3, "partial": 1},
        last_round=3,
        doing="trains",
    )
    (node / "status.json").write_bytes(msgspec.json.encode(training))
    monkeypatch.setattr("farflock.node.cli.commands.status.is_node", lambda pid: pid == 1)
    lines = farflock("status", "--folder", node)[1].splitlines()
    assert lines[0] == "process 1 trains"
    assert "step 12, loss 2.346, 1,234 tokens/s" in lines
    assert "rounds applied: 3 ok, 1 partial; the last is number 3" in lines


def test_what_a_dead_node_wrote_last_is_called_that(farflock, node):
    assert farflock("status", "--folder", node)[1].startswith(
        "the node is not running; this is its last status"
    )


def test_a_round_that_is_overdue_is_said_to_be_late(farflock, node):
    late = msgspec.structs.replace(STATUS, waits=(Waiting("delta", 5, (), -3.2),))
    (node / "status.json").write_bytes(msgspec.json.encode(late))
    assert (
        "waits for the decision (delta, round 5, 3 s late"
        in farflock("status", "--folder", node)[1]
    )


def test_a_newcomer_that_is_no_member_yet_is_shown_as_one(farflock, node, monkeypatch):
    newcomer = msgspec.structs.replace(STATUS, is_member=False)
    (node / "status.json").write_bytes(msgspec.json.encode(newcomer))
    assert "not a member yet" not in farflock("status", "--folder", node)[1], "it has ended"
    monkeypatch.setattr("farflock.node.cli.commands.status.is_node", lambda pid: True)
    assert "not a member yet" in farflock("status", "--folder", node)[1]


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_without_a_status_it_says_so_and_what_to_do(farflock, tmp_path, content):
    if content is not None:
        (tmp_path / "status.json").write_bytes(content)
    code, out, err = farflock("status", "--folder", tmp_path, "--json")
    assert code == 1
    assert json.loads(out)["exit_code"] == 1
    assert "--folder" in err


def test_the_folder_in_the_users_data_is_looked_at_unless_another_is_named(farflock, tmp_path):
    folder = tmp_path / "home" / "node"
    folder.mkdir(parents=True)
    (folder / "status.json").write_bytes(msgspec.json.encode(STATUS))
    assert farflock("status")[0] == 0


def test_a_node_on_a_branch_says_which_and_since_when(farflock, node):
    apart = msgspec.structs.replace(STATUS, branch=("0badcafe", 17))
    (node / "status.json").write_bytes(msgspec.json.encode(apart))
    assert "on branch 0badcafe since round 17" in farflock("status", "--folder", node)[1]


def test_an_invite_that_is_none_is_refused_before_anything_is_opened(farflock, tmp_path):
    code, _, err = farflock("status", "farflock:abc", "--folder", tmp_path / "x")
    assert code == 2
    assert "invite" in err
    assert not (tmp_path / "x").exists()


def test_a_run_seen_from_outside_is_told_in_lines(manifest):
    text = load(manifest).canonical()
    terms = shown(LearntTerms("ab" * 16, "12D3KooWhere", text, b"", ()))
    members = (
        MemberInspection("12D3KooWhere", ("/ip4/192.0.2.7/tcp/4001",), True, 12.4),
        MemberInspection("12D3KooWgone", (), False, None),
    )
    said = _seen(
        "ab" * 16, RunInspection("founder", text.decode(), terms, 4, "0badcafe", members)
    ).splitlines()
    assert said[1] == "members: 2, answering: 1 (view 4, on branch 0badcafe)"
    assert said[2].split() == ["D3KooWhere"[-8:], "12", "ms", "/ip4/192.0.2.7/tcp/4001"]
    assert "does not answer" in said[3]


def test_a_folder_in_which_no_node_has_run_is_called_that(farflock, tmp_path):
    _, _, err = farflock("status", "--folder", tmp_path)
    assert f"no node has run in {tmp_path}; start one with `farflock join INVITE`" in err


def test_a_visitor_knows_the_methods_whose_members_have_weights_of_their_own():
    firsts = {arm.method: arm.streams()[:1] for arm in ARMS}
    paired = {
        name
        for name, first in firsts.items()
        if any(isinstance(stream.group, RandomGroups) for stream in first)
    }
    assert paired == {*PAIRED}
