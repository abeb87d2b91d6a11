"""The part of a member in a run whose model is cut into stages: it serves one of them, all (a full replica), or none.

A stage's group is a function of the view, so that who serves what is agreed upon with who is there.
"""

import re

from farflock.swarm.messages import MAX_STAGES

EVERY = -1  # a full replica has a part in each stage
NOTHING = -2  # trainers and lookers-on; they vote like everybody

_STAGE = re.compile(r"stage:(0|[1-9][0-9]{0,3})")


def role_of(stage: int) -> str:
    """The role as a record says it: `replica`, `trainer`, or `stage:3`."""
    return {EVERY: "replica", NOTHING: "trainer"}.get(stage, f"stage:{stage}")


def stage_of(role: str) -> int:
    """The stage that a record's role serves; a role that is not known here serves nothing."""
    if role == "replica":
        return EVERY
    found = _STAGE.fullmatch(role)
    return int(found[1]) if found and int(found[1]) < MAX_STAGES else NOTHING
