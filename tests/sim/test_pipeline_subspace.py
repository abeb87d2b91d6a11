"""Pipelines with a subspace codec on the simulated network: a few numbers a token say all,
so that every gradient which counts is that of the unsplit constrained model,
and whatever happens to weights, they keep to the subspace of the run.

The unsplit model here is the ordinary one whose constrained weights W are replaced by F + (W - F)
P, with P as a plain matrix and gradients by autograd: it shares with the stages' own projections
nothing but U.
"""

import dataclasses

import pytest
import torch
from torch.func import functional_call
from worlds.pipeline_audit import STILL, Audit, pipeline, plan
from worlds.waiting import until

from farflock.compression.subspace import outside
from farflock.node.pipeline.passes.constraint import EMBEDDING
from farflock.node.pipeline.passes.edges import basis_of
from farflock.node.pipeline.server.edge_ends import EdgeEnds
from farflock.node.run.terms import TrainerTerms
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.optimizers.parts.inner import InnerConfig

pytestmark = pytest.mark.usefixtures("quiet_log")

BATCH, TOKENS = 4, 32  # microbatches and tokens of a step
RANK = 3
EXACT = f"subspace:{RANK}+raw,raw"
FOREVER = 10**9
DOUBLE = {"rtol": 1e-10, "atol": 1e-11}
SINGLE = {"rtol": 2e-4, "atol": 2e-5}  # of fp32 stages, 8 microbatches of 8 tokens summed


class Subspaced(Audit):
    """An audit against the constrained model; after everything that changes a server's weights,
    these are looked at."""

    def __init__(self, plan, pipeline, world, close=DOUBLE):
        super().__init__(plan, pipeline, world)
        self.close, self.basis = close, basis_of(plan, pipeline)
        columns = self.basis.exact_DK
        self.inside, self.tail = columns @ columns.T, pipeline.stages[-1].start
        self.farthest, self.looked, self.digests = 0.0, 0, set()
        with torch.no_grad():
            for name, x in self.reference.model.named_parameters():
                self._initial(name, x)

    def _initial(self, name, x):
        """As every server of a stage begins: with the frozen table as the embedding."""
        if name == EMBEDDING:
            x.copy_(self.basis.fixed_VD)
        else:
            x.copy_(self.projected(name, x).to(self.plan.dtype))

    def constrained(self, name):
        layer = int(name.split(".")[2]) if ".layers." in name else None
        if layer is None:
            return name == EMBEDDING
        return layer < self.tail and name.endswith(("o_proj.weight", "down_proj.weight"))

    def projected(self, name, w):
        if not self.constrained(name):
            return w
        frozen = self.basis.fixed_VD.double() if name == EMBEDDING else torch.zeros(())
        return frozen + (w - frozen) @ self.inside if name == EMBEDDING else self.inside @ w

    def gradient(self, key):
        if key not in self._gradients:
            self._gradients[key] = self.gradient_now(key)
        return self._gradients[key]

    def gradient_now(self, key):
        """By the weights that the unsplit model has now."""
        leaves = {
            name: x.detach().requires_grad_() for name, x in self.reference.model.named_parameters()
        }
        tokens, targets = self.batch(key)
        weights = {name: self.projected(name, x) for name, x in leaves.items()}
        logits = functional_call(self.reference.model, weights, (tokens,))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def train_constrained(self, keys):
        """Of the unsplit model a step with the mean gradient of these, and the projection after
        it."""
        gradients = [self.gradient_now(key) for key in keys]
        for name, parameter in self.reference.model.named_parameters():
            parameter.grad = sum(one[name] for one in gradients) / TOKENS
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.reference.model.named_parameters():
                parameter.copy_(self.projected(name, parameter))

    def call_stage(self, stage, weights, x):
        return super().call_stage(
            stage, {name: self.projected(name, w.double()) for name, w in weights.items()}, x
        )

    def watch(self, number, node):
        super().watch(number, node)
        if node.serving is not None:
            replica, basis = node.serving.loop.driver.replica, node.edges.codec.basis
            self.digests.add(basis.digest)
            self._watch(replica, node.serving.model)

    def _watch(self, replica, model):
        """After each step and each write of weights."""
        audit = self
        names = {
            name: 1 if name == EMBEDDING else 0
            for name, _ in model.named_parameters()
            if self.constrained(name)
        }

        class Watched(type(replica)):
            def write(self, tensors, what, mix=1.0):
                super().write(tensors, what, mix)
                audit.look(model, names) if what == "param" else None

            def inner_step(self, lr=None):
                super().inner_step(lr)
                audit.look(model, names)

        replica.__class__ = Watched
        self.look(model, names)

    def look(self, model, names):
        found = dict(model.named_parameters())
        far = outside(found, names, self.basis, {EMBEDDING: self.basis.fixed_VD}) if names else 0.0
        self.farthest, self.looked = max(self.farthest, far), self.looked + 1

    def check(self):
        super().check()
        return self.check_inside()

    def check_inside(self):
        assert self.digests == {self.basis.digest}, "a peer made another basis"
        assert self.looked > 3
        dtype = self.plan.dtype
        assert self.farthest <= (2e-6 if dtype == torch.float32 else 1e-14), (
            f"{self.farthest} left the subspace"
        )
        return self


