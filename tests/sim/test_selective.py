"""Full replicas that are unconstrained, alongside pipelines that keep to a subspace (Heterogeneous
SparseLoCo), on the simulated network.

All share an average. Pipelines begin each round with its projection, around the frozen embedding of
the version that is in effect; replicas begin with the average itself. Each gradient that counts is
that of the model that its passes used: the constrained weights as they were along the way, or the
unconstrained ones of a replica.
"""

import dataclasses
from typing import ClassVar

import pytest
import torch
from worlds.pipeline_audit import Audit, pipeline, plan
from worlds.pipeline_records import Whole
from worlds.waiting import until

from farflock.node.pipeline.contrib.embedding_sync import NAME
from farflock.node.pipeline.passes.constraint import EMBEDDING
from farflock.node.pipeline.passes.edges import basis_of
from farflock.node.pipeline.passes.requests import Forward, Refused, decode_answer, encode
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.node.train.state_sync import encode_state
from farflock.optimizers.parts.inner import InnerConfig

pytestmark = pytest.mark.usefixtures("quiet_log")
# A part of contrib: its simulations are not of the everyday suite.
MORE, LONG = pytest.mark.ci_more, pytest.mark.long

BATCH, TOKENS = 8, 64  # microbatches and tokens of a step
RANK = 3
PERIOD = 2
FOREVER = 10**9
SGD = InnerConfig("sgd", 0.05, (0.9, 0.95), 0.0)


class Selective(Audit):
    """An audit of a mixed run. Members part between rounds, so every pass is held against the
    weights that it saw; and after each round what a member holds is held against the average."""

    close: ClassVar = {"rtol": 1e-9, "atol": 1e-10}
    check_means = False  # rounds are differences of weights

    def __init__(self, plan, pipeline, world):
        super().__init__(plan, pipeline, world)
        self.basis = basis_of(plan, pipeline)
        columns = self.basis.exact_DK
        self.inside, self.tail = columns @ columns.T, pipeline.stages[-1].start
        self.free = {
            number for number, part in enumerate(world.parts) if part.trains and part.stage != -2
        }
        self.averages = {}  # the embedding by round of the first stage, as its members average it
        self.spoken = []  # (number, round, version) of servers of the first stage, after each round
        self.looked = 0  # rounds after which a member's weights were held against the average
        self.nodes = []

    def watch(self, number, node):
        super().watch(number, node)
        self.nodes.append(node)
        for serving in node.servings:
            self._watch_average(number, node, serving)

    def _watch_average(self, number, node, serving):
        driver, audit = serving.loop.driver, self
        apply = driver.apply

        def after(action, *given):
            second_phase = apply(action, *given)
            audit.after_round(
                number, node, serving, driver, action.exchange.key.round, action.result
            )
            return second_phase

        driver.apply = after

    def after_round(self, number, node, serving, driver, rounds, result):
        average = driver.method.eval_params(driver.replica)
        if serving.index == 0:
            known = self.averages.setdefault(rounds, average[EMBEDDING])
            assert torch.equal(known, average[EMBEDDING]), (
                "two members of the first stage have other averages"
            )
            if number not in self.free:
                self.spoken.append((number, rounds, node.edges.codec.spoken))
        if result.status != "ok" or not result.taken:
            return  # work that the round did not take is kept on top
        self.looked += 1
        held = dict(serving.model.named_parameters())
        for name, x in average.items():
            expected = (
                x.double()
                if number in self.free
                else self.projected(name, x.double(), node.edges.codec)
            )
            torch.testing.assert_close(held[name].detach().double(), expected, rtol=0, atol=1e-6)
            if number in self.free:
                assert torch.equal(held[name].detach().float(), x), (
                    "a replica's weights were touched"
                )

    def projected(self, name, w, codec):
        layer = int(name.split(".")[2]) if ".layers." in name else None
        if name == EMBEDDING:
            frozen = (
                codec.held[codec.spoken].fixed_VD if self.begun_anew else self.table(codec.spoken)
            ).double()
            return frozen + (w - frozen) @ self.inside
        constrained = layer is not None and layer < self.tail
        return (
            self.inside @ w
            if constrained and name.endswith(("o_proj.weight", "down_proj.weight"))
            else w
        )

    def table(self, version):
        """The expected values of this version of the frozen embedding."""
        return (
            self.basis.fixed_VD
            if version == 1
            else self.averages[(version - 1) * self.pipeline.table_every - 1]
        )

    def weights_of(self, life):
        """As they are now."""
        return {
            name: x.detach().clone()
            for name, x in life.serving.server.stage.model.named_parameters()
        }

    def expected(self, stage, passes):
        """Gradients at a pipeline's server are those of weights that are projected first."""
        found = [self._kept(self.gradient_of(key, back), back) for key, back in passes.items()]
        return (
            {name: sum(one[name] for one in found) for name in found[0] if self._is_at(name, stage)}
            if found
            else {}
        )

    def _is_at(self, name, stage):
        return name in dict(self._stages[stage].named_parameters())

    def _kept(self, gradients, back):
        if isinstance(back, Whole):
            return gradients
        flat = {}
        for name, x in gradients.items():
            if name == EMBEDDING:
                flat[name] = x @ self.inside
            else:
                constrained = ".layers." in name and int(name.split(".")[2]) < self.tail
                branch = constrained and name.endswith(("o_proj.weight", "down_proj.weight"))
                flat[name] = self.inside @ x if branch else x
        return flat

    def check(self):
        super().check()
        assert self.looked > 3
        self.check_tables()
        return self

    def check_tables(self):
        """Check that a peer that holds a version has, bit for bit, the average that names it."""
        seen = 0
        for node in self.nodes:
            held = node.edges.codec.held
            assert len(held) <= self.pipeline.turns.max_held, (
                f"a {node.role} holds versions {sorted(held)}"
            )
            for version, basis in held.items():
                if version > 1:
                    seen += 1
                    assert torch.equal(basis.fixed_VD, self.table(version)), (
                        f"version {version} is another table"
                    )
        assert seen, "no version was ever made"


