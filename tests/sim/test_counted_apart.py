"""Methods whose own rounds cannot name microbatches, in pipelines on the simulated network: a count
before each merge. A server of two is killed and comes back; the run ends, nothing counts twice at
any stage, no message holds work that no count has named, and what was lost with the server is
said."""

import asyncio
import collections

import numpy as np
import pytest
import torch
from worlds.pipeline_audit import TOKENS, Audit, pipeline, plan
from worlds.waiting import until

from farflock.node.pipeline.server.counting import STREAM, Counting
from farflock.node.run.planned_paths import plan_of_texts
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.node.simulate.pipeline_invariants import PipelineChecker, ServerWatch
from farflock.swarm.peer.round_log import LOG_ROUNDS
from farflock.swarm.sim.network import LinkModel

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
PLANNED = ("0:0 2:1 1:0 3:0", "0:1 1:1 2:0 3:1"), ("0:1 1:0 2:1 3:1", "0:0 2:0 1:1 3:0")
PATHS = ("swarm", "noloco", "skip:3", "planned")
STEPS = 24
KILLED = 3  # which stage it serves is drawn
AFTER = 6  # counts
FOREVER = 10**6  # steps of runs that a test ends
SLOW = 4000.0  # bytes per second, of a newcomer's line: much less, and it hears nobody


class PerServer(Audit):
    """An audit of servers that each have weights of their own."""

    check_means = False  # rounds that name microbatches have no tensors
    merges = lost = 0  # of all servers; tokens that were only at the killed server
    killed = False

    def __init__(self, *world):
        super().__init__(*world)
        self.checker = PipelineChecker()

    def weights_of(self, life):
        now = dict(life.serving.server.stage.model.named_parameters())
        known = life.weights.get("last")
        if known is None or not all(torch.equal(known[name], x) for name, x in now.items()):
            known = {name: x.detach().cpu().clone() for name, x in now.items()}
            life.weights["last"] = known
        return known

    def _watch_rounds(self, life):
        driver, audit = life.serving.loop.driver, self
        ServerWatch(self.checker, life.number, life.serving)
        apply = driver.apply

        def applying(action, *given):
            more, (exchange, result) = apply(action, *given), (action.exchange, action.result)
            if result.status == "failed":
                return more
            if exchange.key.stream != STREAM:
                audit.note_merge(life, result)
            else:
                rounds = audit.applied[life.stage]
                rounds.setdefault(exchange.key.round, []).append(result)
            return more

        driver.apply = applying

    def note_merge(self, life, result):
        self.merges += 1

    def check(self):
        assert not self.checker.violations
        return super().check()

    def see(self, what, number):
        if (what, number) != ("closed", KILLED) or self.killed or not self.is_ready(number):
            return
        self.killed = True
        self.lost = self.sim.nodes[number].serving.counting.tokens.unmerged
        asyncio.get_running_loop().call_soon(self.sim.kill, number, 4.0)

    def is_ready(self, number):
        return self.sim.nodes[number].serving.counting.counts >= AFTER


def one_run(name, policy="swarm", seed=0, steps=STEPS, count_every=1, batch=BATCH, **world):
    stages = 4 if policy.startswith(("skip", "planned")) else STAGES
    options, paths = CELLS[name], plan_of_texts(PLANNED) if policy == "planned" else None
    if name == "streaming" and stages == 4:
        options = options | {"fragments": 1}  # each stage has one layer
    total = TOKENS * batch * steps
    one = PerServer(
        plan(seed, total, rate=RATE, method=name, options=options),
        pipeline(stages, batch, policy=policy, paths=paths, count_every=count_every),
        PipelineWorld(parts(stages, SERVERS, 1), total, limit_s=600.0, view_s=2.0, **world),
    )
    one.on_event = one.see
    return one


def together(sim):
    """Return the stage of the server that is killed, and the other servers of the stage."""
    served = {number: node.serving.index for number, node in sim.nodes.items() if node.serving}
    stage = served.pop(KILLED)
    return stage, [number for number, other in served.items() if other == stage]


