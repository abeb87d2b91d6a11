"""The memory and the processor cores that this process may use.

A container, a Slurm job or a systemd unit is a control group, perhaps within others. The kernel
kills a process of a group that takes more than one of them may have, so what is free is the least
over the machine, these groups, and the process's own limits. Pages that hold files count as free:
the kernel drops them when a group needs room.

Sources: the kernel's documentation of cgroups, version 1 (memory, cpu) and 2; cgroups(7).
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
NO_LIMIT = 1 << 60  # version 1 of cgroups says a number above this where there is no limit


class Memory(NamedTuple):
    """Bytes of memory: free to this process, and all that it may ever have."""

    free: int
    total: int


class _Given:
    """The limits that the user gave; None: all that is free."""

    memory_bytes: int | None = None


def limit_memory(size: int | None) -> None:
    """From now on, let `host_memory` count with a limit of this process (None: without one)."""
    _Given.memory_bytes = size


def host_memory(root: Path = Path("/")) -> Memory:
    """Return the least of all that bounds this process; `root` is where /proc and /sys are."""
    here = psutil.virtual_memory()
    bounds = [Memory(int(here.available), int(here.total)), *_of_groups(root), *_of_process()]
    return Memory(max(0, min(each.free for each in bounds)), min(each.total for each in bounds))


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use at once, at least 1."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        count = os.cpu_count() or 1
    quotas = [_quota(folder) for folder in _folders(root, "cpu")]
    return max(1, min([count, *(math.ceil(each) for each in quotas if each is not None)]))


def _of_process() -> Iterator[Memory]:
    """Yield the bounds of this process alone."""
    used = psutil.Process().memory_info()
    if (given := _Given.memory_bytes) is not None:
        yield Memory(given - used.rss, given)
    with contextlib.suppress(ImportError):  # not on every system
        import resource

        places = ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0)))
        for name, taken in places:
            limit, _ = resource.getrlimit(name)
            if limit != resource.RLIM_INFINITY:
                yield Memory(limit - taken, limit)


def _of_groups(root: Path) -> Iterator[Memory]:
    """Yield the bounds of this process's control groups."""
    for folder in _folders(root, "memory"):
        limits = [_number(folder / name) for name in _LIMITS]
        limit = min((each for each in limits if each is not None), default=None)
        used = _number(folder / "memory.current")
        if used is None:
            used = _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            yield Memory(limit - max(0, used - _of_files(folder)), limit)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups, and of all around them, in either version.

    A container may see its own group as the root of the tree, and its name as that on the host, so
    folders that are not there are passed over."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        names, _, group = line.partition(":")[2].partition(":")
        if names and controller not in names.split(","):
            continue
        inside = Path(group.lstrip("/"))
        for mount in dict.fromkeys((names, controller) if names else ("", "unified")):
            top = root / "sys/fs/cgroup" / mount
            for each in () if ".." in inside.parts else (inside, *inside.parents):
                if (top / each).is_dir():
                    yield top / each


def _of_files(folder: Path) -> int:
    """Return the bytes of a group's memory that hold files."""
    counted = dict(
        line.split() for line in _text(folder / "memory.stat").splitlines() if line.count(" ") == 1
    )
    kinds = ("active_file", "inactive_file")
    # In version 1, those with `total_` are of the group with all groups in it, as the use is.
    return sum(int(counted.get(f"total_{kind}", counted.get(kind, "0"))) for kind in kinds)


def _quota(folder: Path) -> float | None:
    """Return the cores' worth of time that a group may take."""
    words = _text(folder / "cpu.max").split()
    if not words:
        words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    with contextlib.suppress(ValueError, ZeroDivisionError):
        quota, period = map(int, words)
        return quota / period if quota > 0 else None
    return None


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, or if it stands for no limit."""
    found = _text(path).strip()
    return int(found) if found.isdigit() and int(found) < NO_LIMIT else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
