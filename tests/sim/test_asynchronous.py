"""Pipelines that do not wait, on the simulated network: each gradient is that of one function,
whichever servers compute its passes; its delay is measured, agreed upon and bounded; and over slow
links more work gets done."""

import asyncio
import collections
import dataclasses

import pytest
import torch
from torch.func import functional_call
from worlds.pipeline_audit import CLOSE, Audit, pipeline, plan
from worlds.waiting import until

from farflock.node.run.terms import Asynchronous, ServerTerms, TrainerTerms
from farflock.node.simulate.pipeline import PipelineWorld, parts
from farflock.optimizers.parts.corrections import TREND
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.sim.network import LinkModel

# contrib: its simulations run in `make test-long` (node/pipeline/contrib)
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quiet_log")]

BATCH = 8  # microbatches
TOKENS = 8 * BATCH
FOREVER = 10**9  # tokens of runs that a test ends
RATE = 0.3
# of each of the two lines between peers: a call takes 0.4 s and more
SLOW = LinkModel(latency_s=0.1)


def late(
    staleness=3,
    steps=6,
    servers=2,
    seed=0,
    stages=3,
    asynchronous=None,
    link=SLOW,
    inner=None,
    method=None,
    **options,
):
    """A run of moving weights, whose microbatches are on their way for several rounds."""
    total = TOKENS * steps if steps else FOREVER
    terms = {
        "server": ServerTerms(lease_s=20.0, staleness=staleness),
        "trainer": TrainerTerms(
            window=64, kept=128, forward_timeout_s=8.0, backward_timeout_s=12.0
        ),
        "asynchronous": asynchronous or Asynchronous(staleness + 1),
    }
    made = dataclasses.replace(
        plan(seed, total, rate=RATE), **({"inner": inner} if inner else {}), **(method or {})
    )
    world = PipelineWorld(parts(stages, servers, 1), total, link, limit_s=900.0, view_s=2.0)
    return Audit(made, pipeline(stages, BATCH, **(terms | options)), world)


class Ways:
    """The passes of a microbatch that a run's audit saw, from one backward pass on."""

    def __init__(self, audit):
        self.audit, self.last = audit, len(audit.pipeline.stages) - 1

    def of(self, back):
        backs = {back.stage: back}
        for stage in range(back.stage, self.last):
            backs[stage + 1] = self.audit.made_by[backs[stage].outside]
        forwards, x = {}, backs[self.last].x
        for stage in range(self.last - 1, -1, -1):
            forwards[stage] = self.audit.made_by[x]
            x = forwards[stage].x
        return forwards, backs

    def check(self):
        """Each gradient that counts is the unsplit model's, whose stages have one version each."""
        checked, apart = 0, 0
        for life in self.audit.lives:
            for key, back in life.merged.items():
                forwards, backs = self.of(back)
                for stage in forwards.keys() & backs.keys():
                    assert forwards[stage].weights is backs[stage].weights, (
                        "a stage went back with other weights"
                    )
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
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        whole = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for name, x in self.audit.gradient_of(key, back).items():
            torch.testing.assert_close(x, whole[name], **CLOSE)


def check_ages(audit):
    """Check that the lateness in the notes is each gradient's lateness, and within the bound;
    return the counts by lateness."""
    found = collections.Counter()
    for stage, rounds in audit.ages.items():
        versions = {
            key: back.round
            for life in audit.lives
            if life.stage == stage
            for key, back in life.merged.items()
        }
        for number, ages in rounds.items():
            for key, age in ages.items():
                assert age == number - 1 - versions[key]
                assert 0 <= age <= audit.pipeline.server.staleness
                found[age] += 1
    return found


@pytest.mark.usefixtures("anywhere")
def test_gradients_of_moving_weights_are_those_of_the_unsplit_model_at_one_version_a_stage():
    one = late().run().check()
    one.check_finished()
    checked, apart = Ways(one).check()
    assert checked > 30
    assert apart > 0, "no microbatch met stages of different rounds"
    assert max(check_ages(one)) >= 1, "nothing was late"


