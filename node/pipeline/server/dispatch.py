"""Call handlers for a node that serves several stages, and for one that serves no passes."""

from collections.abc import Mapping

from farflock.node.pipeline.passes.requests import BadRequest, Refused, decode_request, encode
from farflock.node.pipeline.server.server import StageServer
from farflock.swarm.links import PeerId
from farflock.swarm.peer.calls.call_server import CallReply


class Dispatch:
    """A handler that passes each call to the server of its stage. If there is none, the first
    server gets the call and refuses it."""

    def __init__(self, servers: Mapping[int, StageServer]) -> None:
        self._servers, self._first = dict(servers), next(iter(servers.values()))

    def admit(self, caller: PeerId, request: bytes, sizes: tuple[int, ...]) -> bytes | None:
        """Admit or refuse a call, as `StageServer.admit` does."""
        return self._server(request).admit(caller, request, sizes)

    async def serve(self, caller: PeerId, request: bytes, payloads: tuple[bytes, ...]) -> CallReply:
        """Serve a call, as `StageServer.serve` does."""
        return await self._server(request).serve(caller, request, payloads)

    def _server(self, request: bytes) -> StageServer:
        try:
            return self._servers.get(decode_request(request).stage, self._first)
        except BadRequest:
            return self._first


class Closed:
    """A handler that refuses every call, for one given reason."""

    def __init__(self, why: str) -> None:
        self._refusal = encode(Refused(why))

    def admit(self, caller: PeerId, request: bytes, sizes: tuple[int, ...]) -> bytes:
        """Refuse the request."""
        return self._refusal

    async def serve(self, caller: PeerId, request: bytes, payloads: tuple[bytes, ...]) -> CallReply:
        """Refuse the request, although `admit` has admitted none."""
        return CallReply(self._refusal)
