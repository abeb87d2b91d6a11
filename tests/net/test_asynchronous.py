"""An asynchronous pipeline of real processes, with passes of several rounds in flight.

A server is killed and another one comes; each microbatch counts once, and no later than it may.
"""

import collections
import signal

import pytest
from worlds.node_processes import BATCH, FOREVER, STEP, described, fallen

pytestmark = [pytest.mark.net, pytest.mark.long]

STALENESS = 5


def delays(node):
    """The greatest and the mean delay of the gradients by stage and round, as a server measured."""
    found = {
        (entry["stage"], entry["round"]): (entry["most"], entry["mean"])
        for entry in node.events("delay")
    }
    assert len(found) == len(node.events("delay")), "a round was measured twice"
    return found


def test_a_server_is_killed_and_another_comes_while_passes_of_several_rounds_are_on_their_way(run):
    terms = {"staleness": STALENESS, "asynchronous": {"correction": "none"}}
    founder = run.found(described(5, FOREVER, stages=2, **terms))
    run.servers(2, first=2)
    trainer = run.join("trainer", "--role", "trainer")
    trainer.reaches(lambda status: status["tokens"] >= 10 * STEP)
    (victim, survivor) = run.serving(1)
    victim.kill()
    newcomer = run.join("newcomer", "--role", "stage:1")
    newcomer.reaches(
        lambda status: status["work"]["merged"] >= 3 and len(newcomer.events("delay")) >= 3
    )
    founder.reaches(lambda status: status["tokens"] >= 40 * STEP)
    for node in (alive := run.alive()):
        node.process.send_signal(signal.SIGTERM)
    for node in alive:
        code, said = node.ends()
        assert (code, said["ended"]) == (0, "left"), node.log[-2000:]

    for node in (founder, trainer):
        work = node.status()["work"]
        assert (work["doubled"], work["in doubt"]) == (0, 0)
        assert work["dropped"] < work["microbatches"]
        assert work["microbatches"] > BATCH
    assert fallen(trainer) > 0.7
    measured = collections.defaultdict(set)
    for node in run.nodes:
        for where, delay in delays(node).items():
            measured[where].add(delay)
    assert all(len(said) == 1 for said in measured.values()), (
        "servers of a stage measured a round differently"
    )
    most = [delay for said in measured.values() for delay, _ in said]
    assert 1 <= max(most) <= STALENESS
    assert {stage for stage, _ in measured} == {0, 1}
    assert min(delays(newcomer)) > max(delays(victim)), "it takes the stage up where it is"
    assert len(delays(newcomer).keys() & delays(survivor).keys()) >= 2
