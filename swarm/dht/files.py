"""Checks before a libp2p daemon starts: the key file's lock, the port, a folder for its sockets,
and dead daemons' sockets.

The daemon makes none of them: two with one identity start without complaint, and two on one port
(it sets SO_REUSEPORT) get each other's connections.
"""

import contextlib
import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from farflock.swarm.dht.greeting import DirectoryUnreachable

SOCKET_PATTERN = "hivemind-p2p*.sock"
SOCKET_MIN_AGE_S = 60.0  # a younger one's daemon may not listen yet
MAX_SOCKETS_PER_SWEEP = 1000
PROBE_TIMEOUT_S = 0.1
PID_CHARS = 16
# A Unix socket's path has at most 103 bytes on macOS and 107 on Linux; the longest name takes 36.
MAX_SOCKET_FOLDER_BYTES = 67


class IdentityInUse(RuntimeError):
    """Another directory, in this process or another, runs with this key file."""


class PortTaken(RuntimeError):
    """Another program listens on the requested port."""


class IdentityLock:
    """An exclusive flock on a key file, held until `release` or process exit, so never stale."""

    def __init__(self, path: Path) -> None:
        """Raise `IdentityInUse` if the lock is held, and `OSError` if the file cannot be opened or
        locked, as on some network drives."""
        import fcntl  # late: every system can import this module

        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        holder = path.with_suffix(".pid")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                why = f"the file system there has no locks ({error.strerror})"
                raise OSError(errno.ENOLCK, why, str(path)) from None
            raise IdentityInUse(
                f"{path}: another running peer{_process_in(holder)} uses this identity; "
                "stop that peer, or give this one an identity of its own"
            ) from None
        with contextlib.suppress(OSError):  # it only makes the sentence above more helpful
            holder.write_text(f"{os.getpid()}\n")

    def release(self) -> None:
        """Release the lock; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _process_in(holder: Path) -> str:
    """Return which process says that it holds a lock, as a clause; nothing if none does."""
    with contextlib.suppress(OSError, ValueError), holder.open("rb") as file:
        return f" (process {int(file.read(PID_CHARS))})"
    return ""


def refuse_taken_ports(listen: Iterable[str]) -> None:
    """Raise `PortTaken` if a program listens on a TCP port of these multiaddresses.

    Port 0 and addresses not like `/ip4/192.0.2.7/tcp/4001` are left to the daemon.
    """
    for address in listen:
        match address.split("/"):
            case ["", "ip4" | "ip6" as version, host, "tcp", port, *_] if (
                port.isascii() and port.isdigit()
            ):
                _refuse_taken(
                    socket.AF_INET if version == "ip4" else socket.AF_INET6, host, int(port)
                )


def _refuse_taken(family: socket.AddressFamily, host: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Closed connections of a former run do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise PortTaken(
                    f"{host}: another program uses port {port}; "
                    "stop that program, or choose another port (0: any)"
                ) from None


def socket_folder(choices: Iterable[Path]) -> Path | None:
    """Return the first of these folders in which sockets can be made; None if there is none."""
    fit = (each for each in choices if len(os.fsencode(each)) <= MAX_SOCKET_FOLDER_BYTES)
    return next((each for each in fit if os.access(each, os.W_OK | os.X_OK)), None)


def place_for_sockets(key_file: Path) -> Path:
    """Return a folder for the daemon's sockets; raise `DirectoryUnreachable` if there is none."""
    choices = [Path("/tmp")]
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files can be used
        choices.append(Path(tempfile.gettempdir()))
    choices += [Path("/var/tmp"), Path("/dev/shm"), key_file.absolute().parent]
    found = socket_folder(choices)
    if found is None:
        tried = ", ".join(map(str, dict.fromkeys(choices)))
        raise DirectoryUnreachable(
            f"the libp2p daemon has no folder for its sockets: none of {tried} can be written to"
            f" and has a path of at most {MAX_SOCKET_FOLDER_BYTES} bytes; set TMPDIR to one"
        )
    return found


def remove_dead_sockets(folder: Path, now_s: float) -> int:
    """Remove sockets of dead daemons and return their number; `now_s` is wall-clock time.

    A socket stays unless it is ours, older than `SOCKET_MIN_AGE_S`, and refuses connections.
    """
    removed = 0
    for _, path in zip(range(MAX_SOCKETS_PER_SWEEP), folder.glob(SOCKET_PATTERN), strict=False):
        if _is_old_and_ours(path, now_s) and _nobody_listens(path):
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def _is_old_and_ours(path: Path, now_s: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISSOCK(status.st_mode)
        and status.st_uid == os.getuid()
        and now_s - status.st_mtime > SOCKET_MIN_AGE_S
    )


def _nobody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