def work_of(one):
    return next(node.work for node in one.sim.nodes.values() if node.trainer is not None)


def checked(one):
    one.run().check()
    assert one.killed
    work = work_of(one)
    assert (work["doubled"], work["in doubt"]) == (0, 0)
    assert work["lost with servers"] * TOKENS >= one.lost > 0
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
@pytest.mark.parametrize("policy", PATHS[1:])
@pytest.mark.parametrize("name", CELLS)
def test_each_method_runs_along_every_kind_of_path(name, policy):
    checked(one_run(name, policy))


@pytest.mark.ci_more
@pytest.mark.parametrize("name", ["noloco", "streaming", "local"])
def test_counts_after_every_second_step_keep_the_accounts_too(name):
    one = one_run(name, count_every=2)
    one.is_ready = lambda number: one.sim.nodes[number].serving.counting.counts >= AFTER // 2
    checked(one)
    assert max(one.named[0]) < STEPS - 4
    sizes = [len(keys) for keys in one.named[0].values()]
    assert max(sizes) >= 2 * BATCH


@pytest.mark.ci_more
def test_a_backward_pass_goes_to_the_server_of_its_forward_pass():
    one = one_run("noloco")
    one.on_event = lambda what, number: None
    one.run().check()
    assert work_of(one)["mixed"] == 0
    assert one.mixed_versions > 0, "no microbatch was on its way while weights changed"


@pytest.mark.ci_more
def test_a_newcomer_whose_download_takes_longer_than_eight_counts_needs_no_second_state():
    """What it follows the state with, lists of microbatches, is kept for long."""
    # with more batches under way, more goes over the newcomer's line than its state
    one, passed = one_run("noloco", steps=FOREVER, batch=2 * BATCH), []
    one.on_event = lambda what, number: None

    async def come_back_slowly(sim):
        await until(lambda: sim.settled)
        stage, (other,) = together(sim)
        counting, line = sim.nodes[other].serving.counting, f"{STREAM}/{stage}"
        await until(lambda: counting.counts >= AFTER)
        me = identity_of(one.plan, KILLED).peer
        sim.network.set_link(me, LinkModel(SLOW, SLOW))
        life = sim.nodes[KILLED]
        sim.kill(KILLED, 2.0)
        await until(lambda: sim.nodes.get(KILLED, life) is not life)
        newcomer, begun = sim.nodes[KILLED], counting.counts
        await until(lambda: line in newcomer.peer.rounds.names)
        passed.append(counting.counts - begun)
        sim.network.set_link(me, LinkModel())
        await until(lambda: newcomer.serving.counting.counts >= counting.counts)
        await until(lambda: newcomer.serving.server.served["merged"])
        sim.end()

    one.run(come_back_slowly).check()
    assert passed[0] > LOG_ROUNDS, "the download took no longer than an ordinary log lasts"
    assert not one.tale.fields("over")


def test_a_server_that_leaves_or_moves_first_merges_what_counts_there_alone():
    one, unmerged = one_run("noloco", steps=FOREVER), []
    one.on_event = lambda what, number: None

    async def leave(sim):
        await until(lambda: sim.settled)
        serving = sim.nodes[KILLED].serving
        await until(lambda: serving.counting.counts >= AFTER and serving.is_unmerged)
        unmerged.append(serving.counting.tokens.unmerged)
        await serving.merged()
        unmerged.append(serving.counting.tokens.unmerged)
        sim.end()

    one.run(leave)
    assert unmerged[0] > unmerged[1] == 0


@pytest.mark.ci_more
@pytest.mark.parametrize("name", CELLS)
def test_under_churn_nothing_counts_twice(name):
    one = one_run(name, churn_s=4.0)
    one.on_event, one.begun_anew = (lambda what, number: None), True
    one.run().check()
    assert work_of(one)["doubled"] == work_of(one)["in doubt"] == 0
    assert one.tale.kills


