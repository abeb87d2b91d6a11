"""What a node takes of the disk is known before it writes, and fits what it may take."""

import pytest

from farflock.node.errors import Failure
from farflock.node.process.disk import READ_BYTES, DiskNeed, disk_need, planned
from farflock.node.process.network import MachineOptions
from farflock.node.process.room import with_disk
from farflock.node.run.manifest import resolve
from farflock.node.state.paths import RunFolder

NEED = DiskNeed(outer=1, snapshots=20, rounds=300, checkpoint=4000, data=50_000)
SHAPE = {"dim": 64, "layers": 4, "heads": 2, "kv_heads": 2, "ffn_dim": 128, "context": 64}


def given(disk, need=NEED, keep=3, keep_bytes=None):
    return planned(need, disk, keep, keep_bytes, 10**6, Failure)


def test_older_checkpoints_and_then_shards_take_what_a_run_does_not_need():
    assert given(NEED.min_bytes) == (8000, 20, 300, 1, 50_000)
    assert given(NEED.min_bytes + 5000) == (13_000, 20, 300, 1, 50_000)
    assert given(NEED.min_bytes + 12_000) == (16_000, 20, 300, 1, 54_000)
    for disk in range(NEED.min_bytes, NEED.min_bytes + 20_000, 999):
        assert sum(given(disk)) == disk


def test_who_reads_in_place_leaves_the_rest_of_the_disk_alone():
    assert given(10**6, NEED._replace(data=0)) == (16_000, 20, 300, 1, 0)


def test_fewer_checkpoints_are_planned_where_fewer_are_wanted():
    assert given(10**6, keep=1)[0] == 8000
    assert given(10**6, keep_bytes=9000)[0] == 13_000
    assert given(10**6, keep_bytes=1)[0] == 8000


def test_without_a_limit_a_node_takes_what_it_needs_and_the_cache_its_own():
    assert given(None) == (16_000, 20, 300, 1, 10**6)
    assert str(given(None)).startswith("this node takes up to 1.0 MB of the disk: 16.0 kB of check")


def test_too_little_is_refused_with_both_numbers():
    with pytest.raises(Failure) as refused:
        given(10**9 - 1, NEED._replace(snapshots=2 * 10**9))
    assert str(refused.value).startswith(
        "the run needs more of the disk than --disk 1,000.0 MB: it takes about 2.0 GB at least: 2"
        " checkpoints of 4.0 kB, 2.0 GB of snapshots"
    )


def machine(tmp_path, **options):
    return MachineOptions(RunFolder(tmp_path), **options)


def whole(method="diloco", **more):
    return resolve({"model": SHAPE, "method": {"name": method}} | more)


def test_a_node_of_a_run_keeps_as_many_checkpoints_as_fit(tmp_path):
    need = disk_need(whole(), None, outer=False, fetched=0)
    found = with_disk(machine(tmp_path, disk=need.min_bytes), whole(), Failure)
    assert found.keep_bytes == need.checkpoint
    found = with_disk(machine(tmp_path, disk=10**12), whole(), Failure)
    assert found.keep_bytes == 3 * need.checkpoint
    assert with_disk(machine(tmp_path), whole(), Failure).keep_bytes is None
    with pytest.raises(Failure, match="more of the disk than --disk"):
        with_disk(machine(tmp_path, disk=need.min_bytes - 1), whole(), Failure)
    assert not any(tmp_path.iterdir()), "nothing is written"


def test_shards_from_members_take_what_is_left(tmp_path):
    run = whole(data={"root": "a" * 64})
    need = disk_need(run, None, outer=False, fetched=1)
    assert need.data == READ_BYTES
    disk = need.min_bytes + 2 * need.checkpoint + 10**9
    assert with_disk(machine(tmp_path, disk=disk), run, Failure).data_cache == READ_BYTES + 10**9
    assert with_disk(machine(tmp_path), run, Failure).data_cache == 20 * 10**9
    in_place = machine(tmp_path, disk=disk, data=(tmp_path,))
    assert with_disk(in_place, run, Failure).disk_plan.data == 0


def test_a_stage_takes_its_part_and_a_trainer_without_weights_none(tmp_path):
    stages = {
        "model": SHAPE | {"tied": False},
        "pipeline": {"stages": 2},
        "method": {"name": "ddp"},
    }
    run = resolve(stages)
    first, second, both = (
        disk_need(run, held, outer=True, fetched=0) for held in ((0,), (1,), (0, 1))
    )
    assert first.checkpoint + second.checkpoint == pytest.approx(both.checkpoint, abs=2)
    assert disk_need(run, (), outer=True, fetched=0) == DiskNeed()
    plans = {
        role: with_disk(machine(tmp_path, role=role), run, Failure).disk_plan
        for role in ("trainer", "auto", "replica")
    }
    assert plans["trainer"].checkpoints == 0
    assert plans["auto"].checkpoints < plans["replica"].checkpoints
