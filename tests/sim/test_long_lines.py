"""Pipelines over lines of half a second: a message is a second on its way,
an agreement four and more."""

import asyncio

import pytest
from worlds.pipeline_audit import Audit, pipeline, plan
from worlds.waiting import until

from farflock.node.run.terms import Asynchronous, ServerTerms, TrainerTerms
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.swarm.sim.network import LinkModel

pytestmark = pytest.mark.usefixtures("quiet_log")

BATCH, STEPS, STALENESS = 8, 2, 3
TOTAL = 8 * BATCH * STEPS  # tokens
SLOW = LinkModel(latency_s=0.5)  # of each of the two lines between peers
# For a microbatch: a call takes four seconds and more, its passes six of them, a round as long
# again.
PATIENCE_S = 150.0


def audit(seed, asynchronous, limit_s=400.0):
    terms = {
        "server": ServerTerms(lease_s=20.0, staleness=STALENESS),
        "trainer": TrainerTerms(
            window=64, kept=128, forward_timeout_s=8.0, backward_timeout_s=12.0
        ),
        "asynchronous": asynchronous,
    }
    world = PipelineWorld(parts(3, 2, 1), TOTAL, SLOW, limit_s=limit_s, view_s=2.0)
    return Audit(plan(seed, TOTAL, rate=0.3), pipeline(3, BATCH, **terms), world)


@pytest.mark.parametrize(
    ("seed", "asynchronous"),
    [
        (0, None),
        pytest.param(3, Asynchronous(STALENESS + 1), marks=pytest.mark.ci_more),
    ],
    ids=["waits", "late"],
)
def test_all_are_let_in_and_train_and_each_gradient_counts_once(seed, asynchronous):
    """Members that propose a view every two, three or four seconds would overtake each other for
    ever."""
    one, admitted_s = audit(seed, asynchronous), []

    async def watch(sim):
        await until(lambda: sim.settled, every_s=0.5)
        admitted_s.append(asyncio.get_running_loop().time())

    one.run(watch).check().check_finished(PATIENCE_S)
    assert admitted_s[0] < 90.0
    assert len(one.finished()) >= BATCH
    served = {life.stage: 0 for life in one.lives}
    for life, staged, _ in one.taken:
        served[life.stage] += staged.tokens
    assert min(served.values()) >= TOTAL