def test_a_merge_before_its_count_is_found(monkeypatch):
    """The fault of the first draft: what the method asks for goes out beside the count."""
    due = Counting.due

    def hasty(self, replica, progress):
        asked = due(self, replica, progress)
        held, self.held = self.held, []
        return [*asked, *(self._released(self._at(each, self.open), 0, True) for each in held)]

    monkeypatch.setattr(Counting, "due", hasty)
    one = one_run("noloco", steps=8)
    one.on_event = lambda what, number: None
    one.run()
    with pytest.raises(AssertionError, match="before they counted"):
        one.check()


@pytest.mark.ci_more
@pytest.mark.parametrize("name", ["noloco", "streaming", "delayed"])
def test_a_stage_that_loses_all_its_servers_begins_again_and_merges(name):
    one = one_run(name)
    one.begun_anew, merges, lost = True, [], [KILLED]

    def see(what, number):
        if what == "closed" and number == KILLED and not one.killed and one.is_ready(number):
            one.killed = True
            lost.extend(together(one.sim)[1])
            for each in lost:
                asyncio.get_running_loop().call_soon(one.sim.kill, each, 4.0)
        if what == "closed" and one.killed and number in lost:
            merges.append(one.sim.nodes[number].serving.loop.driver.position.rounds)

    one.on_event = see
    one.run().check()
    assert work_of(one)["doubled"] == work_of(one)["in doubt"] == 0
    first, last = merges[0], merges[-1]
    assert all(last[stream] > first[stream] for stream in last), "merges went on"


class Ends(PerServer):
    """Beside the audit, the weights of each server before the last mean of its stage."""

    dies = None  # the server that is killed as it begins

    def __init__(self, *world):
        super().__init__(*world)
        self.before = collections.defaultdict(dict)  # by stage and server

    def watch(self, number, node):
        super().watch(number, node)
        take = node.last_means.take

        async def watched(serving):
            if number == self.dies:
                asyncio.get_running_loop().call_soon(self.sim.kill, number, None)
                await asyncio.sleep(FOREVER)
            self.before[serving.index][number] = weights(serving)
            await take(serving)

        node.last_means.take = watched

    def check_ends(self, stage):
        """Those that were there in the end have the mean of what each of them had; return whether
        that differs from what they had."""
        before = list(self.before[stage].values())
        ends = [weights(self.sim.nodes[number].serving) for number in self.before[stage]]
        for name in before[0]:
            mean = sum(each[name] for each in before) / len(before)
            for now in ends:
                np.testing.assert_allclose(now[name], mean, rtol=1e-5, atol=1e-6)
        return any(not np.allclose(before[0][name], before[-1][name]) for name in before[0])


def weights(serving):
    return {name: x.detach().numpy().copy() for name, x in serving.model.named_parameters()}


def ends_of(name, servers=3):
    total = TOKENS * BATCH * 22  # no multiple of the period
    return Ends(
        plan(0, total, rate=RATE, method=name, options=CELLS[name]),
        pipeline(STAGES, BATCH, policy="noloco"),
        PipelineWorld(parts(STAGES, servers, 1), total, limit_s=600.0, view_s=2.0),
    )


@pytest.mark.parametrize("name", ["noloco", pytest.param("sparta", marks=pytest.mark.ci_more)])
def test_a_run_ends_with_the_mean_of_all_servers_of_each_stage(name):
    one = ends_of(name)
    one.run().check()
    for stage in range(STAGES):
        assert len(one.before[stage]) == 3
        assert one.check_ends(stage), "they ended alike by themselves"
        assert [servers for at, servers in last_means(one) if at == stage] == [3, 3, 3]


def test_a_server_that_dies_at_the_end_is_in_no_mean():
    one = ends_of("noloco")
    one.dies = KILLED
    one.run().check()
    assert sorted(map(len, one.before.values())) == [2, 3]
    for stage in range(STAGES):
        assert one.check_ends(stage), "they ended alike by themselves"
    assert {servers for _, servers in last_means(one)} == {2, 3}


def test_a_run_that_never_merges_ends_with_the_weights_of_each_server():
    one = one_run("local", steps=6)
    one.on_event = lambda what, number: None
    one.run().check()
    assert not last_means(one)


def last_means(one):
    return [(entry["stage"], entry["servers"]) for entry in one.tale.fields("last_mean")]


