"""Full replicas, alone or alongside pipelines: they train one model, each microbatch counts once at
each stage, and whichever peers die, the others continue with the state that all had."""

import asyncio
import collections

import pytest
from worlds.pipeline_audit import Audit, pipeline, plan
from worlds.seeds import blocks, each
from worlds.waiting import until

from farflock.node.model.llama import build
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.simulate.lives import identity_of
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.swarm.paths.policy import NUMBERS

pytestmark = pytest.mark.usefixtures("quiet_log")

BATCH = 4  # microbatches
TOKENS = 8 * BATCH
FOREVER = 10**9  # tokens of runs that a test ends


def audit(stages, servers, trainers, replicas, steps=None, seed=0, rate=None, world=None):
    """Return an audit to run, for a number of steps or for as long as the test wants. Replicas have
    the highest peer numbers."""
    total = TOKENS * steps if steps else FOREVER
    around = {"limit_s": 900.0, "view_s": 2.0, "away_s": (3.0, 8.0)} | (world or {})
    made = plan(seed, total) if rate is None else plan(seed, total, rate=rate)
    return Audit(
        made,
        pipeline(stages, BATCH),
        PipelineWorld(parts(stages, servers, trainers, replicas=replicas), total, **around),
    )


def counted(one, stage=0):
    """The number of microbatches of each peer that a stage's rounds name."""
    return collections.Counter(peer for keys in one.named[stage].values() for peer, _ in keys)


def in_step(one):
    """True if all stages have counted as many microbatches, but for those that the end cut off.

    A stage that deaths held up takes in several batches with one round. Over seeds 0 to 49 stages
    were 4.0 microbatches apart, with a standard deviation of 1.8 and 9 at most."""
    named = [sum(map(len, rounds.values())) for rounds in one.named.values()]
    return max(named) - min(named) <= 4 * BATCH


def me(one, number):
    return identity_of(one.plan, number).peer


# replicas alone


def test_two_replicas_that_wait_for_each_round_train_the_unsplit_model():
    one, steps = audit(3, 0, 0, replicas=2, steps=5, rate=0.3), 5

    def in_lockstep(number, node):
        look(number, node)
        trainer = node.trainer
        begins = trainer.may_begin
        trainer.may_begin = lambda: (
            begins()
            and one.all_at(node.stage_directory.epoch)
            and trainer.source.begun < half(node.stage_directory.epoch)
        )

    def half(epoch):
        return (epoch + 2) * BATCH // 2  # of this round and those before: two do it together

    look, one.watch = one.watch, in_lockstep
    one.run().check().check_finished()
    model = build(one.plan.model, one.plan.run_seed).double()
    optimizer, whole = one.plan.inner.build(model), Stage(model)
    for number in range(steps):
        keys = one.named[0][number]
        assert all(rounds[number] == keys for rounds in one.named.values())
        assert collections.Counter(peer for peer, _ in keys) == {
            me(one, 0): BATCH // 2,
            me(one, 1): BATCH // 2,
        }
        one.train_unsplit(number, keys, model, optimizer, whole)
    assert {number for _, number in one.versions} >= {-1, 0, 1, 2, 3}
    assert not one.events["forward computed"], "an activation went to a server"


def test_replicas_at_their_own_pace_bring_gradients_of_the_weights_that_they_had():
    one = (
        audit(3, 0, 0, replicas=3, steps=6, rate=0.3).run().check().check_finished().check_memory()
    )
    assert in_step(one)
    assert all(len(rounds) >= 6 for rounds in one.named.values())
    assert set(counted(one)) == {me(one, number) for number in range(3)}
    keys = [{key for named in rounds.values() for key in named} for rounds in one.named.values()]
    assert len(set.union(*keys) - set.intersection(*keys)) <= BATCH, (
        "only what the end cut off is not at all stages"
    )


# beside pipelines


@pytest.mark.usefixtures("anywhere")
def test_replicas_and_pipelines_train_one_model():
    one = (
        audit(3, 2, 2, replicas=1, steps=6, rate=0.3).run().check().check_finished().check_memory()
    )
    assert in_step(one)
    assert min(counted(one)[me(one, number)] for number in (6, 7, 8)) >= 5, (
        "a replica's work does not count"
    )
    replica = one.sim.nodes[8]
    assert replica.role == "replica"
    assert replica.work["backward"] > 0, "trainers do not ask it"
    assert [len(servers) for servers in replica.stage_directory.serving().stages] == [3, 3, 3]
    telling = {number for number, node in one.sim.nodes.items() if node.peer.loads.mine is not None}
    assert telling == set(range(6)), "a peer that tells its load may be told to move"
    brought = {peer for (stage, _, peer), passes in one.brought.items() if passes and stage == 1}
    assert brought == {me(one, number) for number in (1, 4, 8)}


