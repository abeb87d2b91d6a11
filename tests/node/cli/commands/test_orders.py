"""The founder's commands leave signed statements in its folder, in order, and refuse what is not
the founder's to state."""

import json
import time

import msgspec
import pytest

from farflock.node.process.statement_files import StatementFiles
from farflock.node.process.status import read_status
from farflock.node.run.invite import Invite, grant_of, mint
from farflock.node.state.paths import RunFolder
from farflock.swarm.identity import Identity
from farflock.swarm.statements import NONE, Statement, StatementLog, seal

RUN = "ab" * 16
DOOR = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
FOUNDER, MEMBER, OTHER = (Identity.from_seed(bytes([number]) * 32) for number in range(3))


@pytest.fixture
def folder(tmp_path, a_status):
    """The folder of a founder."""
    tmp_path.chmod(0o700)
    FOUNDER.save(tmp_path / "identity.key")
    bare = Invite(RUN, FOUNDER.peer, (DOOR,), int(time.time()) + 60)
    standing = mint(grant_of(FOUNDER, bare, 64, 64, bytes(32)))
    status = a_status(standing, run=RUN, members=(FOUNDER.peer, MEMBER.peer))
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(status))
    return tmp_path


def orders_in(folder):
    log = StatementLog(RUN, (FOUNDER.peer,))
    for blob in StatementFiles(RunFolder(folder), RUN).read():
        log.add(blob)
    return log


def test_each_command_leaves_the_next_statement(farflock, folder):
    calls = [
        ("ban", MEMBER.peer[-6:]),
        ("close",),
        ("promote", OTHER.peer, "--votes", "2"),
        ("open",),
    ]
    for number, words in enumerate(calls, 1):
        code, out, err = farflock(*words, "--folder", folder, "--json")
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["number"] == number
    orders = orders_in(folder).orders
    assert orders.banned == {MEMBER.peer}
    assert (orders.closed, orders.promoted) == (False, ((OTHER.peer, 2),))
    assert orders.newest[0] == 4
    assert (folder / "orders.json").stat().st_mode & 0o777 == 0o600


def test_the_newest_view_that_the_node_knows_is_anchored(farflock, folder):
    status = read_status(folder / "status.json")
    known = msgspec.structs.replace(status, view=12, view_hash="ab" * 32)
    (folder / "status.json").write_bytes(msgspec.json.encode(known))
    code, out, err = farflock("anchor", "--folder", folder, "--json")
    assert code == 0, err
    said = json.loads(out.splitlines()[-1])
    assert (said["kind"], said["view"], said["view_hash"]) == ("anchor", 12, "ab" * 32)
    assert orders_in(folder).orders.anchor == (12, bytes([0xAB]) * 32)
    assert "stated, 2: anchor view 12 (abababab)" in farflock("anchor", "--folder", folder)[1]


def test_where_the_node_knows_no_view_nothing_is_anchored(farflock, folder):
    code, _, err = farflock("anchor", "--folder", folder)
    assert code == 1
    assert "there is no view to anchor" in err
    assert not (folder / "orders.json").exists()


def test_a_statement_follows_those_that_the_node_has_heard_from_elsewhere(farflock, folder):
    heard = Statement(RUN, FOUNDER.peer, 1, NONE, "close")
    StatementFiles(RunFolder(folder), RUN).keep((seal(FOUNDER, heard),))
    assert farflock("ban", OTHER.peer, "--folder", folder)[0] == 0
    assert orders_in(folder).said == ("1: close", f"2: ban {OTHER.peer}")


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (FOUNDER.peer, "it is the founder itself"),
        ("Koo", "not the end of one member's"),
        ("xxxxxxxx", "not the end of one member's"),
        ("\x1b[2J", "not the end of one member's"),
        (OTHER.peer[-8:], "not the end of one member's"),
        ("", "not the end of one member's"),
    ],
)
def test_a_peer_that_is_not_named_is_refused(farflock, folder, peer, said):
    code, _, err = farflock("ban", peer, "--folder", folder)
    assert code == 2
    assert said in err
    assert "\x1b" not in err
    assert not (folder / "orders.json").exists()


def test_only_the_founder_states_anything(farflock, folder):
    (folder / "identity.key").unlink()
    MEMBER.save(folder / "identity.key")
    code, _, err = farflock("close", "--folder", folder)
    assert code == 1
    assert "only the run's founder can state this" in err


@pytest.mark.parametrize("content", [b"", b"[", b'{"run":"other","statements":["AA=="]}', b"\xff"])
def test_files_of_another_run_or_none_count_for_nothing(folder, content):
    (folder / "orders.json").write_bytes(content)
    (folder / "statements.json").write_bytes(content)
    assert StatementFiles(RunFolder(folder), RUN).read() == ()
