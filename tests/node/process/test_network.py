"""The way of a process into a swarm: everything that is prepared before a socket is opened."""

import asyncio
import resource
from pathlib import Path

import pytest

from farflock.node.assembly.own_world import (
    DESCRIPTORS,
    OneLife,
    identity_of,
    raise_descriptor_limit,
)
from farflock.node.errors import Failure, LivesElsewhere
from farflock.node.state.paths import RunFolder
from farflock.swarm.sim.virtual_time import run_virtual


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


def test_a_node_whose_identity_lives_elsewhere_ends_with_one_sentence_and_not_again():
    async def main():
        life, loop = OneLife(RunFolder(Path("mine"))), asyncio.get_running_loop()
        copied = "already: a process with a copy of mine"
        with pytest.raises(LivesElsewhere, match=copied) as said, life:
            loop.call_later(1.0, life.stop)
            loop.call_later(1.0, life.stop)
            await asyncio.sleep(10.0)
        assert loop.time() < 2.0
        await asyncio.sleep(5.0)
        return said.value.exit_code

    assert run_virtual(main()) == 3


def test_a_node_that_is_cancelled_for_another_reason_is_just_that():
    async def main():
        with OneLife(RunFolder(Path("mine"))):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_virtual(main())
