"""The most that a member of a run may claim in a round, from the run's terms.

A claim above it is not an error at an honest peer, which leaves the surplus out: then tokens that
were trained are not counted, and the run lasts a little longer.
"""

from collections.abc import Mapping
from typing import Any

from farflock.node.run.composition import steps_of
from farflock.node.run.terms import RunPlan
from farflock.optimizers.method import Method
from farflock.swarm.messages import MAX_OFFERED_TOKENS
from farflock.swarm.protocol.entitlement import Entitlement

# Of the tokens that the terms expect of a member in a round: a machine with eight devices trains so
# many batches in the time in which the others train one.
FAST = 8
# In a user's own program steps may count any number of tokens, and it decides itself when to end.
MAX_TOKENS_OF_USERS = 2**30


def usual_tokens(step_tokens: int, options: Method | Mapping[str, Any]) -> int:
    """Return the most tokens that a member may claim for a round, if the manifest does not say."""
    return min(FAST * step_tokens * steps_of(options), MAX_OFFERED_TOKENS)


def entitlement_of(plan: RunPlan, step_tokens: int, method: Method) -> Entitlement:
    """Return what a member may claim where a whole step has so many tokens."""
    tokens = plan.max_tokens_per_round or usual_tokens(step_tokens, method)
    batch = plan.accumulate * plan.batch * plan.seq
    return Entitlement(tokens, _weight(method, tokens, tokens / step_tokens, tokens / batch))


def entitlement_of_users(tokens: int | None, method: Method) -> Entitlement:
    """Return what a member may claim in a run of a user's own model; each step counts once."""
    most, steps = tokens or MAX_TOKENS_OF_USERS, float(FAST * steps_of(method))
    return Entitlement(most, _weight(method, most, steps, steps))


def _weight(method: Method, tokens: int, steps: float, gradients: float) -> float:
    """Return the most that a contribution may weigh for each round, by what the method's weights
    count: 0 where every contribution weighs 1."""
    counted = "gradients" if method.keeps_gradients else getattr(method, "weights", "uniform")
    return {"tokens": float(tokens), "steps": steps, "gradients": gradients}.get(counted, 0.0)