def mixed_with_churn(seed, steps=8):
    """Two servers of each of three stages, two trainers, two full replicas;
    all but the trainers die now and then, and one replica and one server for certain."""
    one = audit(
        3, 2, 2, replicas=2, steps=steps, seed=seed, world={"churn_s": 5.0, "away_s": (3.0, 8.0)}
    )

    async def kill_two(sim):
        for victim, rounds in ((8 + seed % 2, 2), (seed % 6, 4)):
            await until(lambda rounds=rounds: sim.settled and len(one.named[1]) >= rounds)
            sim.kill(victim, 4.0)

    one.run(kill_two).check().check_finished().check_memory()
    assert in_step(one)
    return one


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_when_replicas_and_servers_die_nothing_is_lost_or_doubled_and_stages_stay_in_step(
    seed,
):
    one = mixed_with_churn(seed, steps=6)
    assert one.tale.kills >= 2
    assert min(counted(one)[me(one, number)] for number in (6, 7)) > 5
    assert counted(one)[me(one, 8)] + counted(one)[me(one, 9)] > 5


@pytest.mark.long
@blocks(0, 50, size=10)
def test_many_seeds_of_a_mixed_swarm_with_churn(seeds):
    each(seeds, mixed_with_churn)


POINTS = [("whole computed", 0.0), ("offered", 0.1), ("closed", 0.0)]


@pytest.mark.ci_more
def test_a_replica_that_dies_at_any_point_leaves_what_was_named_and_no_peer_asks_for_the_rest():
    one = audit(2, 1, 1, replicas=2)
    points, dying, lost = list(POINTS), [], set()

    def see(what, number):
        ready = points and number == 4 and what == points[0][0] and one.sim.settled
        if (
            ready
            and one.sim.nodes[4] not in dying
            and one.sim.nodes[4].trainer.commits.finished >= BATCH
        ):
            dying.append(one.sim.nodes[4])
            lost.update(dying[-1].trainer.commits.begun_s)
            asyncio.get_running_loop().call_later(points.pop(0)[1], one.sim.kill, 4, 2.0)

    async def until_all(sim):
        await until(lambda: one.sim.lives.kills == len(POINTS))
        await until(lambda: sim.settled and sim.nodes[4].trainer.commits.finished >= BATCH)
        sim.end()

    one.on_event = see
    one.run(until_all).check().check_finished()
    mine = me(one, 4)
    asked = [peer for life in one.lives for peer, _ in life.computed if life.number != 4]
    assert asked
    assert mine not in asked, "another peer computed its microbatches"
    named = {number for keys in one.named[0].values() for peer, number in keys if peer == mine}
    assert len({number // NUMBERS for number in named}) == len(POINTS) + 1, (
        "a life's work does not count"
    )
    assert lost - named, "it never had anything that was lost with it"


@pytest.mark.long
def test_a_replica_keeps_every_stage_without_servers_and_newcomers_adopt_its_state():
    one = audit(3, 1, 1, replicas=2)
    seen = {}

    async def die_out(sim):
        await until(
            lambda: sim.settled and len(one.named) == 3 and min(map(len, one.named.values())) >= 2
        )
        for number in (0, 1, 2):
            sim.kill(number, 30.0 + number)
            await until(lambda number=number: me(one, number) not in view_of(sim).peers)
        gone = {stage: max(rounds) for stage, rounds in one.named.items()}
        finished = sim.nodes[3].trainer.commits.finished
        await until(
            lambda: all(max(one.named[stage]) >= number + 4 for stage, number in gone.items())
        )
        seen["alone"] = sorted(sim.nodes), sim.nodes[3].trainer.commits.finished - finished
        await until(lambda: sim.settled)
        back = max(map(max, one.named.values()))
        await until(lambda: min(map(max, one.named.values())) >= back + 4)
        sim.end()

    one.run(die_out).check().check_finished()
    assert seen["alone"][0] == [3, 4, 5], "servers were there"
    assert seen["alone"][1] > 0, "the trainer could not go on through the replicas"
    anew = [entry for entry in one.tale.fields("stage") if entry["round"] >= 0]
    assert not anew, "a stage was made from something else than what the replicas had"
    again = [life for life in one.lives if life.number in (0, 1, 2)][3:]
    assert sorted(life.stage for life in again) == [0, 1, 2]
    assert all(life.merged for life in again)


def view_of(sim):
    return max(
        (node.peer.context.views.newest for node in sim.nodes.values()),
        key=lambda view: view.number,
    )
