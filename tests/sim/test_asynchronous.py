"""Pipelines that do not wait, on the simulated network: each gradient is that of one function, whoever computes its passes; how
late it is is measured, agreed upon and bounded; and over slow links more gets done."""

import collections
import logging
import runpy
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from farflock.node.pipeline_simulation import PipelineWorld, parts
from farflock.node.stage_server import ServerTerms
from farflock.node.stage_versions import Asynchronous
from farflock.node.trainer import TrainerTerms
from farflock.swarm.sim import LinkModel

_AUDIT = runpy.run_path(str(Path(__file__).with_name("pipeline_audit.py")))
Audit, plan, pipeline, CLOSE = (_AUDIT[name] for name in ("Audit", "plan", "pipeline", "CLOSE"))
BATCH = 8  # microbatches
TOKENS = 8 * BATCH
FOREVER = 10**9  # tokens of runs that a test ends
RATE = 0.3
SLOW = LinkModel(latency_s=0.1)  # of each of the two lines between peers: a call takes 0.4 s and more


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("farflock").setLevel(logging.CRITICAL)


def late(staleness=3, steps=6, servers=2, seed=0, stages=3, asynchronous=None, link=SLOW, inner=None, **options):
    """A run of moving weights, whose microbatches are on their way for several rounds."""
    total = TOKENS * steps if steps else FOREVER
    terms = {
        "server": ServerTerms(lease_s=20.0, staleness=staleness),
        "trainer": TrainerTerms(window=64, kept=128, forward_timeout_s=8.0, backward_timeout_s=12.0),
        "asynchronous": asynchronous or Asynchronous(staleness + 1),
    }
    made = plan(seed, total, rate=RATE, **({"inner": inner} if inner else {}))
    world = PipelineWorld(parts(stages, servers, 1), total, link, limit_s=900.0, view_s=2.0)
    return Audit(made, pipeline(stages, BATCH, **(terms | options)), world)


class Ways:
    """The passes of a microbatch that a run's audit saw, from one backward pass on."""

    def __init__(self, audit):
        self.audit, self.last = audit, len(audit.pipeline.stages) - 1

    def of(self, back):
        backs = {back.stage: back}
        for stage in range(back.stage, self.last):
            backs[stage + 1] = self.audit._made[backs[stage].outside]
        forwards, x = {}, backs[self.last].x
        for stage in range(self.last - 1, -1, -1):
            forwards[stage] = self.audit._made[x]
            x = forwards[stage].x
        return forwards, backs

    def check(self):
        """Each gradient that counts is the unsplit model's, whose stages have one version each."""
        checked, apart = 0, 0
        for life in self.audit.lives:
            for key, back in life.merged.items():
                forwards, backs = self.of(back)
                for stage in forwards.keys() & backs.keys():
                    assert forwards[stage].weights is backs[stage].weights, "a stage went back with other weights"
                    assert forwards[stage].round == backs[stage].round
                ways = forwards | backs
                apart += len({one.round for one in ways.values()}) > 1
                checked += 1
                if checked % 5 == 0:
                    self._compare(key, back, ways)
        return checked, apart

    def _compare(self, key, back, ways):
        weights = {name: x for one in ways.values() for name, x in one.weights.items()}
        leaves = {name: x.detach().clone().requires_grad_() for name, x in weights.items()}
        tokens, targets = self.audit.batch(key)
        logits = functional_call(self.audit.reference.model, leaves, (tokens,))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        whole = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for name, x in self.audit.gradient_of(key, back).items():
            torch.testing.assert_close(x, whole[name], **CLOSE)


def check_ages(audit):
    """How late the notes say that a gradient is is how late it is, and within the bound; returns how often it was how late."""
    found = collections.Counter()
    for stage, rounds in audit.ages.items():
        versions = {key: back.round for life in audit.lives if life.stage == stage for key, back in life.merged.items()}
        for number, ages in rounds.items():
            for key, age in ages.items():
                assert age == number - 1 - versions[key]
                assert 0 <= age <= audit.pipeline.server.staleness
                found[age] += 1
    return found


def test_gradients_of_moving_weights_are_those_of_the_unsplit_model_at_one_version_a_stage():
    one = late().run().check()
    one.check_finished()
    checked, apart = Ways(one).check()
    assert checked > 30
    assert apart > 0, "no microbatch met stages of different rounds"
    assert max(check_ages(one)) >= 1, "nothing was late"
