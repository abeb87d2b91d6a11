"""hivemind's libp2p daemon as a child process that ends with the thread that started it."""

import asyncio
import contextvars
import os
import sys
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from farflock.swarm.dht.greeting import DirectoryUnreachable

ANSWER_S = 10.0  # a starved machine takes seconds
CLOSE_TIMEOUT_S = 5.0
DOOR_WAITS_S = (0.5, 2.0, 5.0)  # before attempts two, three and four to reach a peer
# Two wordings of the daemon's last message.
_NO_DOOR_OPENS = ("bootstrap", "failed to find any peer")
# prctl(PR_SET_PDEATHSIG, SIGKILL), then check that the parent still lives. The process group of its
# own keeps a terminal's Ctrl-C from the daemon.
_DIE_WITH_PARENT = (
    "import ctypes,os,sys;os.setpgid(0,0);ctypes.CDLL(None).prctl(1,9);"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);os.execv(sys.argv[2],sys.argv[2:])"
)
_starting: contextvars.ContextVar[list["BoundDaemon"]] = contextvars.ContextVar("starting")


class BoundDaemon(P2P):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's libp2p daemon; on Linux it is killed with the thread that started it.

    Elsewhere it ends with its client's connection, or after `DAEMON_IDLE_TIMEOUT_S` without one.
    """

    def __init__(self) -> None:
        super().__init__()
        _starting.get().append(self)

    @staticmethod
    def _make_process_args(*args: object, **options: object) -> list[str]:
        command: list[str] = P2P._make_process_args(*args, **options)
        if not os.access(command[0], os.X_OK):
            raise DirectoryUnreachable(
                f"the libp2p daemon {command[0]} may not be executed: its file system may be"
                " mounted with noexec; install Farflock on another one"
            )
        if sys.platform != "linux":
            return command
        return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]

    @classmethod
    async def start(cls, sockets: Path, **options: object) -> "BoundDaemon":
        """Start a daemon with its sockets in this folder; if anything fails, leave none behind."""
        started: list[BoundDaemon] = []
        token = _starting.set(started)
        placed: Any = type(
            cls.__name__, (cls,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/hivemind-"}
        )
        try:
            daemon: BoundDaemon = await placed.create(**options)
        except BaseException:
            for daemon in started:
                await daemon.stop()
            raise
        finally:
            _starting.reset(token)
        return daemon

    @classmethod
    async def start_patiently(cls, sockets: Path, **options: object) -> "BoundDaemon":
        """Start a daemon, and retry if no peer of the invite could be reached: it may be busy."""
        for wait_s in DOOR_WAITS_S:
            try:
                return await cls.start(sockets, **options)
            except P2PDaemonError as error:
                if not finds_no_door(error):
                    raise
            await asyncio.sleep(wait_s)
        return await cls.start(sockets, **options)

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return int(self._child.pid)

    @property
    def deaf(self) -> bool:
        """True once the daemon or the connection to it is gone, so that no call gets an answer."""
        return self._child.returncode is not None or self._client.control._read_task.done()

    async def trouble(self) -> str:
        """Return why this daemon serves nobody any more, as a clause; nothing if it answers.

        A new connection shows that it listens: an open one outlives the socket's file."""
        socket = Path(self._daemon_listen_maddr["unix"])
        if self._child.returncode is not None:
            return f"the libp2p daemon (process {self.pid}) has ended"
        if self.deaf:
            return "the connection to the libp2p daemon has ended"
        if not socket.exists():  # noqa: ASYNC240 - in memory
            return f"the libp2p daemon's socket in {socket.parent} was removed"
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._client.identify()
        except TimeoutError:
            return f"the libp2p daemon has not answered for {ANSWER_S:.0f} s"
        except (OSError, EOFError, P2PDaemonError) as error:
            return f"the libp2p daemon refuses connections ({error})"
        return ""

    async def stop(self) -> None:
        """End all calls in flight, the daemon and the tasks that serve it; idempotent."""
        control = self._client.control if self._client is not None else None
        if control is not None:
            for call in control._pending_calls.values():
                if not call.done():
                    call.set_exception(P2PDaemonError("the directory is closed"))
        self._terminate()
        tasks = [self._reader_task, self._listen_task]
        if control is not None:
            tasks += [control._read_task, control._write_task, *control._handler_tasks.values()]
            for handler in control._handler_tasks.values():
                handler.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        if self._child is not None:
            await self._end_child()

    async def _end_child(self) -> None:
        try:
            await asyncio.wait_for(self._child.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        self._child._transport.close()


def finds_no_door(error: BaseException) -> bool:
    """Return whether a daemon ended because it reached none of the given peers."""
    return any(sign in str(error) for sign in _NO_DOOR_OPENS)
