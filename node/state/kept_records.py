"""The signed records of other members, in a node's folder: how to reach all of them at the next
start, where an invite names three."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from farflock.node.durable import write_durably
from farflock.swarm.messages import MAX_MEMBERS, MAX_RECORD_BYTES

MAX_FILE_BYTES = 320 * 1024  # more than `MAX_MEMBERS` of the longest

_Blob = Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
_Blobs = Annotated[list[_Blob], msgspec.Meta(max_length=MAX_MEMBERS)]


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """The file of the records of one node's partners."""

    path: Path

    def keep(self, records: Sequence[bytes]) -> None:
        """Write these; a full disk must not end the node."""
        with contextlib.suppress(OSError):
            write_durably(self.path, msgspec.msgpack.encode(list(records[:MAX_MEMBERS])))

    def read(self) -> list[bytes]:
        """Return the records, whose signatures are yet to be checked; none if there is no file, or
        if it cannot be read."""
        try:
            if self.path.stat().st_size > MAX_FILE_BYTES:
                return []
            return msgspec.msgpack.decode(self.path.read_bytes(), type=_Blobs)
        except (OSError, msgspec.MsgspecError):
            return []