def audit(
    stages,
    servers,
    trainers=1,
    steps=None,
    seed=0,
    rate=STILL,
    codec=EXACT,
    close=DOUBLE,
    world=None,
    **options,
):
    """Return an audit to run, for a number of steps or for as long as the test wants."""
    total = TOKENS * steps if steps else FOREVER
    around = {"limit_s": 900.0, "view_s": 2.0, "away_s": (3.0, 8.0)} | (world or {})
    made = dataclasses.replace(plan(seed, total, rate), **options)
    surroundings = PipelineWorld(parts(stages, servers, trainers), total, **around)
    return Subspaced(made, pipeline(stages, BATCH, codec), surroundings, close)


# gradients


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_gradients_are_those_of_the_unsplit_constrained_model_wherever_it_is_cut(stages):
    one = audit(stages, servers=1, trainers=2, steps=3, seed=stages).run().check().check_finished()
    assert all(len(rounds) >= 3 for rounds in one.named.values())


@pytest.mark.usefixtures("anywhere")
def test_with_weights_that_move_each_gradient_is_that_of_the_constrained_weights_along_its_way():
    one = audit(stages=3, servers=1, trainers=2, steps=4, rate=0.3).run().check().check_finished()
    assert one.mixed_versions > 0, "no microbatch was on its way while weights changed"


@pytest.mark.parametrize("inner", [pytest.param("sgd", marks=pytest.mark.long), "adamw"])
def test_a_trainer_that_waits_for_each_round_trains_the_unsplit_constrained_model(inner):
    waits = TrainerTerms(window=BATCH, kept=BATCH, forward_timeout_s=4.0, backward_timeout_s=6.0)
    config = InnerConfig(inner, 0.05, (0.9, 0.95), 0.1)
    one = audit(stages=3, servers=1, steps=4, rate=config.lr, inner=config)
    one.pipeline = dataclasses.replace(one.pipeline, trainer=waits)
    one.optimizer = config.build(one.reference.model)
    one.in_lockstep().run().check_inside()
    start = {name: x.detach().clone() for name, x in one.reference.model.named_parameters()}
    for number in range(3):
        assert one.named[0][number] == one.named[1][number] == one.named[2][number]
        one.train_constrained(one.named[0][number])
        seen = [weights for stage in range(3) for weights in one.versions.get((stage, number), [])]
        assert seen
        for weights in seen:
            for name, x in weights.items():
                expected = one.reference.model.get_parameter(name).detach()
                torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    assert any(
        float((x - start[name]).abs().amax()) > 0.01
        for name, x in one.reference.model.state_dict().items()
    )


@pytest.mark.parametrize("inner", [pytest.param("sgd", marks=pytest.mark.long), "adamw"])
def test_in_single_precision_all_servers_of_a_stage_stay_equal_to_the_bit(
    inner,
):
    one = single(
        InnerConfig(inner, 0.02, (0.9, 0.95), 0.1), stages=3, servers=2, trainers=2, steps=3
    )
    one.run().check().check_finished()
    served = {
        stage: {life.number for life, _, keys in one.taken if keys and life.stage == stage}
        for stage in range(3)
    }
    assert all(len(numbers) > 1 for numbers in served.values()), (
        "every stage's work was one server's"
    )


