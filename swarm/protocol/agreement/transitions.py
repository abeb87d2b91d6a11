"""The transitions of this folder's state machines: by a table, or not at all.

Each machine with notable states (`closing`, `mean`, `decide`, `pair`) defines them at the top of
its module as a mapping of (state, event) to the next state. Three rules make such a table worth
reading:

- A machine changes its state in one method, `_move`, which asks the table. A transition not in the
  table cannot happen: it is a bug of ours, so it fails an assertion. A peer's message is checked
  before it becomes an event, so no peer can cause such a failure.
- An event is something that has happened ("decided", "held"), never a request.
- The tests walk each table: every state can be reached, and a real machine makes every transition.

Continuous quantities (clocks, counts, sets of digests) are not states. They decide when an event
happens.
"""

from collections.abc import Mapping
from typing import TypeVar

_State = TypeVar("_State")
_Event = TypeVar("_Event")


def after(table: Mapping[tuple[_State, _Event], _State], state: _State, event: _Event) -> _State:
    """Return the next state; raise `AssertionError` for a transition not in the table."""
    following = table.get((state, event))
    assert following is not None, f"a bug: {event!r} is not in the table for state {state!r}"
    return following
