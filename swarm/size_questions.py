"""Questions after the size of a chunk whose name alone is known: the holder sends its beginning,
and with that its size."""

import asyncio

from farflock.swarm.chunk_server import PIECE_BYTES, ChunkCarrier
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Miss, Piece, Want


class SizeQuestions:
    """The open questions of one peer."""

    def __init__(self, carrier: ChunkCarrier) -> None:
        self._carrier = carrier
        self._asked: dict[tuple[PeerId, bytes], asyncio.Future[int]] = {}

    async def ask(self, digest: bytes, holder: PeerId, timeout_s: float) -> int | None:
        """Return the bytes of a chunk; None if this peer does not have it, or does not answer in
        time."""
        answer = self._asked[holder, digest] = asyncio.get_running_loop().create_future()
        try:
            self._carrier.send(holder, Want(digest, 0, PIECE_BYTES))
            async with asyncio.timeout(timeout_s):
                return await answer or None
        except TimeoutError:
            return None
        finally:
            del self._asked[holder, digest]

    def heard(self, sender: PeerId, message: Want | Piece | Miss) -> bool:
        """Return whether this message answers a question; then nothing else needs it."""
        if isinstance(message, Want) or (sender, message.digest) not in self._asked:
            return False
        answer = self._asked[sender, message.digest]
        if not answer.done():
            answer.set_result(message.size if isinstance(message, Piece) else 0)
        return True
