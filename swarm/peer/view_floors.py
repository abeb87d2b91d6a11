"""What a member accepts of a next view, and how it signs for it."""

from collections.abc import Callable

from farflock.swarm.identity import Identity
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol import views
from farflock.swarm.protocol.axes import Floor
from farflock.swarm.protocol.views import View


class ViewFloors:
    """A view must begin after every round that this member took part in under the view before it.

    `begins` says where a view that may begin at a floor should begin.
    """

    # Members are at different rounds: each tells its floor before a view is put forward.
    in_step = False

    def __init__(self, port: PeerContext, begins: Callable[[Floor], Floor]) -> None:
        self._port, self._begins = port, begins

    def floor(self, value: bytes) -> Floor:
        """Nothing if the view can be accepted here, else the least rounds that could be."""
        return self._port.views.floor(value, self._port.floor)

    def least(self) -> Floor:
        """The first rounds that I have no part in."""
        return self._port.floor

    def lifted(self, value: bytes, floor: Floor) -> bytes:
        """The view, begun late enough for all that have answered."""
        return views.lifted(value, self._begins(floor))


class ViewSignatures:
    """Signatures of a view's members under the next view, which convince outsiders."""

    def __init__(self, run: str, identity: Identity, view: View) -> None:
        self._identity, self._domain = identity, views.signature_domain(run)
        self._checker = views.checker(run, view)

    def sign(self, text: bytes) -> bytes:
        """My signature."""
        return self._identity.sign(self._domain, text)

    def checks(self, member: int, text: bytes, proof: bytes) -> bool:
        """Whether the member of the view, by index, has signed this."""
        return self._checker(member, text, proof)
