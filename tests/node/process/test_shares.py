"""What a node may take of its machine: a share of the processor, and of the line."""

import asyncio
import math

import pytest

from farflock.node.process.brake import CpuShare, with_share
from farflock.node.process.host import OwnPlace, Shares
from farflock.node.process.network import SHARES_FILE, MachineOptions, with_shares
from farflock.node.state.paths import RunFolder
from farflock.swarm.sim.virtual_time import run_virtual


class Processor:
    """The processor time of a process in virtual time."""

    def __init__(self):
        self.used_s = 0.0

    async def step(self, seconds, threads=1):
        await asyncio.sleep(seconds)
        self.used_s += seconds * threads


def now():
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(("share", "threads"), [(0.5, 1), (0.25, 1), (0.5, 4)])
@pytest.mark.parametrize("step_s", [0.01, 0.3])
def test_of_ten_seconds_the_process_takes_its_share_of_all_threads(share, threads, step_s):
    async def main():
        processor = Processor()
        limit = CpuShare(share, threads, lambda: False, now, lambda: processor.used_s)
        while now() < 10.0:
            await processor.step(step_s, threads)
            await limit.pause()
        assert processor.used_s / (threads * now()) == pytest.approx(share, rel=0.05)

    run_virtual(main())


def test_time_that_was_not_used_is_not_made_up_for():
    async def main():
        processor = Processor()
        limit = CpuShare(0.5, 1, lambda: False, now, lambda: processor.used_s)
        await asyncio.sleep(60.0)  # it waited for others
        await limit.pause()
        began_s = now()
        for _ in range(50):
            await processor.step(0.1)
            await limit.pause()
        assert processor.used_s / (now() - began_s) == pytest.approx(0.5, rel=0.06)

    run_virtual(main())


def test_a_request_to_stop_ends_the_pause():
    async def main():
        processor, ends_s = Processor(), 3.0
        limit = CpuShare(0.01, 1, lambda: now() >= ends_s, now, lambda: processor.used_s)
        await processor.step(1.0)
        await limit.pause()
        assert now() == pytest.approx(ends_s, abs=0.2)

    run_virtual(main())


@pytest.mark.parametrize("share", [None, 0.0, 1.0])
def test_without_a_share_nothing_is_added_to_the_pause(share):
    async def pause():
        pass

    assert with_share(pause, share, 1, lambda: False) is pause


@pytest.mark.parametrize(
    ("share", "threads", "trains_with"),
    [(None, 4, 4), (0.0, 4, 4), (1.0, 4, 4), (0.5, 8, 4), (0.3, 8, 3), (0.5, 1, 1), (0.01, 8, 1)],
)
def test_a_share_of_many_threads_is_fewer_of_them(share, threads, trains_with):
    assert Shares(cpu=share).threads_of(threads) == trains_with


def options(tmp_path, **said):
    return MachineOptions(RunFolder(tmp_path / "node"), OwnPlace(shares=Shares(**said)))


def test_the_folder_remembers_what_was_said_and_what_is_said_later_replaces_it(tmp_path):
    first = with_shares(options(tmp_path, up_bytes_per_s=625_000.0, cpu=0.5))
    assert first.place.shares == Shares(625_000.0, None, 0.5)
    assert with_shares(options(tmp_path)).place.shares == first.place.shares
    later = with_shares(options(tmp_path, up_bytes_per_s=0.0, down_bytes_per_s=1e6))
    assert with_shares(options(tmp_path)).place.shares == Shares(0.0, 1e6, 0.5)
    listening = later.place.listening()
    assert (listening.up_bytes_per_s, listening.down_bytes_per_s) == (math.inf, 1e6)


def test_a_node_without_shares_leaves_no_file_and_a_spoilt_one_is_no_share(tmp_path):
    assert with_shares(options(tmp_path)).place.shares == Shares()
    assert not (tmp_path / "node").exists()
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / SHARES_FILE).write_bytes(b'{"cpu": "half"')
    assert with_shares(options(tmp_path)).place.shares == Shares()


def test_who_only_dials_out_has_a_share_of_the_line_too():
    place = OwnPlace(client_mode=True, shares=Shares(1e6))
    assert place.listening().up_bytes_per_s == 1e6
