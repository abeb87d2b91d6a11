"""The state that a node holds, as it tells the other keys of its view
(docs/decisions/039-a-return.md)."""

from collections.abc import Callable

from msgspec.structs import replace

from farflock.node.train.driver import Driver, RunPosition
from farflock.optimizers.method import RandomGroups, State
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.compute import Compute
from farflock.swarm.messages import HeldState
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.protocol.axes import axis


class OwnHeldState:
    """The held state of one node: that of its last life until its streams are open, then the
    present one. `stage` is the one that its driver's rounds change (None: the whole model), and
    `read` reads the state, in the worker that applies results."""

    def __init__(
        self,
        context: PeerContext,
        driver: Driver,
        stage: int | None,
        compute: Compute,
        read: Callable[[], State],
    ) -> None:
        self._context, self._driver, self._stage = context, driver, stage
        self._compute, self._read = compute, read
        # What this node holds, once it is hashed, and the rounds with which it was.
        self._held, self._held_at = HeldState(0), dict[str, int]()
        self._is_hashing = False
        self.axis = axis(stage)

    def open(self) -> None:
        """Tell the others from now on what is here, as the streams have begun with it."""
        own = self._context.own
        self._held_at = {}  # another chain's state may be after equal rounds
        own.held[self.axis] = self._now
        if self._stage is None:  # a node that serves stages is open once all of them are
            own.tokens, own.is_open = lambda: self._driver.tokens, True

    async def recall(self, place: RunPosition, under: bytes) -> None:
        """Note that the method has the state of this node's last life, from this position, whose
        last round belonged to the view of this hash."""
        self._driver.begin(place.rounds, place.agreed_tokens)
        self._held, self._held_at = await self._compute(self._hashed)
        self.remember(replace(self._held, under=under if self._held.first else b""))

    def remember(self, held: HeldState) -> None:
        """Note what this node held in its last life."""
        self._context.own.held[self.axis] = lambda: held

    def place_in(self, begins: HeldState) -> RunPosition | None:
        """Return the position of the state of the last life if a return that begins so may go on
        from that here, else None. In pairs each peer's state may, but for that before the first
        round."""
        own, streams = self._context.own, self._driver.streams
        held = None if own.is_open else self.kept()
        if held is None:
            return None
        paired = bool(streams) and all(isinstance(each.group, RandomGroups) for each in streams)
        is_same = (held.first, held.state) == (begins.first, begins.state)
        return self._driver.position if is_same or (paired and held.first > 0) else None

    def kept(self) -> HeldState | None:
        """Return what this node holds, as far as that is known."""
        return self._context.own.held.get(self.axis, lambda: None)()

    @property
    def under(self) -> bytes:
        """The hash of the view to which the last round in this node's state belongs; empty before
        the first."""
        chain, last = self._context.chain, self._first_open() - 1
        view = None if chain is None or last < 0 else chain.at(last, self._stage)
        return b"" if view is None else view.hash

    def _first_open(self) -> int:
        """Return the first round that is not in this node's state."""
        rounds, streams = self._driver.position.rounds, self._driver.streams
        return min((rounds[each.key.stream] + each.stride for each in streams), default=0)

    def _now(self) -> HeldState | None:
        """Return what this node holds; None until it is hashed, which begins now. Where members'
        states differ, as in pairs, nothing is hashed, so it is known at once."""
        if not self._is_exact:
            return replace(self._after_rounds(b""), under=self.under)
        if self._held_at == self._driver.position.rounds:
            return replace(self._held, under=self.under)
        if not self._is_hashing:
            self._is_hashing = True
            self._context.spawn(self._hash())
        return None

    async def _hash(self) -> None:
        self._held, self._held_at = await self._compute(self._hashed)
        self._is_hashing = False

    def _hashed(self) -> tuple[HeldState, dict[str, int]]:
        """Hash the state, if all members' are equal, in the worker that applies results."""
        rounds = self._driver.position.rounds
        return self._after_rounds(state_hash(self._read()) if self._is_exact else b""), rounds

    def _after_rounds(self, state: bytes) -> HeldState:
        """Return what is held after the rounds that are in a state with this hash."""
        tokens = self._driver.position.agreed_tokens
        return HeldState(self._first_open(), state, tokens, axis=self.axis)

    @property
    def _is_exact(self) -> bool:
        return self._driver.method.equality == "exact"
