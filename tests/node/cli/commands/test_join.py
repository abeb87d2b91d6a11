"""`farflock join` reads an invite before anything else, and says what is wrong with it."""

import json
import time

import pytest

from farflock.node.run.invite import Invite, founder_of, mint
from farflock.swarm.contact import Contact
from farflock.swarm.dht import daemon

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
RUN = "ab" * 16
MEMBER = Contact(PEER, bytes(32), "127.0.0.1", 9, 9, 9)


def invite(lasts_s):
    return mint(Invite(RUN, founder_of(PEER), (MEMBER,), "a run", int(time.time() + lasts_s)))


@pytest.mark.net
def test_a_dry_run_of_a_run_that_no_peer_answers_for_says_so_and_makes_nothing(
    farflock, tmp_path, monkeypatch
):
    monkeypatch.setattr(daemon, "DOOR_WAITS_S", (0.1, 0.1, 0.1))
    code, out, _ = farflock("join", invite(60), "--dry-run", "--json")
    assert code == 1
    assert "could be reached; check this machine's network" in json.loads(out)["error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hello", "does not begin with 'farflock:'"),
        (invite(60)[:-4], "cut or mistyped"),
        (invite(-7200), "expired 2."),
    ],
)
def test_a_wrong_invite_is_a_usage_error_of_one_sentence(farflock, text, named):
    code, out, err = farflock("join", text)
    assert (code, out) == (2, "")
    assert named in err
    assert len(err.splitlines()) == 1


def test_without_an_invite_it_goes_on_with_the_last_run_and_says_which(
    farflock, tmp_path, monkeypatch, stopped
):
    folder = stopped(RUN)
    (folder / "members.txt").write_text(invite(-7200))
    asked = []
    monkeypatch.setattr(
        "farflock.node.cli.commands.join._look",
        lambda out, machine, invited, assumed: asked.append((machine.folder.path, invited)) or 0,
    )
    code, out, err = farflock("join", "--dry-run")
    assert (code, err) == (0, "")
    assert out == f"going on with the last run, {RUN} a run\n"
    ((place, invited),) = asked
    assert (place, invited.run, invited.members) == (folder, RUN, (MEMBER,))
