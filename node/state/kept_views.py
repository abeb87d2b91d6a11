"""The views that a peer knows, in its folder: whoever acted in one knows it in its next life too.

The file `views` is written, and on the disk, before anything is done in a new view.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from farflock.node.durable import write_durably
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, Signature
from farflock.swarm.protocol.views import KEPT_VIEWS, BadView, Chain, decode_certified, encode

# The newest one decides who may come back; older ones show where other chains part from this one.
MAX_VIEWS_BYTES = 1024 * 1024
MAX_FILE_BYTES = 2 * MAX_VIEWS_BYTES

log = logging.getLogger(__name__)

_Peer = Annotated[str, msgspec.Meta(max_length=64)]


class _Kept(msgspec.Struct, array_like=True):
    """The content of the file."""

    run: Annotated[str, msgspec.Meta(max_length=256)]
    views: Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=KEPT_VIEWS)]
    goodbyes: Annotated[dict[_Peer, Signature], msgspec.Meta(max_length=MAX_MEMBERS)]


@dataclass(slots=True)
class KeptViews:
    """The file of one peer's views."""

    path: Path
    _fails: bool = False

    def keep(self, chain: Chain) -> None:
        """Write the newest views, and goodbyes to the newest one, and wait until they are on the
        disk. A full disk must not end the node: it trains on, and may sign the return of a view
        after which it knew another one."""
        newest: list[bytes] = []
        room_bytes = MAX_VIEWS_BYTES
        for entry in reversed(chain.views):
            raw = encode(entry)
            room_bytes -= len(raw)
            if newest and room_bytes < 0:
                break
            newest.insert(0, raw)
        kept = _Kept(chain.run, newest, chain.goodbyes)
        try:
            write_durably(self.path, msgspec.msgpack.encode(kept))
            self._fails = False
        except OSError as error:
            if not self._fails:
                log.warning("cannot write %s: %s; training goes on", self.path, error.strerror)
            self._fails = True

    def retry(self, chain: Chain) -> None:
        """Write the newest views if that failed the last time: a disk has room again."""
        if self._fails:
            self.keep(chain)

    def read(self, run: str) -> Chain | None:
        """Return the views of this run, and the goodbyes to the newest one; None if there are none,
        or if they cannot be read."""
        try:
            if self.path.stat().st_size > MAX_FILE_BYTES:
                return None
            kept = msgspec.msgpack.decode(self.path.read_bytes(), type=_Kept)
            first, *others = map(decode_certified, kept.views)
            chain = Chain(run, [first])
            for entry in others:
                chain.extend(entry)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, BadView):
            return None
        chain.goodbyes.update(kept.goodbyes)
        return chain if kept.run == run else None

    def alone(self, run: str, me: PeerId) -> bool:
        """True if nobody else is in the newest view but those that said goodbye."""
        chain = self.read(run)
        if chain is None:
            return False
        return set(chain.newest.peers) - set(chain.goodbyes) <= {me}
