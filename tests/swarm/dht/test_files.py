import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest
from worlds.waiting import ended, line_of

from farflock.node.errors import explained
from farflock.swarm.dht.files import (
    SOCKET_MIN_AGE_S,
    IdentityInUse,
    IdentityLock,
    PortTaken,
    place_for_sockets,
    refuse_taken_ports,
    remove_dead_sockets,
    socket_folder,
)
from farflock.swarm.dht.greeting import DirectoryUnreachable

pytestmark = pytest.mark.net


def test_a_key_file_can_be_locked_once_and_again_after_its_release(tmp_path):
    path = tmp_path / "key"
    path.touch()
    lock = IdentityLock(path)
    with pytest.raises(
        IdentityInUse,
        match=rf"key: another running peer \(process {os.getpid()}\) uses this identity; stop that",
    ):
        IdentityLock(path)
    lock.release()
    lock.release()
    IdentityLock(path).release()


def test_the_lock_holds_between_processes_and_ends_with_its_holder(tmp_path):
    path = tmp_path / "key"
    path.touch()
    script = (
        "import sys; from pathlib import Path; from farflock.swarm.dht.files import IdentityLock;"
        "IdentityLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert line_of(holder, "the lock") == "held\n"
        with pytest.raises(IdentityInUse, match=rf"\(process {holder.pid}\)"):
            IdentityLock(path)
    finally:
        holder.kill()
        ended(holder, "the holder")
        holder.stdin.close()
        holder.stdout.close()
    IdentityLock(path).release()


def test_a_lock_whose_holder_is_not_known_is_refused_without_a_process(tmp_path):
    path = tmp_path / "key"
    path.touch()
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for content in (None, b"", b"x" * 99):
            if content is not None:
                path.with_suffix(".pid").write_bytes(content)
            with pytest.raises(IdentityInUse, match="another running peer uses this identity"):
                IdentityLock(path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named_with_the_file(tmp_path, monkeypatch, number):
    def refuse(descriptor, wanted):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "key"
    path.touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"the file system there has no locks \(.*\).*key") as caught:
        IdentityLock(path)
    assert str(explained(caught.value)).endswith("; choose a --folder on a disk of this machine")


def test_a_missing_key_file_is_not_created(tmp_path):
    with pytest.raises(FileNotFoundError):
        IdentityLock(tmp_path / "key")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def folder(tmp_path):
    """A dead daemon's socket, a living one's, a file of the same name pattern, and the socket of
    another program."""
    listeners = []
    for name in (
        "hivemind-p2pd-dead.sock",
        "hivemind-p2pclient-dead.sock",
        "other.sock",
        "hivemind-p2pd-live.sock",
    ):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / name))
        if "live" in name:
            listener.listen()
            listeners.append(listener)
        else:
            listener.close()
    (tmp_path / "hivemind-p2pd-file.sock").touch()
    yield tmp_path
    for listener in listeners:
        listener.close()


def now_s(folder):
    return max(path.lstat().st_mtime for path in folder.iterdir())


def test_only_old_sockets_without_a_listener_are_removed(folder):
    before = {path.name for path in folder.iterdir()}
    assert remove_dead_sockets(folder, now_s(folder) + SOCKET_MIN_AGE_S + 1) == 2
    gone = before - {path.name for path in folder.iterdir()}
    assert gone == {"hivemind-p2pd-dead.sock", "hivemind-p2pclient-dead.sock"}


def test_a_young_socket_may_belong_to_a_daemon_that_is_starting(folder):
    assert remove_dead_sockets(folder, now_s(folder) + 1) == 0


def test_a_socket_of_another_user_is_left_alone(folder, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert remove_dead_sockets(folder, now_s(folder) + SOCKET_MIN_AGE_S + 1) == 0


def test_a_sweep_is_bounded(folder, monkeypatch):
    monkeypatch.setattr("farflock.swarm.dht.files.MAX_SOCKETS_PER_SWEEP", 0)
    assert remove_dead_sockets(folder, now_s(folder) + SOCKET_MIN_AGE_S + 1) == 0


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_another_shares_willingly_is_still_refused(port):
    with pytest.raises(PortTaken, match=f"another program uses port {port}"):
        refuse_taken_ports(["/ip4/127.0.0.1/tcp/0", f"/ip4/127.0.0.1/tcp/{port}"])
    with pytest.raises(PortTaken):
        refuse_taken_ports([f"/ip4/0.0.0.0/tcp/{port}"])


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/127.0.0.1/tcp/0",
        "/ip4/192.0.2.1/tcp/9",
        "/ip4/127.0.0.1/tcp/70000",
        "/ip4/127.0.0.1/tcp/x",
        "/ip4/no host/tcp/9",
        f"/ip4//tcp/{2**70}",
        "rubbish",
        "",
    ],
)
def test_addresses_that_it_cannot_judge_are_left_to_the_daemon(address):
    refuse_taken_ports([address])


def test_sockets_get_the_first_folder_that_is_short_enough_and_can_be_written_to(
    tmp_path, monkeypatch
):
    long, closed, open_ = tmp_path / ("x" * 120), tmp_path / "closed", tmp_path / "open"
    for each in (long, closed, open_):
        each.mkdir()
    monkeypatch.setattr("farflock.swarm.dht.files.MAX_SOCKET_FOLDER_BYTES", len(str(closed)))
    monkeypatch.setattr(os, "access", lambda path, how: path != closed and path.exists())
    assert socket_folder([long, tmp_path / "none", closed, open_]) == open_
    assert socket_folder([long, closed]) is None


def test_without_a_folder_for_sockets_one_sentence_says_which_were_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(DirectoryUnreachable, match=r"none of /tmp, .*; set TMPDIR to one") as said:
        place_for_sockets(tmp_path / "key")
    assert str(tmp_path) in str(said.value)
