"""The moves of this folder's state machines: by a table, or not at all.

Each machine that has states to speak of (`closing`, `mean`, `decide`, `pair`) writes them down at
the top of its module as a mapping of (state, event) to the next state. Three rules make such a
table worth reading:

- A machine changes its state in one method, `_move`, which asks the table. What the table does not
  hold cannot happen: it is a bug of ours, so it fails an assertion. A peer's message is checked
  before it becomes an event, so that no peer can bring such a failure about.
- An event is something that has happened ("decided", "held"), never a wish.
- The tests walk each table: every state can be reached, and every transition is made by a real
  machine.

What is continuous (clocks, counts, sets of digests) is not a state. It decides when an event
happens.
"""

from collections.abc import Mapping
from typing import TypeVar

_State = TypeVar("_State")
_Event = TypeVar("_Event")


def after(table: Mapping[tuple[_State, _Event], _State], state: _State, event: _Event) -> _State:
    """The state that follows; `AssertionError` for a transition that the table does not hold."""
    following = table.get((state, event))
    assert following is not None, f"the table knows no {event!r} in state {state!r}: a bug of ours"
    return following