def test_a_server_that_dies_between_two_passes_is_replaced_by_one_with_its_weights():
    one = late(servers=3, steps=7)
    by, dead = {}, []
    make = one.pass_of

    def made_by(life, *given, **named):
        found = make(life, *given, **named)
        by[id(found)] = life.number
        return found

    def die(what, number):
        stage = one.world.parts[number].stage
        due = one.events[what] >= 25 + 20 * len(dead) and one.ages[stage]
        if (
            what == "forward answered"
            and due
            and len(dead) < 2
            and stage not in [one.world.parts[x].stage for x in dead]
        ):
            dead.append(number)
            one.sim.kill(number, None)

    one.pass_of, one.on_event = made_by, die
    one.run().check().check_finished()
    assert len(dead) == 2
    Ways(one).check()
    taken_over = 0
    for life in one.lives:
        for back in life.merged.values():
            forwards, _ = Ways(one).of(back)
            there = forwards.get(back.stage)
            taken_over += there is not None and by[id(there)] in dead and by[id(back)] not in dead
    assert taken_over > 0, "no server took over a dead one's forward pass"
    check_ages(one)


# what is too late


def dropped(one):
    return sum(
        node.trainer.commits.dropped for node in one.sim.nodes.values() if node.trainer is not None
    )


def left_out(one):
    return sum(life.serving.server.served["late"] for life in one.lives)


def test_without_old_weights_a_microbatch_that_crosses_a_round_is_dropped():
    one = late(asynchronous=Asynchronous(1), steps=5).run().check()
    one.check_finished()
    Ways(one).check()
    check_ages(one)
    events = one.tale.fields("dropped")
    assert len(events) == dropped(one) > 0
    named = {
        stage: {key[1] for ages in rounds.values() for key in ages}
        for stage, rounds in one.ages.items()
    }
    for fields in events:
        assert fields["number"] not in named[fields["stage"]]


def test_or_differentiated_at_the_newest_weights_if_that_is_wanted():
    one = late(asynchronous=Asynchronous(1, gone="newest"), steps=5).run().check()
    one.check_finished()
    assert dropped(one) == 0
    assert one.mixed_versions > 0
    with pytest.raises(AssertionError, match="with other weights"):
        Ways(one).check()


def test_what_becomes_too_late_while_it_waits_for_its_round_is_named_and_left_out():
    one = late(staleness=0, steps=6).run().check()
    one.check_finished()
    assert left_out(one) > 0
    assert set(check_ages(one)) == {0}
    assert dropped(one) > 0, "its trainer does not know"


# nothing is late


PLAIN = InnerConfig("sgd", RATE, weight_decay=0.0)
HEAVY = InnerConfig("sgd", RATE / 10, weight_decay=0.0, momentum=0.9)
CORRECTED = [
    ("none", PLAIN),
    ("spike+prediction", HEAVY),
    ("braking", InnerConfig("adamw", RATE / 100)),
    ("nesterov", InnerConfig("sgd", RATE / 10, weight_decay=0.0, momentum=0.9, nesterov=True)),
    ("nesterov", InnerConfig("nadam", RATE / 100)),
]


@pytest.mark.parametrize(("correction", "inner"), CORRECTED, ids=lambda given: str(given)[:24])
def test_where_nothing_is_late_it_is_the_run_that_waits_to_the_bit(correction, inner):
    exact = TrainerTerms(window=BATCH, kept=BATCH, forward_timeout_s=8.0, backward_timeout_s=12.0)
    asynchronous = late(
        1,
        4,
        1,
        link=LinkModel(),
        inner=inner,
        asynchronous=Asynchronous(2, correction),
        trainer=exact,
    )
    waiting = late(1, 4, 1, link=LinkModel(), inner=inner, trainer=exact)
    waiting.pipeline = dataclasses.replace(waiting.pipeline, asynchronous=None)
    one, other = (
        each.in_lockstep().run().check().check_finished() for each in (asynchronous, waiting)
    )
    assert set(check_ages(one)) == {0}
    assert one.named == other.named
    ends = [
        [node.serving for node in run.sim.nodes.values() if node.serving is not None]
        for run in (one, other)
    ]
    assert len(ends[0]) == 3
    for mine, theirs in zip(*ends, strict=True):
        states = [
            life.loop.driver.method.snapshot(life.loop.driver.replica) for life in (mine, theirs)
        ]
        kept = [
            {name: x for name, x in state.items() if not name.startswith(TREND)} for state in states
        ]
        assert mine.state_sync.applied_round >= 3
        assert state_hash(kept[0]) == state_hash(kept[1]), "weights, or moments"
        assert all(
            torch.equal(x, y)
            for x, y in zip(mine.model.parameters(), theirs.model.parameters(), strict=True)
        )


