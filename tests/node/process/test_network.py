"""The way of a process into a swarm: everything that is prepared before a socket is opened."""

import json
import resource
from types import SimpleNamespace

import pytest

from farflock.node.errors import Failure
from farflock.node.process.network import (
    DESCRIPTORS,
    AddressCache,
    forward_for,
    identity_of,
    raise_descriptor_limit,
)
from farflock.node.run.invite import Invite, grant_of
from farflock.node.state.paths import RunFolder
from farflock.swarm.context import Entrance
from farflock.swarm.identity import Identity


@pytest.fixture
def limits():
    """Set this process's limit of open files; it is restored afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_low_limit_of_open_files_is_raised_as_far_as_it_may_be(limits):
    limits(256)
    raise_descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == (DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard))
    assert soft > 256


def test_a_limit_that_is_high_enough_is_left_alone(limits):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= DESCRIPTORS:
        pytest.skip(f"this machine allows {hard} open files at most")
    limits(DESCRIPTORS + 1)
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == DESCRIPTORS + 1


def test_a_folder_that_cannot_be_created_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Failure, match=r"folder .*file/node cannot be created: not a directory;"):
        identity_of(RunFolder(tmp_path / "file" / "node"))


RUN = "ab" * 16
ME, OTHER = (Identity.from_seed(bytes([seed]) * 32).peer for seed in (1, 2))
DOORS = tuple(f"/ip4/192.0.2.{last}/tcp/4001/p2p/{OTHER}" for last in (1, 2))


@pytest.fixture
def cache(tmp_path):
    return AddressCache(RunFolder(tmp_path))


def test_addresses_are_found_again_by_the_run_that_they_are_of(cache):
    known = Invite(RUN, ME, DOORS, 7)
    granted = grant_of(Identity.from_seed(bytes(32)), known, 1, 1, bytes(32))
    for each in (known, granted):
        cache.write(each)
        assert cache.read(RUN) == each
    assert cache.read("cd" * 16) is None


@pytest.mark.parametrize(
    "bad",
    [
        "not an address \x1b[31m",
        DOORS[0] + "\n",
        "/ip4/192.0.2.7/tcp/4001/p2p/abc",
        DOORS[0].rpartition("/")[0],
        "",
        7,
        None,
        ["nested"],
        {},
    ],
)
def test_one_bad_address_on_disk_is_left_out_and_the_others_are_found(cache, tmp_path, bad):
    stored = [RUN, ME, [DOORS[0], bad, DOORS[1]], 7, None]
    (tmp_path / "doors.json").write_text(json.dumps(stored))
    assert cache.read(RUN) == Invite(RUN, ME, DOORS, 7)


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "[",
        "{}",
        "[" * 5000,
        json.dumps([RUN, ME, [], 7, None]),
        json.dumps([RUN, ME, ["bad"], 7, None]),
        json.dumps([RUN, "not a peer", DOORS, 7, None]),
        json.dumps([RUN, ME, DOORS, -1, None]),
        json.dumps([RUN, ME, DOORS, 7]),  # of a version before invites had grants
        json.dumps([RUN, ME, DOORS, 7, 8]),
        json.dumps([RUN, ME, DOORS * 5, 7, None]),
        json.dumps([RUN, ME, DOORS, 7, [ME, 1, 1, "trusted", "AA==", "AA=="]]),
    ],
)
def test_a_file_without_any_address_that_can_be_used_is_as_good_as_none(cache, tmp_path, stored):
    (tmp_path / "doors.json").write_text(stored)
    assert cache.read(RUN) is None


def test_links_forward_for_those_that_the_peer_knows_as_members_or_candidates():
    standings = {"member": "member", "guest": "candidate"}
    entrance = Entrance(standing=lambda peer: standings.get(peer, "stranger"))
    peer = SimpleNamespace(context=SimpleNamespace(entrance=entrance))
    links = SimpleNamespace(detours=SimpleNamespace(standing=None))
    forward_for(peer, links)
    known = [links.detours.standing(each) for each in ("member", "guest", "announced")]
    assert known == ["member", "candidate", "stranger"]