class TwinInNumPy(PerServer):
    """Beside the servers of each stage, section 3 of arXiv:2506.10911 in NumPy. The microbatches of
    a step are those that its server took, and their gradients those of the unsplit model."""

    def __init__(self, *world):
        super().__init__(*world)
        # by server and merge: its steps until then, the pair, and its weights after it
        self.merged = collections.defaultdict(list)

    def watch(self, number, node):
        super().watch(number, node)
        if node.trainer is not None:
            node.trainer.may_begin = lambda: self.sim.settled

    def note_merge(self, life, result):
        weights = life.serving.server.stage.model.named_parameters()
        now = {name: x.detach().numpy().copy() for name, x in weights}
        self.merged[self.peer_of(life)].append((self.steps_of(life), result.participants, now))

    def peer_of(self, life):
        return identity_of(self.plan, life.number).peer

    def steps_of(self, life):
        return [keys for one, _, keys in self.taken if one is life]

    def trained(self, life, weights, steps):
        """Return weights after steps of plain SGD."""
        for keys in filter(None, steps):
            sums = self.expected(life.stage, {key: life.merged[key] for key in keys})
            rate = RATE / (TOKENS * len(keys))
            weights = {name: x - rate * sums[name].numpy() for name, x in weights.items()}
        return weights

    def stage_of_the_paper(self, stage):
        """Yield after each merge of a stage, by server: its weights, those of the paper, and its
        pair."""
        lives = {self.peer_of(life): life for life in self.lives if life.stage == stage}
        initial = {name: x.detach().numpy() for name, x in self._stages[stage].named_parameters()}
        phi, done = dict.fromkeys(lives, initial), dict.fromkeys(lives, 0)
        momentum = dict.fromkeys(lives, dict.fromkeys(initial, 0.0))
        for place in range(min(len(self.merged[peer]) for peer in lives)):
            merges = {peer: self.merged[peer][place] for peer in lives}
            theta = {
                peer: self.trained(life, phi[peer], merges[peer][0][done[peer] :])
                for peer, life in lives.items()
            }
            for peer, (steps, pair, _) in merges.items():
                done[peer] = len(steps)
                momentum[peer] = outer_step(momentum[peer], phi, theta, peer, pair)
            phi = {
                peer: {name: x + momentum[peer][name] for name, x in phi[peer].items()}
                for peer in lives
            }
            yield {peer: (now, phi[peer], pair) for peer, (_, pair, now) in merges.items()}


def outer_step(momentum, phi, theta, peer, pair, alpha=0.5, beta=0.7, gamma=0.7):
    def step(name):
        work = sum(phi[each][name] - theta[each][name] for each in pair) / len(pair)
        middle = sum(phi[each][name] for each in pair) / len(pair)
        return alpha * momentum[name] - beta * work - gamma * (phi[peer][name] - middle)

    return {name: step(name) for name in momentum}


@pytest.mark.ci_more
def test_pairs_of_servers_make_the_steps_of_the_paper_at_each_stage():
    total, batch = 20 * 4 * TOKENS, 4
    one = TwinInNumPy(
        plan(0, total, rate=RATE, method="noloco", options={"period": 4, "codec": "fp32"}),
        pipeline(3, batch, policy="noloco"),
        PipelineWorld(parts(3, 4, 1), total, limit_s=600.0, view_s=2.0),
    )
    one.run().check()
    assert len(one.lives) == 12, "each server has one life"
    for stage in range(3):
        merges = list(one.stage_of_the_paper(stage))
        assert len(merges) >= 3
        pairs = {pair for merge in merges for _, _, pair in merge.values()}
        assert {len(pair) for pair in pairs} == {2}
        assert len(pairs) > 2, "servers meet different ones"
        for merge in merges:
            for now, paper, _ in merge.values():
                for name, x in paper.items():
                    np.testing.assert_allclose(now[name], x, rtol=1e-5, atol=1e-6)
        first, *others = (now for now, _, _ in merges[-1].values())
        assert any(not np.allclose(first[name], x[name]) for x in others for name in first)
