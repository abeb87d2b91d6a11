"""Methods whose own rounds cannot name microbatches, in pipelines on the simulated network: a count
before each merge. A server of two is killed and comes back; the run ends, nothing counts twice at
any stage, and what was lost with the server is said."""

import asyncio
import collections

import pytest
import torch
from worlds import pipeline_audit
from worlds.pipeline_audit import Audit, pipeline, plan

from farflock.node.pipeline.server.counting import STREAM
from farflock.node.simulate.pipeline import PipelineWorld, parts

pytestmark = pytest.mark.usefixtures("quiet_log")

STAGES, SERVERS, BATCH = 2, 2, 2
RATE = 0.1
EXACT = {"codec": "fp32", "return_codec": "fp32"}
CELLS = {
    "local": {},
    "noloco": {"period": 4, "codec": "fp32"},
    "streaming": {"period": 4, "fragments": 2, "overlap": 1, "codec": "fp32"},
    "delayed": {"period": 4} | EXACT,
    "co2": {"period": 4} | EXACT,
    "sparta": {"period": 4, "one_in": 2} | EXACT,
}
STEPS = 24
KILLED = 3  # a server of the last stage
AFTER = 6  # counts


class PerServer(Audit):
    """An audit of servers that each have weights of their own."""

    check_means = False  # rounds that name microbatches have no tensors
    merges = lost = 0  # of all servers; tokens that were only at the killed server
    killed = False

    def weights_of(self, life):
        now = dict(life.serving.server.stage.model.named_parameters())
        known = life.weights.get("last")
        if known is None or not all(torch.equal(known[name], x) for name, x in now.items()):
            known = {name: x.detach().cpu().clone() for name, x in now.items()}
            life.weights["last"] = known
        return known

    def _watch_rounds(self, life):
        counting, audit = life.serving.counting, self
        apply = type(counting).apply

        class Watched(type(counting)):
            __slots__ = ()

            def apply(self, replica, exchange, result):
                if exchange.key.stream == STREAM and result.status != "failed":
                    results = audit.applied[life.stage].setdefault(exchange.key.round, [])
                    results.append(result)
                audit.merges += exchange.key.stream != STREAM and result.status != "failed"
                return apply(self, replica, exchange, result)

        counting.__class__ = Watched

    def see(self, what, number):
        if (what, number) != ("closed", KILLED) or self.killed or not self.is_ready(number):
            return
        self.killed = True
        self.lost = self.sim.nodes[number].serving.counting.tokens.unmerged
        asyncio.get_running_loop().call_soon(self.sim.kill, number, 4.0)

    def is_ready(self, number):
        return self.sim.nodes[number].serving.counting.counts >= AFTER


def one_run(name, policy="swarm", **world):
    stages, options = 4 if policy.startswith("skip") else STAGES, CELLS[name]
    if name == "streaming" and stages == 4:
        options = options | {"fragments": 1}  # each stage has one layer
    total = pipeline_audit.TOKENS * BATCH * STEPS
    one = PerServer(
        plan(0, total, rate=RATE, method=name, options=options),
        pipeline(stages, BATCH, policy=policy),
        PipelineWorld(parts(stages, SERVERS, 1), total, limit_s=600.0, view_s=2.0, **world),
    )
    one.on_event = one.see
    return one


def work_of(one):
    return next(node.work for node in one.sim.nodes.values() if node.trainer is not None)


def checked(one):
    one.run().check()
    assert one.killed
    work = work_of(one)
    assert (work["doubled"], work["in doubt"]) == (0, 0)
    assert work["lost with servers"] * pipeline_audit.TOKENS >= one.lost > 0
    return one


@pytest.mark.parametrize(
    "name",
    [
        "noloco",
        *(pytest.param(name, marks=pytest.mark.ci_more) for name in CELLS if name != "noloco"),
    ],
)
def test_a_killed_server_s_microbatches_count_once_and_what_was_lost_is_said(name):
    one = checked(one_run(name))
    streams = collections.Counter(
        str(fields["stream"]).partition(".")[0] for fields in one.tale.fields("round")
    )
    merging = {name for name in streams if name != STREAM}
    assert bool(merging) == (name != "local")
    assert one.merges >= 3 * bool(merging)


@pytest.mark.ci_more
@pytest.mark.parametrize("policy", ["noloco", "skip:3"])
@pytest.mark.parametrize("name", CELLS)
def test_each_method_runs_along_every_kind_of_path(name, policy):
    checked(one_run(name, policy))


@pytest.mark.ci_more
def test_a_backward_pass_goes_to_the_server_of_its_forward_pass():
    one = one_run("noloco")
    one.on_event = lambda what, number: None
    one.run().check()
    assert work_of(one)["mixed"] == 0
    assert one.mixed_versions > 0, "no microbatch was on its way while weights changed"


@pytest.mark.ci_more
@pytest.mark.parametrize("name", CELLS)
def test_under_churn_nothing_counts_twice(name):
    one = one_run(name, churn_s=4.0)
    one.on_event, one.begun_anew = (lambda what, number: None), True
    one.run().check()
    assert one.tale.kills
    assert work_of(one)["doubled"] == work_of(one)["in doubt"] == 0


@pytest.mark.ci_more
@pytest.mark.parametrize("name", ["noloco", "streaming", "delayed"])
def test_a_stage_that_loses_all_its_servers_begins_again_and_merges(name):
    one = one_run(name)
    lost = [number for number in range(STAGES * SERVERS) if number % STAGES == KILLED % STAGES]
    one.begun_anew, merges = True, []

    def see(what, number):
        if what == "closed" and number == KILLED and not one.killed and one.is_ready(number):
            one.killed = True
            for each in lost:
                asyncio.get_running_loop().call_soon(one.sim.kill, each, 4.0)
        if what == "closed" and one.killed and number in lost:
            merges.append(one.sim.nodes[number].serving.loop.driver.position.rounds)

    one.on_event = see
    one.run().check()
    assert work_of(one)["doubled"] == work_of(one)["in doubt"] == 0
    first, last = merges[0], merges[-1]
    assert all(last[stream] > first[stream] for stream in last), "merges went on"
