"""The ports on which a node listened, in its folder: it takes them again, so it is found again."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from farflock.node.assembly.own_addresses import Listening
from farflock.node.durable import write_durably
from farflock.swarm.dht.files import PortTaken, refuse_taken_ports

MAX_FILE_BYTES = 1024

_Port = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]


class _Ports(msgspec.Struct):
    """The ports of the links and of the directory; 0: not known."""

    links: _Port = 0
    directory: _Port = 0


@dataclass(slots=True)
class KeptPorts:
    """The file of one node's ports."""

    path: Path

    def again(self, listening: Listening) -> Listening:
        """Return where to listen: where any free port would do (0), at the last one, if it is free
        now."""
        last = self._read()
        links, directory = listening.port, listening.dht_port
        # the links have the next port too, for bulk
        if not links and last.links and _are_free(listening, last.links, last.links + 1):
            links = last.links
        if not directory and _are_free(listening, last.directory):
            directory = last.directory
        return replace(listening, port=links, dht_port=directory)

    def keep(self, *, links: int = 0, directory: int = 0) -> None:
        """Write the ports that are taken now (0: the one of before stays)."""
        last = self._read()
        now = _Ports(links or last.links, directory or last.directory)
        if now != last:
            with contextlib.suppress(OSError):  # a full disk must not end the node
                write_durably(self.path, msgspec.json.encode(now))

    def _read(self) -> _Ports:
        try:
            if self.path.stat().st_size > MAX_FILE_BYTES:
                return _Ports()
            return msgspec.json.decode(self.path.read_bytes(), type=_Ports)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return _Ports()


def port_in(address: str) -> int:
    """Return the TCP port of a multiaddress; 0 if it has none."""
    words = address.split("/")
    following = words[words.index("tcp") + 1 :] if "tcp" in words else []
    return int(following[0]) if following and following[0].isdecimal() else 0


def _are_free(listening: Listening, *ports: int) -> bool:
    try:
        for port in ports:
            refuse_taken_ports(replace(listening, dht_port=port).directory)
    except PortTaken:
        return False
    return True
