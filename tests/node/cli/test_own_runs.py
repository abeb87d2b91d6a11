"""Each run has a folder of its own; one is gone on with by the node that runs, or ran last."""

import os

import msgspec
import pytest
from worlds.peers import identity, node_status

from farflock.node.cli import own_runs as here
from farflock.node.cli.own_runs import (
    folder_of,
    folder_to_found,
    last_folder,
    last_invite,
    own_runs,
)
from farflock.node.errors import Failure, Usage
from farflock.node.run.head import run_id
from farflock.node.run.invite import Invite, founder_of, mint
from farflock.swarm.contact import Contact
from farflock.swarm.identity import Identity

FOUNDER = identity(0).peer
MEMBER = Contact(FOUNDER, bytes(32), "192.0.2.7", 4001, 4002)
ONE, OTHER = "a1" * 16, "b2" * 16


def invite(run):
    return mint(Invite(run, founder_of(FOUNDER), (MEMBER,), "plays", 0))


@pytest.fixture
def live(monkeypatch):
    """The processes that are nodes."""
    pids = set()
    monkeypatch.setattr(here, "is_node", pids.__contains__)
    return pids


@pytest.fixture
def ran(monkeypatch, tmp_path, live):
    """A function that leaves what a node of a run leaves behind."""
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path))
    drawn = map(identity, range(10))
    monkeypatch.setattr(here.Identity, "generate", lambda: next(drawn))

    def leave(run, pid, seen_s, folder=None):
        path = tmp_path / (folder or f"runs/{run}")
        path.mkdir(parents=True)
        status = node_status(pid=pid, run=run, invite=invite(run), step=7, tokens=7, total_tokens=7)
        (path / "status.json").write_bytes(msgspec.json.encode(status))
        os.utime(path / "status.json", (seen_s, seen_s))
        return path

    leave.home = tmp_path
    return leave


def test_a_run_is_found_again_also_in_the_folder_of_older_versions(ran):
    old = ran(OTHER, 1, 100.0, folder="node")
    assert folder_of(OTHER).path == old
    assert folder_of(ONE).path == ran.home / "runs" / ONE
    assert not folder_of(ONE).path.exists(), "naming it makes nothing"


def test_the_newest_is_the_first_and_has_its_name(ran):
    ran(ONE, 1, 100.0)
    ran(OTHER, 2, 200.0)
    assert [(own.run, own.name, own.seen_s) for own in own_runs()] == [
        (OTHER, "plays", 200.0),
        (ONE, "plays", 100.0),
    ]


def test_one_that_runs_comes_before_one_that_ran_later(ran, live):
    first, second = ran(ONE, 1, 100.0), ran(OTHER, 2, 200.0)
    assert last_folder().path == second
    live.add(1)
    assert last_folder().path == first
    live.add(2)
    with pytest.raises(Failure, match="several nodes run on this machine: b2b2b2b2, a1a1a1a1; nam"):
        last_folder()


def test_without_any_there_is_none_and_an_attempt_to_join_is_none(ran):
    (ran.home / "runs" / ONE).mkdir(parents=True)
    with pytest.raises(Failure, match=f"no node has run in {ran.home}; start one"):
        last_folder()
    identity(0).save(folder_of(ONE).identity)
    with pytest.raises(Usage, match="no invite given; paste the word"):
        last_invite()
    assert [(own.run, own.status, own.pid, own.name) for own in own_runs()] == [
        (ONE, None, None, "")
    ]


def test_the_last_run_is_joined_again_by_the_members_that_it_knew_however_long_ago(ran, live):
    path = ran(ONE, 1, 100.0)
    with pytest.raises(Failure, match=r"cannot be joined again: no other member .* `farflock run"):
        last_invite()
    (path / "members.txt").write_text(invite(ONE))
    own, found = last_invite()
    assert (own.folder.path, found.run, found.members) == (path, ONE, (MEMBER,))
    live.add(1)
    with pytest.raises(Failure, match=f"run {ONE} has a node here already: process 1; see"):
        last_invite()


def test_a_founders_folder_is_named_after_its_run_and_found_again_by_the_same_manifest(ran):
    def of(text):
        return lambda peer: run_id(text, peer)

    first = folder_to_found(of(b"plays"))
    assert first.path.name == run_id(b"plays", Identity.load(first.identity).peer)
    assert folder_to_found(of(b"novels")).path != first.path
    assert folder_to_found(of(b"plays")).path == first.path
    (first.path / "identity.key").write_bytes(b"damaged")
    assert folder_to_found(of(b"plays")).path != first.path
