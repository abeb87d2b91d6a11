"""Faults between machines: a line that is cut, one that carries one way only, a swarm in halves."""

import time

from farflock.experiments.bench.plays.play import Play, Seconds
from farflock.experiments.bench.workers.hosted_swarm import HostedSwarm, Setting

LIMIT_S = 120.0  # for progress
CUT_S, ONE_WAY_S, SPLIT_S = 30.0, 40.0, 45.0
# Where the times of e28b7fbf come from; the load was 15 to 85 on two cores, so they are above.
FAULTS = "e28b7fbf on 2026-11-22, once, six hosts with 50 ms one way and 20 Mbit/s, under load"


def cut(swarm: HostedSwarm) -> Seconds:
    """Cut one host off from all others, and give its line back."""
    lost, others = [swarm.last], swarm.others(swarm.last)
    swarm.part(lost, others)
    until_s = time.monotonic() + CUT_S
    gone_on_s = swarm.progress(others, CUT_S)
    time.sleep(max(0.0, until_s - time.monotonic()))
    swarm.mend(lost, others)
    return {"cut": gone_on_s, "cut.back": swarm.counts([swarm.last], LIMIT_S)}


def one_way(swarm: HostedSwarm) -> Seconds:
    """Let a host hear nothing of another one that hears it."""
    deaf, speaker = [swarm.last], [swarm.nodes[1]]
    swarm.deafen(deaf, speaker)
    until_s = time.monotonic() + ONE_WAY_S
    gone_on_s = swarm.progress(swarm.nodes, ONE_WAY_S)
    time.sleep(max(0.0, until_s - time.monotonic()))
    swarm.hear(deaf, speaker)
    return {"one-way": gone_on_s, "one-way.back": swarm.whole(LIMIT_S)}


def split(swarm: HostedSwarm) -> Seconds:
    """Part the swarm into halves, and let them find each other again."""
    half = len(swarm.nodes) // 2
    one, other = swarm.nodes[:half], swarm.nodes[half:]
    swarm.part(one, other)
    until_s = time.monotonic() + SPLIT_S
    gone_on_s = swarm.progress(one, SPLIT_S)
    time.sleep(max(0.0, until_s - time.monotonic()))
    swarm.mend(one, other)
    return {"split": gone_on_s, "split.back": swarm.whole(LIMIT_S)}


PLAYS = (
    Play(
        "cut",
        f"one of four hosts cut off for {CUT_S:.0f} s: the others' second round; .back: until its "
        "work counts, from the moment that the line is back",
        cut,
        before={"cut": 4.7, "cut.back": 13.5},
        source=f"{FAULTS}, 60 s",
    ),
    Play(
        "one-way",
        f"one of four hosts hears nothing of another for {ONE_WAY_S:.0f} s, which hears it: the "
        "second round of all; .back: a round of all, once it hears again",
        one_way,
        before={"one-way": 3.7},
        source=FAULTS,
    ),
    Play(
        "split",
        f"3 : 3 for {SPLIT_S:.0f} s: the second round of the founder's half; .back: a round of all "
        "six after healing",
        split,
        Setting(nodes=6),
        before={"split.back": 20.5},
        source=f"{FAULTS}, 75 s",
    ),
)