# corrections, and methods of local steps


@pytest.mark.parametrize(("correction", "inner"), CORRECTED[1:3], ids=lambda given: str(given)[:24])
def test_all_servers_of_a_stage_correct_alike_and_stay_equal(correction, inner):
    one = late(asynchronous=Asynchronous(4, correction), inner=inner, steps=6).run().check()
    one.check_finished()
    Ways(one).check()
    assert max(check_ages(one)) >= 1
    ages = {life.serving.server.passes.versions.age.epochs for life in one.lives}
    assert max(ages) > 0, "no step was corrected"
    marks = collections.defaultdict(set)
    for life in one.lives:
        state_sync = life.serving.state_sync
        marks[life.stage, state_sync.applied_round].add(state_sync.marks.get("delay"))
    assert all(len(delays) == 1 for delays in marks.values()), (
        "servers of a stage differ in how late its round was"
    )


@pytest.mark.usefixtures("anywhere")
def test_members_whose_weights_part_between_rounds_compute_with_what_they_agreed_upon():
    options = {
        "method": "diloco",
        "options": {"period": 3, "codec": "fp32", "return_codec": "fp32"},
    }
    one = late(staleness=2, steps=9, method=options)
    one.run()
    checked, _ = Ways(one).check()
    assert checked > 40
    ages = collections.Counter(
        age for rounds in one.ages.values() for found in rounds.values() for age in found.values()
    )
    assert 0 <= min(ages) <= max(ages) <= 2
    assert len({life.serving.server.passes.versions.age.epochs for life in one.lives}) > 1, (
        "local steps know no delay"
    )


# throughput


def pace(staleness, asynchronous, seconds=60.0):
    """Microbatches a second that are merged at the first stage, and the trainer's last losses,
    over a slow line."""
    one = late(
        staleness,
        steps=None,
        asynchronous=asynchronous,
        server=ServerTerms(staleness=staleness, places=64),
    )
    if asynchronous is None:
        one.pipeline = dataclasses.replace(one.pipeline, asynchronous=None)
    counts = []

    async def measure(sim):
        await asyncio.sleep(30.0)
        for wait_s in (0.0, seconds):
            await asyncio.sleep(wait_s)
            servers = [
                node.serving
                for node in sim.nodes.values()
                if node.serving is not None and not node.serving.index
            ]
            counts.append(sum(serving.server.served["merged"] for serving in servers))
        sim.end()

    one.run(measure)
    losses = [fields["loss"] for fields in one.tale.fields("loss")]
    return (counts[1] - counts[0]) / seconds, sum(losses[-BATCH:]) / BATCH


def test_over_a_slow_line_more_gets_done_without_waiting():
    waiting, _ = pace(1, None)
    asynchronous, loss = pace(4, Asynchronous(5))
    assert asynchronous > 1.5 * waiting
    assert loss < 2.9, "it does not learn"


def test_a_stage_that_is_begun_anew_has_other_versions_under_the_same_numbers():
    one = late(steps=7, link=LinkModel(latency_s=0.05))
    one.begun_anew = True

    async def die_out(sim):
        await until(lambda: sim.settled and len(one.named[1]) >= 2)
        for number, part in enumerate(one.world.parts):
            if part.stage == 1:
                # the second adopts the state before its first round: these weights are doubles,
                # and a snapshot rounds those that have moved to float32
                sim.kill(number, 3.0 + number / 2)

    one.run(die_out).check().check_finished()
    Ways(one).check()
    begun = [fields for fields in one.tale.fields("stage") if fields["stage"] == 1]
    assert [fields["round"] >= 0 for fields in begun] == [False, False, True]
    origins = {
        life.serving.server.passes.versions.newest.origin for life in one.lives if life.stage == 1
    }
    assert 0 in origins
    assert len(origins) == 2, "the second server to come back has the first one's state"
    check_ages(one)
