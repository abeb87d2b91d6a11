"""The role of a member in a run with stages: it serves one stage, all (a full replica), or none.

A stage's group is a function of the view: agreeing on the members is agreeing on who serves what.
"""

import re

from farflock.swarm.messages import MAX_STAGES

EVERY = -1  # a full replica serves every stage
NOTHING = -2  # trainers and observers; they vote like all others

_STAGE = re.compile(r"stage:(0|[1-9][0-9]{0,3})")


def role_of(stage: int) -> str:
    """Return the role as written in a record: `replica`, `trainer`, or `stage:3`."""
    return {EVERY: "replica", NOTHING: "trainer"}.get(stage, f"stage:{stage}")


def stage_of(role: str) -> int:
    """Return the stage that a role serves; `NOTHING` for an unknown role."""
    if role == "replica":
        return EVERY
    found = _STAGE.fullmatch(role)
    return int(found[1]) if found and int(found[1]) < MAX_STAGES else NOTHING


def is_role(role: str) -> bool:
    """Return whether a text is a role as `role_of` writes it."""
    return role_of(stage_of(role)) == role