def single(inner, **given):
    """A run as manifests make it: fp32, and coordinates in it."""
    codec = given.pop("codec", f"subspace:{RANK}+fp32,fp32")
    return audit(
        codec=codec, close=SINGLE, rate=inner.lr, inner=inner, dtype=torch.float32, **given
    )


# what changes weights


def test_after_compressed_means_weights_are_brought_back():
    lossy = {"codec": "bf16", "return_codec": "bf16"}
    one = single(
        InnerConfig("adamw", 0.02, (0.9, 0.95), 0.1), stages=2, servers=2, steps=3, options=lossy
    )
    one.check_means = False
    one.run().check().check_finished()


def test_outer_steps_on_weights_sent_in_four_bits_end_in_the_subspace():
    options = {"period": 2, "codec": "int4", "return_codec": "bf16"}
    given = {"method": "diloco", "options": options, "stages": 3, "servers": 2, "steps": 4}
    one = single(InnerConfig("adamw", 0.02, (0.9, 0.95), 0.1), **given)
    one.weights_of = lambda life: {}  # between rounds servers differ, as the method wants
    one.run().check_inside().check_finished()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_under_churn_newcomers_adopt_projected_weights_and_the_same_basis(seed):
    inner = InnerConfig("adamw", 0.02, (0.9, 0.95), 0.1)
    one = single(
        inner, stages=2, servers=3, trainers=1, steps=20, seed=seed, world={"churn_s": 4.0}
    )
    one.run().check().check_finished()
    assert one.tale.kills > 1
    later = {life.stage for life in one.lives if min(life.weights, default=-1) >= 0}
    assert later, "no peer came while the run went on"


def test_a_stage_made_from_its_neighbours_of_which_one_is_free_begins_in_the_subspace():
    one = single(InnerConfig("sgd", 0.02), stages=4, servers=1, steps=5)
    one.begun_anew = True

    async def die_out(sim):
        await until(lambda: sim.settled and len(one.named[2]) >= 2, every_s=0.1)
        for number, part in enumerate(one.world.parts):
            if part.stage == 2:
                sim.kill(number, 4.0 + number)

    one.run(die_out).check().check_finished()
    begun = [fields["from"] for fields in one.tale.fields("stage") if fields["stage"] == 2]
    assert "mean" in begun


# bytes, and other bases


def test_what_passes_edges_is_a_stamp_and_so_many_coordinates_a_token_both_ways():
    for codec, each in (
        (EXACT, 8 * RANK),
        (f"subspace:{RANK}", 2 * RANK),
        (f"subspace:{RANK}+fp32,fp32", 4 * RANK),
    ):
        one = audit(stages=3, servers=1, steps=1, codec=codec)
        one.run()
        sizes = {len(payload) for payload in one.made_by if payload}
        assert sizes == {12 + 8 * each}, "8 tokens"


def test_a_server_with_another_basis_refuses_by_name_and_computes_nothing():
    """As a machine would whose arithmetic is another one, and that the manifest's digest did not
    stop."""
    one = single(InnerConfig("sgd", 0.02), stages=2, servers=2, steps=2)
    other = dataclasses.replace(one.basis, version=2)
    look, refusals, computed = one.watch, [], []

    def looking(number, node):
        look(number, node)
        if node.serving is not None and number == 3:
            codec = dataclasses.replace(node.edges.codec, basis=other)
            passes = node.serving.server.passes
            passes.ends = EdgeEnds(dataclasses.replace(node.edges, codec=codec))
            read, stage = passes.read, passes.stage

            def reading(job):
                refusals.append(read(job))
                return refusals[-1]

            passes.read, stage.backward = reading, computed.append

    one.watch = looking
    one.run().check().check_finished()
    assert refusals
    said = {refusal.why for refusal in refusals}
    assert all(
        why.startswith(f"subspace:{RANK}+fp32,fp32 came with basis 1") and "held in epoch" in why
        for why in said
    )
    assert not computed
