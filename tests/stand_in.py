"""A program that a shell, torchrun or a benchmark starts in the place of Python: it has a nursery
fork itself, and ends as the fork does.

    python -IS tests/stand_in.py SOCKET WORDS...

It passes SIGINT and SIGTERM on. When it is killed, the keeper kills the fork.
"""

import json
import os
import signal
import socket
import struct
import sys

NETWORK = "/proc/self/ns/net"  # of Linux; the fork enters it


def main(path, *words):
    request = {
        "words": words,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "session": False,
        "tied": True,
    }
    files = [0, 1, 2]
    if os.path.exists(NETWORK):
        files.append(os.open(NETWORK, os.O_RDONLY))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], files)
        pid = heard(connection)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, frame: os.kill(pid, number))
        code = os.waitstatus_to_exitcode(heard(connection))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def heard(connection):
    """Return the next number that the keeper says."""
    return struct.unpack("<q", connection.recv(8, socket.MSG_WAITALL))[0]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
