"""`farflock join` reads an invite before anything else, and says what is wrong with it."""

import json
import time

import pytest

from farflock.node.invite import Invite, mint

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
ADDRESS = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


def invite(lasts_s):
    return mint(Invite("ab" * 16, PEER, (ADDRESS,), int(time.time() + lasts_s)))


def test_a_dry_run_says_where_the_invite_leads_and_makes_nothing(farflock, tmp_path):
    code, out, _ = farflock("join", invite(60), "--dry-run", "--json")
    assert code == 0
    assert json.loads(out) == {"run": "ab" * 16, "founder": PEER, "addresses": [ADDRESS]}
    assert not list(tmp_path.iterdir())


def test_for_people_a_dry_run_is_a_line_for_each_fact(farflock):
    _, out, _ = farflock("join", invite(60), "--dry-run")
    assert f"run: {'ab' * 16}" in out.splitlines()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hello", "does not begin with 'farflock:'"),
        (invite(60)[:-3], "cut or mistyped"),
        (invite(-7200), "expired: 2."),
    ],
)
def test_a_wrong_invite_is_a_usage_error_of_one_sentence(farflock, text, named):
    code, out, err = farflock("join", text)
    assert (code, out) == (2, "")
    assert named in err
    assert len(err.splitlines()) == 1
