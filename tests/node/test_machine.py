"""What a process may use of its machine, in trees of control groups of both versions."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from worlds.waiting import completed

from farflock.node import machine
from farflock.node.machine import Memory, host_memory, limit_memory, usable_cores

MIB = 1 << 20
HERE = Memory(8000 * MIB, 16000 * MIB)


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    whole = SimpleNamespace(available=HERE.free, total=HERE.total)
    used = SimpleNamespace(rss=100 * MIB, vms=900 * MIB, data=300 * MIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: whole)
    monkeypatch.setattr(
        machine.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: used)
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    yield
    limit_memory(None)


def tree(root, groups, **folders):
    """A machine's files: /proc/self/cgroup, and of each folder below /sys/fs/cgroup its files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, files in folders.items():
        folder = root / "sys/fs/cgroup" / name.replace("__", "/").removesuffix("_top")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(f"{text}\n")
    return root


def second(limit, used, cached=0, **more):
    stat = f"anon 1\nfile 999\ninactive_file {cached}\nactive_file {cached}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat, **more}


def first(limit, used, cached=0):
    stat = f"inactive_file 7\nactive_file 7\ntotal_inactive_file {cached}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def test_without_control_groups_the_machine_counts(tmp_path):
    assert host_memory(tmp_path) == HERE
    assert usable_cores(tmp_path) == 8


def test_the_least_of_a_group_and_of_those_around_it_counts(tmp_path):
    groups = {
        "job": second(4000 * MIB, 1000 * MIB),
        "job__step": second("max", 900 * MIB),
        "job__step__task": second(2000 * MIB, 500 * MIB),
    }
    assert host_memory(tree(tmp_path, "0::/job/step/task\n", **groups)) == (1500 * MIB, 2000 * MIB)


def test_a_limit_from_which_the_kernel_slows_a_group_down_counts_too(tmp_path):
    files = second("max", 100 * MIB) | {"memory.high": 300 * MIB}
    assert host_memory(tree(tmp_path, "0::/a\n", a=files)) == (200 * MIB, 300 * MIB)


def test_pages_that_hold_files_are_free(tmp_path):
    files = second(1000 * MIB, 900 * MIB, cached=200 * MIB)
    assert host_memory(tree(tmp_path, "0::/a\n", a=files)).free == 500 * MIB


def test_a_group_beyond_its_limit_has_nothing_free(tmp_path):
    assert host_memory(tree(tmp_path, "0::/a\n", a=second(10 * MIB, 11 * MIB))).free == 0


def test_the_first_version_has_a_tree_for_each_resource(tmp_path):
    groups = "4:memory:/docker/12ab\n2:cpu,cpuacct:/docker/12ab\n0::/\n"
    folders = {
        "memory_top": first((1 << 63) - 4096, 5000 * MIB),
        "memory__docker": first(3000 * MIB, 1000 * MIB, cached=500 * MIB),
        "memory__docker__12ab": first((1 << 63) - 4096, 900 * MIB),
        "cpu,cpuacct__docker__12ab": {"cpu.cfs_quota_us": 150_000, "cpu.cfs_period_us": 100_000},
    }
    root = tree(tmp_path, groups, **folders)
    assert host_memory(root) == (2500 * MIB, 3000 * MIB)
    assert usable_cores(root) == 2


def test_a_container_sees_its_group_as_the_root_and_by_its_name_on_the_host(tmp_path):
    root = tree(tmp_path, "4:memory:/docker/12ab\n", memory_top=first(1000 * MIB, 400 * MIB))
    assert host_memory(root) == (600 * MIB, 1000 * MIB)


@pytest.mark.parametrize(("quota", "count"), [("max", 8), ("50000", 1), ("250000", 3)])
def test_a_share_of_time_bounds_the_cores(tmp_path, quota, count):
    assert usable_cores(tree(tmp_path, "0::/a\n", a={"cpu.max": f"{quota} 100000"})) == count


@pytest.mark.parametrize("groups", ["", "0::\n", "nonsense", "0::/../../etc\n", "4:memory:/gone\n"])
def test_files_that_say_something_else_bound_nothing(tmp_path, groups):
    odd = {"memory.max": "?", "memory.current": "-1", "memory.stat": "a b c\n\nx", "cpu.max": "1"}
    assert host_memory(tree(tmp_path, groups, etc=odd, _top=odd)) == HERE


def test_what_the_user_gives_is_a_limit_of_this_process(tmp_path):
    limit_memory(600 * MIB)
    assert host_memory(tmp_path) == (500 * MIB, 600 * MIB)


def test_the_limits_of_the_shell_bound_it(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    limits = {resource.RLIMIT_AS: 2000 * MIB, resource.RLIMIT_DATA: 1000 * MIB}
    monkeypatch.setattr(resource, "getrlimit", lambda name: (limits[name], -1))
    assert host_memory(tmp_path) == (700 * MIB, 1000 * MIB)


@pytest.fixture
def group():
    """A control group of this machine with 1 GiB of memory, in a group of its own."""
    version_1 = Path("/sys/fs/cgroup/memory")
    top = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"farflock-{os.getpid()}"
    inner, made = top / "inner", []
    try:
        for folder in (top, inner):
            folder.mkdir()
            made.append(folder)
        name = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
        (top / name).write_text(str(1 << 30))
    except OSError:
        pytest.skip("no control group can be made here")
    else:
        yield inner
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()


@pytest.mark.net
def test_in_a_group_of_1_gib_a_larger_run_is_refused_with_both_numbers(group, tmp_path):
    (tmp_path / "large.toml").write_text('[model]\npreset = "60m"\n[method]\nname = "diloco"\n')
    command = f"{sys.executable} -m farflock.node.cli run large.toml --dry-run"
    done = completed(
        ["sh", "-c", f"echo $$ > {group}/cgroup.procs && exec {command}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FARFLOCK_HOME": str(tmp_path)},
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("memory")]
    assert "so this machine would refuse to train it" in line
    assert " MB are free here" in line
