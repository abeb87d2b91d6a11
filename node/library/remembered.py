"""The swarm's part of an optimizer's state dict: what a lone peer needs to go on as if it had never
stopped."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from farflock.node.errors import Usage
from farflock.node.train.driver import Pending, RunPosition
from farflock.optimizers.method import ExchangeKey, RandomGroups, Result

if TYPE_CHECKING:
    from farflock.node.library.presence import OptimizerNode


class Remembered(msgspec.Struct, frozen=True):
    """The swarm's part of a state dict, without its tensors; `pending` are (stream, round) keys."""

    step: int
    place: RunPosition
    pending: list[tuple[str, int]]


TENSORS = ("method", "owed")  # its other keys


async def remember(here: "OptimizerNode") -> dict[str, Any]:
    """Return the part of the state that `recall` restores."""
    loop = here.loop
    method, replica = loop.driver.method, loop.driver.replica
    tensors = await loop.compute(lambda: {**method.snapshot(replica), **method.personal(replica)})
    pending = [(key.stream, key.round) for key in loop.driver.pending]
    facts = Remembered(loop.step, loop.driver.position, pending)
    kept = {name: x.cpu() for name, x in tensors.items()}
    return {"method": kept, "owed": loop.state_sync.feedback, **msgspec.to_builtins(facts)}


async def recall(here: "OptimizerNode", swarm: dict[str, Any]) -> None:
    """Restore it; raise `Usage` if this peer has made a step, or if it does not fit."""
    loop = here.loop
    if made := loop.step - here.began_at:
        why = f"this optimizer has already made {made} steps"
        raise Usage("the state cannot be loaded now", why, "load it before the first step")
    driver = loop.driver
    try:
        facts = msgspec.convert(
            {name: value for name, value in swarm.items() if name not in TENSORS}, Remembered
        )
        await loop.compute(lambda: driver.method.resume(driver.replica, swarm["method"]))
        place = facts.place
    except (KeyError, TypeError, ValueError) as error:
        raise Usage(
            "the state does not fit this run",
            str(error),
            "load a state that this program saved",
        ) from error
    templates = {
        template.key.stream: template for template in driver.method.streams(driver.replica)
    }
    open_ones = []
    for stream, number in facts.pending:  # its outcome is lost: report it failed, once
        exchange = replace(templates[stream], key=ExchangeKey(stream, number))
        last = number if isinstance(exchange.group, RandomGroups) else place.rounds[stream]
        open_ones.append(
            Pending(exchange, facts.step, 0.0, Result("failed", last + exchange.stride))
        )
    driver.load_state(open_ones)
    loop.step = facts.step
    loop.state_sync.load_state(place, swarm.get("owed", {}))
