"""The brake of a node that a demo started: no file is full speed, `inf` holds, a stop frees it."""

import asyncio
import time

import pytest
from worlds.waiting import in_time

from farflock.node.process.brake import BRAKE, Brake, with_brake
from farflock.swarm.sim.virtual_time import run_virtual

pytestmark = pytest.mark.net

STEP_S = 0.4


async def nothing():
    pass


def seconds_of_a_pause(brake):
    async def seconds():
        await brake.pause()
        return asyncio.get_running_loop().time()

    return run_virtual(seconds())


@pytest.mark.parametrize("content", [None, "", "0", "soon"])
def test_without_a_number_in_the_file_nothing_waits(tmp_path, content):
    if content is not None:
        (tmp_path / "brake").write_text(content)
    brake = Brake(tmp_path / "brake", lambda: False)
    assert seconds_of_a_pause(brake) == 0


def test_a_step_takes_at_least_the_seconds_in_the_file(tmp_path):
    (tmp_path / "brake").write_text(str(STEP_S))
    brake = Brake(tmp_path / "brake", lambda: False)
    began_s = brake._stepped_s
    for _ in range(2):
        asyncio.run(brake.pause())
    assert time.monotonic() - began_s >= 2 * STEP_S


def test_a_held_node_goes_on_once_the_file_says_so(tmp_path):
    file = tmp_path / "brake"
    file.write_text("inf")
    brake = Brake(file, lambda: False)

    async def held():
        pausing = asyncio.create_task(brake.pause())
        await asyncio.sleep(STEP_S)
        assert not pausing.done()
        file.write_text("0")
        await in_time(pausing, "the end of the pause")

    asyncio.run(held())


def test_a_request_to_stop_frees_a_held_node(tmp_path):
    (tmp_path / "brake").write_text("inf")
    asyncio.run(in_time(Brake(tmp_path / "brake", lambda: True).pause(), "the end of the pause"))


def test_a_part_of_a_step_may_begin_after_its_share_of_the_seconds(tmp_path):
    (tmp_path / "brake").write_text(str(2000 * STEP_S))
    brake = Brake(tmp_path / "brake", lambda: False)
    assert not brake.may_begin(1)
    time.sleep(STEP_S)
    assert brake.may_begin(2000)
    assert not brake.may_begin(1)
    (tmp_path / "brake").write_text("inf")
    assert not brake.may_begin(1_000_000)


def test_only_the_environment_names_a_brake(tmp_path, monkeypatch):
    monkeypatch.delenv(BRAKE, raising=False)
    assert with_brake(nothing, lambda: False) is nothing
    monkeypatch.setenv(BRAKE, str(tmp_path / "brake"))
    assert with_brake(nothing, lambda: False) is not nothing