DILOCO = ("diloco", {"period": PERIOD, "codec": "fp32", "return_codec": "fp32"})
SPARSELOCO = ("sparseloco", {"period": PERIOD, "codec": "topk:64/4096"})


def audit(
    servers=1,
    trainers=1,
    replicas=1,
    steps=None,
    every=1,
    seed=0,
    world=None,
    stages=3,
    method=DILOCO,
    **given,
):
    """Return an audit to run, for a number of steps or for as long as the test wants. Replicas have
    the highest peer numbers."""
    total = TOKENS * steps if steps else FOREVER
    around = {"limit_s": 900.0, "view_s": 2.0, "away_s": (3.0, 8.0)} | (world or {})
    name, options = method
    made = dataclasses.replace(
        plan(seed, total, rate=SGD.lr, method=name, options=options), inner=SGD
    )
    cut = pipeline(
        stages, BATCH, f"subspace:{RANK}+raw,raw", constrain="pipelines", table_every=every, **given
    )
    return Selective(
        made,
        cut,
        PipelineWorld(parts(stages, servers, trainers, replicas=replicas), total, **around),
    )


@MORE
def test_pipelines_use_the_projected_average_and_replicas_the_average_itself():
    one = audit(servers=2, trainers=2, replicas=1, steps=12).run().check().check_finished()
    versions = {version for _, _, version in one.spoken}
    assert versions >= {1, 2, 3, 4}, versions
    assert one.mixed_versions > 10, "no microbatch was on its way while a version changed"
    assert not any(
        node.trainer.commits.dropped for node in one.sim.nodes.values() if node.trainer is not None
    )


@MORE
def test_so_it_is_with_the_method_of_the_paper_which_sends_few_values_and_keeps_the_rest():
    one = audit(steps=12, method=SPARSELOCO).run().check().check_finished()
    assert max(version for _, _, version in one.spoken) > 3


