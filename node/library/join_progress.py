"""The progress of an optimizer that joins a run, for its program: how much of the state is here."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from farflock.swarm.peer.snapshots import Snapshots
from farflock.swarm.peer.state_download import StateProgress

Listener = Callable[[StateProgress], None]

# Set in the program's thread; the background thread's tasks begin with a copy.
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def join_progress(listener: Listener) -> Iterator[None]:
    """Call `listener` with each verified part of the run's state, while a `SwarmOptimizer` that is
    made in the block joins a run.

    It gets a `StateProgress`, with `here_bytes`, `total_bytes`, `bytes_per_s`, `left_s` (None if
    nothing comes) and `rounds_share` of the line (0 until that is known), whose text is a line for
    people. It is called in another thread, and should return soon; what it raises ends the
    joining."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell_listener(snapshots: Snapshots) -> None:
    """Call the listener, if there is one, with the progress of the downloads."""
    listener, coming = _listener.get(), snapshots.coming
    if listener is not None and coming is not None:
        listener(coming)
