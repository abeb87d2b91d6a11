"""A chunk that is being fetched, piece by piece, and how long its next piece may take."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from farflock.swarm.byte_budget import ByteBudget
from farflock.swarm.chunk_server import PIECE_BYTES
from farflock.swarm.links import PeerId
from farflock.swarm.pace import Probing, Watch

GAP_S = 0.3  # maximum gap between consecutive pieces of one request
MAX_AHEAD_S = 60.0  # that pieces of other holders may take before those of one


@dataclass(slots=True)
class Fetching:
    """A chunk being fetched."""

    digest: bytes
    size: int  # 0 until there is room for it
    missing: set[int]  # indices of missing units
    # whether several holders may serve one copy: faster, but then a false copy has no known source
    mixing: bool
    without: set[PeerId]  # peers that answered that they do not have the chunk
    gently: bool = False  # few pieces are asked for at once
    watch: Watch | None = None  # of the caller, if it is fetched gently
    # who said that the chunk has another size; None: a piece that says so is dropped, and no more
    liars: set[PeerId] | None = None
    probing: Probing | None = None  # of what is due, if there is a watch
    due: set[int] = field(default_factory=set)  # the missing units asked for now
    # pieces received, by the index of their first unit
    pieces: dict[int, bytes | memoryview] = field(default_factory=dict)
    asked: set[PeerId] = field(default_factory=set)  # pieces from any other peer are dropped
    refused: set[PeerId] = field(default_factory=set)  # not asked again while others are left
    served: set[PeerId] = field(default_factory=set)
    holder: PeerId | None = None  # the holder being asked now
    alone: bool = False  # nobody else could be asked
    others: Sequence[PeerId] = ()  # that may have it, slow ones too
    window: ByteBudget | None = None  # the holder's window
    room_bytes: int = 0  # part of the window reserved for bytes it has not sent yet
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin_again(self) -> None:
        """Discard all pieces received so far."""
        self.missing = set(range(pieces_of(self.size)))
        self.pieces.clear()
        self.served.clear()

    def whole(self) -> bytes:
        """Return the chunk, of which nothing is missing; the pieces are dropped."""
        data = b"".join(self.pieces[index] for index in sorted(self.pieces))
        self.pieces.clear()
        return data

    def fill(self, start: int, body: memoryview | bytes) -> int:
        """Keep the missing units of a piece; return their bytes."""
        first = start // PIECE_BYTES
        units = set(range(first, first + pieces_of(len(body))))
        if units <= self.missing:
            self.pieces[first], filled = body, len(body)
        else:
            new = units & self.missing
            ends = {index: (index - first + 1) * PIECE_BYTES for index in new}
            kept = {index: body[end - PIECE_BYTES : end] for index, end in ends.items()}
            self.pieces |= kept
            filled = sum(map(len, kept.values()))
        self.missing -= units
        self.due -= units
        return filled

    def blame(self, sender: PeerId) -> None:
        """Ask a peer that sent nonsense for nothing more, where that is known to be no accident."""
        if self.liars is not None:
            self.liars.add(sender)
            self.refused.add(sender)
            self.changed.set()

    def give(self, size: int) -> None:
        """Return `size` received bytes to the holder's window, for other fetches to use."""
        given = min(size, self.room_bytes)
        self.room_bytes -= given
        if self.window is not None:
            self.window.give(given)


def ahead_s(under_way: Iterable[Fetching], bytes_per_s: float, more_bytes: int = 0) -> float:
    """Return how long a line takes for what is asked for of all holders, and for more bytes: a
    holder's next piece may be behind all of it. It counts only where that is long; 0 if the speed
    of the line is not known."""
    owed_bytes = more_bytes + sum(min(len(each.due) * PIECE_BYTES, each.size) for each in under_way)
    seconds = owed_bytes / bytes_per_s if bytes_per_s else 0.0
    return min(seconds, MAX_AHEAD_S) if seconds > GAP_S else 0.0


def pieces_of(size: int) -> int:
    """Return the number of units of so many bytes."""
    return -(-size // PIECE_BYTES)