@LONG
def test_versions_follow_each_other_after_so_many_rounds_and_take_effect_a_round_later():
    one = audit(steps=22, every=3).run().check().check_finished()
    expected = {rounds: 1 + rounds // 3 for rounds in range(9)}  # made after rounds 2, 5, 8
    assert [(rounds, version) for _, rounds, version in one.spoken][:9] == list(expected.items())


# Deaths and latecomers


def rounds_of(one, stage=0):
    return max(one.named[stage], default=-1)


def settled(one, sim, rounds):
    return sim.settled and min(map(rounds_of, [one] * 3, range(3))) >= rounds


@LONG
@pytest.mark.parametrize("victims", [(1, 3), (0, 4), (8, 2)])
def test_servers_and_a_replica_that_die_around_a_change_come_back_to_later_versions(victims):
    """Of stages 0 and 1 in turn, 2, and the replica; each is away for about three versions."""
    one = audit(servers=2, trainers=2, replicas=1)

    async def around_changes(sim):
        for victim in victims:
            before = rounds_of(one)
            await until(lambda before=before: settled(one, sim, before + 2))
            sim.kill(victim, 6.0)
        await until(lambda: settled(one, sim, rounds_of(one)))
        end = rounds_of(one) + 2
        await until(lambda: settled(one, sim, end))
        sim.end()

    one.run(around_changes).check().check_finished()
    again = [life for life in one.lives if life.number in victims][len(victims) :]
    assert any(life.merged for life in again), "no work of a server that came back counts"
    assert max(version for _, _, version in one.spoken) > 5
    fallen = [version for number, _, version in one.spoken if number in victims]
    assert fallen == sorted(fallen), "a server that came back spoke a former version"


@LONG
@pytest.mark.parametrize("replicas", [0, 1])
def test_when_all_servers_of_the_first_stage_die_the_others_hand_on_what_they_hold(replicas):
    one = audit(servers=2, trainers=1, replicas=replicas)
    one.begun_anew = True
    gone = {}

    async def first_stage_dies(sim):
        await until(lambda: settled(one, sim, 5))
        gone["round"] = rounds_of(one)
        for victim in (0, 3):
            sim.kill(victim, 4.0)
        await until(lambda: settled(one, sim, gone["round"] + 4))
        sim.end()

    one.run(first_stage_dies).check_finished()
    one.check()
    after = [version for _, rounds, version in one.spoken if rounds > gone["round"] + 1]
    assert after
    assert min(after) > 3, "the newcomers began with a version of long ago"


def late_at(one, number, has_it):
    """The server of this number gets no table of version 4 and later until `has_it`;
    returns what it refused meanwhile."""
    look, seen = one.watch, []

    def looking(number_now, node):
        look(number_now, node)
        if number_now != number:
            return
        keeper, passes = node.embedding, node.serving.server.passes
        fetch, read = keeper.fetch, passes.read

        async def late(version):
            return (version < 4 or has_it(seen)) and await fetch(version)

        def reading(job):
            found = read(job)
            if not isinstance(found, tuple):
                seen.append(found.why)
            return found

        keeper.fetch, passes.read = late, reading

    one.watch = looking
    return seen


async def go_on(one, sim):
    """Some rounds more, then the end."""
    end = rounds_of(one) + 3
    await until(lambda: settled(one, sim, end))
    sim.end()


@LONG
def test_a_lone_server_without_a_version_refuses_by_name_until_it_has_it():
    one = audit(servers=1, trainers=1, replicas=1)
    seen = late_at(one, 1, lambda seen: len(seen) >= 10)

    async def long_enough(sim):
        await until(lambda: len(seen) >= 10)
        await go_on(one, sim)

    one.run(long_enough).check().check_finished()
    assert all(why.startswith("version") and "is not here yet" in why for why in seen)
    assert max(one.sim.nodes[1].edges.codec.held) > 6


@LONG
def test_a_server_without_a_version_is_not_asked_while_another_has_it():
    one = audit(servers=2, trainers=1, replicas=1)
    seen = late_at(one, 1, lambda seen: rounds_of(one) >= 9)
    served = []

    async def long_enough(sim):
        for rounds in (6, 8):
            await until(lambda least=rounds: rounds_of(one) >= least)
            served.append([sim.nodes[number].work["forward"] for number in (1, 4)])
        await go_on(one, sim)

    one.run(long_enough).check().check_finished()
    (early, other_early), (late, other_late) = served
    assert other_late > other_early, "the other server of the stage goes on"
    assert len(seen) <= 2, "at most what was on its way when the version changed"
    assert late - early <= 2
    assert one.sim.nodes[1].work["forward"] > late, "it is asked again once it has the version"


@MORE
def test_a_replica_is_not_asked_and_refuses_any_request():
    one = audit(servers=1, trainers=1, replicas=1, steps=6).run().check()
    replica, trainer = one.sim.nodes[4], one.sim.nodes[3]
    assert replica.role == "replica"
    assert replica.work["forward"] == replica.work["backward"] == 0
    assert replica.work["merged"] > 0
    assert [len(servers) for servers in trainer.stage_directory.serving().stages] == [1, 1, 1]
    answer = decode_answer(
        replica.peer.calls.handler.admit("somebody", encode(Forward(0, 0, -1, 0)), (8,))
    )
    assert isinstance(answer, Refused)
    assert "not constrained to the codec's subspace" in answer.why


@MORE
def test_a_holder_that_serves_a_false_table_is_outvoted_by_its_makers():
    one = audit(servers=2, trainers=1, replicas=1, steps=10)
    look, lied = one.watch, []

    def looking(number, node):
        look(number, node)
        if number == 0:

            async def lying(slot):
                version = node.embedding.in_slot(slot)
                lied.append(version)
                return encode_state({NAME: torch.zeros_like(one.basis.fixed_VD)}, version, 0)

            node.embedding.offered = lying

    one.watch = looking
    one.run().check().check_finished()
    assert max(lied) > 2


def mixed_with_churn(seed):
    one = audit(
        servers=3,
        trainers=2,
        replicas=2,
        steps=60 if seed in (6, 8) else 50,  # 8 meets few deaths; 6 ended in a bad moment
        every=1 + seed % 3,
        seed=seed,
        world={"churn_s": 3.0},
    )
    one.run().check().check_finished()
    assert one.tale.kills > 2
    assert max(version for _, _, version in one.spoken) > 4
    return one


@LONG
@pytest.mark.parametrize("seed", range(12))
def test_under_churn_everything_holds(seed):
    mixed_with_churn(seed)
