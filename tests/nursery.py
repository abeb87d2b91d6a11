"""A nursery: one process that has imported everything, has opened nothing, and forks itself.

A test starts each of its programs as such a fork. A Python process of this project needs five
seconds of processor to import its libraries; a fork needs none.

Run as a program, this is the nursery. `Nursery.popen` is `subprocess.Popen` for commands that
begin with `sys.executable`. `Nursery.stand_in` is for programs that others start: a shell,
torchrun, a benchmark. Tests of imports and of packaging do without both.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from farflock.experiments.measure.parent import end_with_parent

PRELOADED = (
    "hivemind",
    "torch._dynamo",
    "farflock.node.cli.commands.join",
    "farflock.node.process.entering",
    "farflock.node.simulate.simulation",
)
MAX_REQUEST = 1 << 20
NUMBER = struct.Struct("<q")  # what a keeper says: first the pid, then how it ended
START_S = 240.0
CLONE_NEWNET = 0x40000000  # linux/sched.h
STAND_IN = Path(__file__).with_name("stand_in.py")


class Nursery:
    """The test's end of a nursery, which ends with it."""

    def __init__(self, folder, preloaded=PRELOADED, **environment):
        self.path = str(folder / "nursery")
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.path, *preloaded],
            stdin=subprocess.PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                **environment,
            },
        )

    def connect(self):
        self._be_up()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        return connection

    def _be_up(self):
        ends_s = time.monotonic() + START_S
        while (
            not os.path.exists(self.path)
            and self._process.poll() is None
            and time.monotonic() < ends_s
        ):
            time.sleep(0.02)

    def popen(self, command, **options):
        return Nursed(command, nursery=self, **options)

    def stand_in(self, path, *words):
        """Write a program: `PATH MORE` does as a fork what `sys.executable WORDS MORE` would do."""
        self._be_up()
        start = shlex.join((sys.executable, "-IS", str(STAND_IN), self.path, *words))
        path.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        path.chmod(0o755)
        return path

    def run(self, command, *, timeout=None, check=False, capture_output=False, **options):
        """As `subprocess.run`."""
        if capture_output:
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(command, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(command, process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def close(self):
        self._process.stdin.close()
        self._process.wait(START_S)


class Nursed(subprocess.Popen):
    """A program in a fork of the nursery.

    A keeper between the two waits for it and says on the connection how it ended.
    """

    def __init__(self, command, *, nursery, **options):
        self._nursery, self._connection = nursery, None
        super().__init__(command, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        (
            startup,
            creation,
            shell,
            p2cread,
            p2cwrite,
            c2pread,
            c2pwrite,
            errread,
            errwrite,
            *_,
            session,
            _,
        ) = others
        assert str(args[0]) == sys.executable, args
        asked = (executable, preexec_fn, pass_fds, startup, creation, shell)
        assert not any(asked), f"a nursery knows nothing of {asked}"
        environment = {
            os.fsdecode(name): os.fsdecode(value) for name, value in dict(env or os.environ).items()
        }
        request = {
            "words": [os.fsdecode(word) for word in args[1:]],
            "cwd": os.fsdecode(cwd or Path.cwd()),
            "env": environment,
            "session": session,
            "tied": False,
        }
        streams = [
            given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        self._connection = self._nursery.connect()
        socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], streams)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        self._connection.settimeout(START_S)
        (self.pid,) = NUMBER.unpack(self._connection.recv(NUMBER.size, socket.MSG_WAITALL))
        self._child_created = True

    def _try_wait(self, wait_flags):
        self._connection.settimeout(0 if wait_flags & os.WNOHANG else None)
        try:
            (status,) = NUMBER.unpack(self._connection.recv(NUMBER.size, socket.MSG_WAITALL))
        except BlockingIOError:
            return 0, 0
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, _deadstate=None):
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def serve(path):
    """Fork a keeper for each connection; return only in the children, with their request.

    Each process ends with its parent, so that a suite that is killed leaves nothing behind.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for keepers
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path + ".partial")
        server.listen()
        os.rename(path + ".partial", path)
        if os.fork() == 0:  # the process that started the nursery holds its standard input
            server.close()
            sys.stdin.buffer.read()
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                end_with_parent()
                server.close()
                return keep(connection)
            connection.close()


def keep(connection):
    """Return in the child with the request; the keeper tells its pid and how it ended, and ends."""
    data, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST, 4)
    while not data.endswith(b"\n"):
        data += connection.recv(MAX_REQUEST)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(data)
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        connection.close()
        for own, fd in enumerate(fds[:3]):
            os.dup2(fd, own)
            os.close(fd)
        for network in fds[3:]:
            ctypes.CDLL(None).setns(network, CLONE_NEWNET)  # where it may: only root has others
            os.close(network)
        return request
    for fd in fds:
        os.close(fd)
    for own in range(3):
        os.close(own)
    # A Ctrl-C is the child's. A keeper in a process group of its own would tie the suite's group
    # to its session: when the last child ends, the kernel would send SIGHUP and SIGCONT to all of
    # it, frozen processes and `make` among them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.sendall(NUMBER.pack(pid))
    if request["tied"]:
        threading.Thread(target=end_with, args=(connection, pid), daemon=True).start()
    connection.sendall(NUMBER.pack(os.waitpid(pid, 0)[1]))
    os._exit(0)


def end_with(connection, pid):
    """Kill the child when the one that asked for it is gone."""
    with contextlib.suppress(ConnectionError):  # it may not have heard the pid
        connection.recv(1)
    os.kill(pid, signal.SIGKILL)


def become(request):
    """Be the program `python WORDS...`, from here on to the end of the process."""
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # as this environment has it
    sys.stdout.reconfigure(
        line_buffering=bool(os.environ.get("PYTHONUNBUFFERED")) or sys.stdout.isatty()
    )
    how, *words = request["words"]
    if how == "-u":
        sys.stdout.reconfigure(write_through=True)
        how, *words = words
    sys.path[0] = os.getcwd() if how in ("-c", "-m") else os.path.dirname(how)
    if how == "-c":
        sys.argv = ["-c", *words[1:]]
        del sys.modules["__main__"].__file__
        exec(compile(words[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif how == "-m":
        sys.argv = words
        sys.modules.pop(words[0], None)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [how, *words]
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a fork that ends need not look through all of it
    become(serve(sys.argv[1]))
