"""The actions of an exchange's machine: messages to send, bundles to fetch and to reduce."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from farflock.swarm.messages import Message


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch this content of `bundle` from any of these members.

    `holders` is called again during the fetch, since more members may get it."""

    bundle: int
    digest: bytes
    size: int
    holders: Callable[[], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce these members' contents of a bundle: (member, weight, digest)."""

    bundle: int
    inputs: tuple[tuple[int, float, bytes], ...]


Action = tuple[int, Message] | Fetch | Reduce  # the tuple is (receiver's index, message)


class Actions:
    """The actions of one machine, in the order in which its parts queued them."""

    def __init__(self, others: Sequence[int]) -> None:
        self._others = others  # the other contributors
        self._actions: list[Action] = []

    def add(self, action: Action) -> None:
        """Queue one more action."""
        self._actions.append(action)

    def send(self, sends: Iterable[tuple[int, Message]]) -> None:
        """Queue messages, given with their receivers' indices."""
        self._actions += sends

    def to_others(self, message: Message) -> None:
        """Queue a message to all other contributors."""
        self.send((member, message) for member in self._others)

    def take(self) -> list[Action]:
        """Return the actions queued since the last call."""
        actions, self._actions = self._actions, []
        return actions
