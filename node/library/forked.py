"""Processes that a program forks, such as a DataLoader's workers, hold no socket of its swarm.

A child inherits every descriptor. As long as it lived, the kernel would accept connections that
nobody answers, and partners would not notice that this peer has left.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Addresses = Callable[[], Iterable[str]]  # of our own sockets and of those that they dial

_open: dict[object, tuple[Path, Addresses]] = {}
_registered: list[bool] = []
DESCRIPTORS = ("/proc/self/fd", "/dev/fd")


@contextlib.contextmanager
def closed_in_forks(key_file: Path, addresses: Addresses) -> Iterator[None]:
    """Let children forked in the block close what uses these multiaddresses or the key file."""
    if not _registered:
        os.register_at_fork(after_in_child=_close_all)
        _registered.append(True)
    token = object()
    _open[token] = key_file.resolve(), addresses
    try:
        yield
    finally:
        del _open[token]


def _close_all() -> None:
    for key_file, addresses in _open.values():
        close_those_of(key_file, {_place(address) for address in addresses()})
    _open.clear()


def close_those_of(key_file: Path, places: set[tuple[str, int]]) -> None:
    """Close this process's descriptors of a file, and its TCP sockets between these places and
    anywhere else. Our own and those of partners are both among them."""
    folder = next((path for path in DESCRIPTORS if os.path.isdir(path)), None)
    for entry in os.listdir(folder) if folder else ():
        with contextlib.suppress(OSError, ValueError):
            number = int(entry)
            if _is_of(number, places) or os.readlink(f"{folder}/{entry}") == str(key_file):
                os.close(number)


def _is_of(number: int, places: set[tuple[str, int]]) -> bool:
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return False
    one = socket.socket(fileno=number)
    try:
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        ends = [one.getsockname()]
        with contextlib.suppress(OSError):  # one that listens has no other end
            ends.append(one.getpeername())
        # a socket for both kinds of addresses shows those of IPv4 as ::ffff:192.0.2.7
        return any((host.removeprefix("::ffff:"), port) in places for host, port, *_ in ends)
    finally:
        one.detach()


def _place(address: str) -> tuple[str, int]:
    """Return host and port of a multiaddress, /ip4/192.0.2.7/tcp/4001."""
    fields = address.split("/")
    return fields[2], int(fields[4])
