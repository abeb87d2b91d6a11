"""`farflock invite` signs what was asked for with the node's key, and says why it cannot."""

import json
import time

import msgspec
import pytest

from farflock.node.run.invite import Invite, grant_of, mint, parse
from farflock.swarm.capability import shown
from farflock.swarm.identity import Identity

DOOR = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
OWNER = Identity.from_seed(bytes(32))


@pytest.fixture
def folder(tmp_path, a_status):
    """The folder of a node that has shown its standing invite, which is over by now."""
    tmp_path.chmod(0o700)
    OWNER.save(tmp_path / "identity.key")
    bare = Invite("ab" * 16, OWNER.peer, (DOOR,), int(time.time()) - 10)
    standing = mint(grant_of(OWNER, bare, 64, 64, bytes(32)))
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(a_status(standing)))
    return tmp_path


def made(farflock, folder, *words):
    code, out, err = farflock("invite", "--folder", folder, "--json", *words)
    assert code == 0, err
    facts = json.loads(out.splitlines()[-1])
    return facts, parse(facts["invite"], time.time())


@pytest.mark.parametrize(
    ("words", "uses", "votes", "lasts_s"),
    [
        ((), 1, 1, 7 * 86400),
        (("--uses", "10", "--expires", "12h"), 10, 0, 12 * 3600),
        (("--uses", "0", "--expires", "30m"), 0, 0, 1800),
        (("--uses", "3", "--votes", "2"), 3, 2, 7 * 86400),
        (("--votes", "0"), 1, 0, 7 * 86400),
    ],
)
def test_the_invite_says_what_was_asked_for_under_the_nodes_signature(
    farflock, folder, words, uses, votes, lasts_s
):
    facts, invite = made(farflock, folder, *words)
    assert (facts["uses"], facts["votes"]) == (uses, votes)
    assert (invite.addresses, invite.founder) == ((DOOR,), OWNER.peer)
    joiner = Identity.from_seed(bytes([1]) * 32).peer
    capability = shown(invite.run, joiner, invite.ticket.request(invite.run, joiner, b"record"))
    assert (capability.issuer, capability.uses, capability.votes) == (OWNER.peer, uses, votes)
    assert 0 <= time.time() + lasts_s - capability.expires < 60


def test_each_invite_is_counted_apart(farflock, folder):
    secrets = {made(farflock, folder)[1].grant.secret for _ in range(3)}
    assert len(secrets) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--uses", "1", "--votes", "2"), "2 is more than 1 peers can have"),
        (("--expires", "7"), "write it as 12h or 7d"),
        (("--expires", "400d"), "write it as 12h or 7d"),
        (("--expires", "0m"), "write it as 12h or 7d"),
        (("--uses", "-1"), "--uses"),
        (("--uses", "65537"), "--uses"),
    ],
)
def test_an_impossible_wish_is_refused_in_words(farflock, folder, words, said):
    code, _, err = farflock("invite", "--folder", folder, *words)
    assert code == 2
    assert said in err


def test_a_node_that_may_not_invite_says_so(farflock, folder, a_status):
    (folder / "status.json").write_bytes(msgspec.json.encode(a_status("")))
    code, _, err = farflock("invite", "--folder", folder)
    assert code == 1
    assert "this node may not invite" in err
    assert "ask the founder" in err


def test_a_folder_without_a_node_is_named(farflock, tmp_path):
    code, _, err = farflock("invite", "--folder", tmp_path / "none")
    assert code == 1
    assert "no node has run in" in err
