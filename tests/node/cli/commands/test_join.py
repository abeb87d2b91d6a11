"""`farflock join` reads an invite before anything else, and says what is wrong with it."""

import json
import time

import pytest

from farflock.node.run.invite import Invite, grant_of, mint
from farflock.swarm.identity import Identity

FOUNDER = Identity.from_seed(bytes(32))
PEER = FOUNDER.peer
ADDRESS = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


def invite(lasts_s):
    bare = Invite("ab" * 16, PEER, (ADDRESS,), int(time.time() + lasts_s))
    return mint(grant_of(FOUNDER, bare, 1, 0, bytes(32)))


@pytest.mark.net
def test_a_dry_run_of_a_run_that_no_peer_answers_for_says_so_and_makes_nothing(farflock, tmp_path):
    code, out, _ = farflock("join", invite(60), "--dry-run", "--json")
    assert code == 1
    assert "could be reached; check this machine's network" in json.loads(out)["error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hello", "does not begin with 'farflock:'"),
        (invite(60)[:-3], "cut or mistyped"),
        (invite(-7200), "expired 2."),
    ],
)
def test_a_wrong_invite_is_a_usage_error_of_one_sentence(farflock, text, named):
    code, out, err = farflock("join", text)
    assert (code, out) == (2, "")
    assert named in err
    assert len(err.splitlines()) == 1
