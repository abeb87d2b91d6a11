"""The role of a member in a run with stages: it serves one stage, all (a full replica), or none. In
a run of whole models each is a full replica, of which some have no room to evaluate the run.

A stage's group is a function of the view: agreeing on the members is agreeing on who serves what.
"""

import re

from farflock.swarm.messages import MAX_STAGES

EVERY = -1  # a full replica serves every stage
NOTHING = -2  # trainers and observers; they vote like all others
UNMEASURED = -3  # a full replica that is never drawn to evaluate the run
_WORDS = {EVERY: "replica", NOTHING: "trainer", UNMEASURED: "replica, never evaluates"}

_STAGE = re.compile(r"stage:(0|[1-9][0-9]{0,3})")


def role_of(stage: int) -> str:
    """Return the role as written in a record: `replica`, `trainer`, `stage:3`, or the words for a
    replica that does not evaluate."""
    return _WORDS.get(stage, f"stage:{stage}")


def stage_of(role: str) -> int:
    """Return the stage that a role serves; `NOTHING` for an unknown role."""
    for stage, words in _WORDS.items():
        if role == words:
            return stage
    found = _STAGE.fullmatch(role)
    return int(found[1]) if found and int(found[1]) < MAX_STAGES else NOTHING
