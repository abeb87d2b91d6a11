"""Reboots and power cuts: members whose processes end at once, and start again in their folders."""

import signal
import time
from collections.abc import Sequence
from functools import partial

from farflock.experiments.bench.plays.play import Play, Seconds
from farflock.experiments.bench.workers.hosted_swarm import (
    NEVER,
    HostedNode,
    HostedSwarm,
    Round,
    Setting,
)
from farflock.experiments.measure.metric import NotMeasured

LIMIT_S = 180.0  # for a counted round, from the last one's start
AWAY_S = 5.0
APART_S = 3.0  # between the starts of two that come back
REPRO = "e28b7fbf, found/03: none in 200 s"
TWO, THREE = Setting(nodes=2), Setting(nodes=3)
STAGES = Setting(nodes=6, stages=3, step_s=1.0)
TWO_PROGRAMS = Setting(nodes=2, programs=True)
THREE_PROGRAMS = Setting(nodes=3, programs=True)


def _ended(name: str, places: Sequence[int], swarm: HostedSwarm) -> Seconds:
    """Kill the nodes at these places at once, and start them again in this order."""
    nodes = [swarm.nodes[place] for place in places]
    for node in nodes:
        node.kill()
    time.sleep(AWAY_S)
    return {name: _back(swarm, nodes)}


def _back(swarm: HostedSwarm, nodes: Sequence[HostedNode]) -> float:
    """Start nodes one after another; return the seconds from the start of the last one."""
    for node in nodes[:-1]:
        swarm.start_again(node)
        time.sleep(APART_S)
    swarm.start_again(nodes[-1])
    return swarm.whole(LIMIT_S)


def _without_founder(name: str, swarm: HostedSwarm) -> Seconds:
    """Let the founder leave; then a power cut strikes the others, and they come back without it."""
    founder, *others = swarm.nodes
    names = {node.peer for node in others}

    def are_counted(rounds: Sequence[Round]) -> bool:
        return any(names == set(each.participants) for each in rounds)

    founder.signal(signal.SIGTERM)
    if founder.code(LIMIT_S) != 0 or swarm.seconds(others, are_counted, LIMIT_S) == NEVER:
        raise NotMeasured("the founder did not leave, or the others did not go on without it")
    for node in others:
        node.kill()
    time.sleep(AWAY_S)
    swarm.start_again(others[1])
    time.sleep(APART_S)
    swarm.start_again(others[0])
    seconds = swarm.seconds(others, are_counted, LIMIT_S)
    swarm.start_again(founder)  # for another run
    return {name: seconds}


def _play(
    name: str,
    what: str,
    places: Sequence[int],
    setting: Setting,
    before_s: float | None = None,
    source: str = "",
) -> Play:
    before = {} if before_s is None else {name: before_s}
    return Play(name, what, partial(_ended, name, places), setting, before, source)


UNTIL = "until a round of all, from the start of the last one"


def _program(name: str, what: str, places: Sequence[int], setting: Setting) -> Play:
    """Return the row of programs that train with `SwarmOptimizer`."""
    return _play(f"program-{name}", f"SwarmOptimizer: {what}: {UNTIL}", places, setting)


PLAYS = (
    _play("founder", f"the founder of two is rebooted: {UNTIL}", [0], TWO, NEVER, REPRO),
    _play("joiner", f"the joiner of two is rebooted: {UNTIL}", [1], TWO, 14.0, "e28b7fbf, once"),
    _play("both", f"both of two, the founder first: {UNTIL}", [0, 1], TWO),
    _play("both-reversed", f"both of two, the joiner first: {UNTIL}", [1, 0], TWO),
    _play("power", f"a power cut of three, who start in reverse: {UNTIL}", [2, 1, 0], THREE),
    Play(
        "power-without",
        "the founder of three leaves, then a power cut strikes the two others: until a round of "
        "both, from the start of the last one",
        partial(_without_founder, "power-without"),
        THREE,
        {},
        "",
    ),
    _play(
        "power-stages",
        "a power cut of six who serve three stages, and start in reverse: until two rounds at "
        "each, from the start of the last one",
        [5, 4, 3, 2, 1, 0],
        STAGES,
    ),
    _program("founder", "the founder of two is rebooted", [0], TWO_PROGRAMS),
    _program("joiner", "the joiner of two is rebooted", [1], TWO_PROGRAMS),
    _program("both", "both of two, the founder first", [0, 1], TWO_PROGRAMS),
    _program("both-reversed", "both of two, the joiner first", [1, 0], TWO_PROGRAMS),
    _program("power", "a power cut of three, who start in reverse", [2, 1, 0], THREE_PROGRAMS),
)
