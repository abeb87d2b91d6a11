"""Hostile callers of a pipeline's servers: no gradient of a stranger counts, and honest trainers
are about as fast as without them."""

import asyncio

import pytest
from adversaries.pipeline_callers import NeverConfirms, Stranger
from worlds.pipeline_audit import Audit, pipeline, plan
from worlds.waiting import until

from farflock.node.run.terms import ServerTerms
from farflock.node.simulate.pipeline import PipelineWorld, parts

pytestmark = pytest.mark.usefixtures("quiet_log")

STAGES, SERVERS, BATCH = 3, 2, 8
FOREVER = 10**9  # tokens of runs that a test ends
FORWARD_S = 0.25
WARM_S, MEASURED_S = 10.0, 25.0


class Attacked:
    """A run with a hostile peer, or with none: what it got, and the honest trainers' microbatches
    in the same seconds."""

    def __init__(self, adversary=None, trainers=2, **options):
        self.options = options
        self.adversary, self.hostile, self.finished = adversary, None, 0
        roles = parts(STAGES, SERVERS, trainers, FORWARD_S)
        world = PipelineWorld(roles, FOREVER, view_s=2.0, limit_s=600.0)
        terms = ServerTerms(lease_s=8.0)
        self.audit = Audit(plan(3, FOREVER), pipeline(STAGES, BATCH, server=terms), world)
        self.audit.run(self._during)

    async def _during(self, sim):
        await until(lambda: sim.settled)
        if self.adversary is None:
            await asyncio.sleep(WARM_S)
            await self._measure(sim)
        else:
            self.hostile = self.adversary(self.audit, **self.options)
            async with self.hostile.attacking():
                await asyncio.sleep(WARM_S)
                await self._measure(sim)
        sim.end()

    async def _measure(self, sim):
        before = self._count(sim)
        await asyncio.sleep(MEASURED_S)
        self.finished = self._count(sim) - before

    def _count(self, sim):
        trainers = [node.trainer for node in sim.nodes.values() if node.trainer is not None]
        return sum(trainer.commits.finished for trainer in trainers)

    @property
    def computed(self):
        """The passes that servers computed for the hostile peer."""
        return self._of_hostile(key for life in self.audit.lives for key in life.computed)

    @property
    def merged(self):
        """Its gradients that servers merged."""
        return self._of_hostile(key for life in self.audit.lives for key in life.merged)

    @property
    def named(self):
        """Its microbatches that rounds named."""
        rounds = [keys for named in self.audit.named.values() for keys in named.values()]
        return self._of_hostile(key for keys in rounds for key in keys)

    def _of_hostile(self, keys):
        return [key for key in keys if key[0] == self.hostile.me]


@pytest.fixture(scope="module")
def in_peace():
    return Attacked()


@pytest.mark.parametrize(
    ("stage", "scale"),
    [
        pytest.param(STAGES - 1, 1.0, id="its own target"),
        pytest.param(0, 1e6, id="huge gradients", marks=pytest.mark.ci_more),
    ],
)
def test_no_gradient_of_a_stranger_counts_and_nobody_is_slower(in_peace, stage, scale):
    attacked = Attacked(Stranger, stage=stage, scale=scale)
    assert (attacked.computed, attacked.merged, attacked.named) == ([], [], [])
    assert attacked.hostile.answers.keys() == {"NotAdmitted"}
    assert attacked.hostile.answers.total() > 100, "it did not try"
    dropped = [
        node.peer.context.counters["dropped: call of a stranger"]
        for node in attacked.audit.sim.nodes.values()
        if any(serving.index == stage for serving in node.servings)
    ]
    assert min(dropped) > 50
    assert attacked.finished >= 0.95 * in_peace.finished
    attacked.audit.check()


@pytest.mark.parametrize("stage", [0, pytest.param(STAGES - 1, marks=pytest.mark.ci_more)])
def test_a_member_that_never_confirms_does_not_hold_up_a_stage(in_peace, stage):
    attacked = Attacked(NeverConfirms, stage=stage, at_once=20)
    assert attacked.computed, "it did not try"
    assert (attacked.merged, attacked.named) == ([], [])
    assert attacked.finished >= 0.8 * in_peace.finished
    attacked.audit.check()
