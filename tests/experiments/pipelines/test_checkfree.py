"""The experiment's own machinery: arms without failures are equal, the same seed gives the same
run, and the loss is that of the experiment's own model."""

import dataclasses

import msgspec
import pytest
import torch

from farflock.experiments.pipelines import checkfree
from farflock.experiments.pipelines.checkfree import (
    Failure,
    Pipeline,
    Recovery,
    Text,
    Trial,
    run,
    trace,
)
from farflock.node.data.samples import text_in_memory
from farflock.node.model.llama import PRESETS
from farflock.optimizers.parts.state import state_hash

TINY = Trial(
    config=msgspec.structs.replace(PRESETS["tiny"], layers=6, tied=False, context=16),
    steps=6,
    batch=2,
    seq=16,
    warmup_steps=2,
    checkpoint_every=2,
    points=(3, 6),
    held_out_sequences=2,
)


@pytest.fixture(scope="module")
def text():
    torch.set_num_threads(1)
    tokens = (
        torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0))
        .numpy()
        .astype("uint16")
    )
    return Text.of(TINY, text_in_memory(tokens[:3000]), tokens[3000:])


def everything(served):
    return state_hash(
        {
            f"{what}.{name}": x
            for what in checkfree.SAVED
            for name, x in served.replica.read(served.replica.names, what).items()
        }
    )


def test_without_failures_every_arm_is_plain_training_bit_for_bit(text):
    """Invariant 7 of specs 3.5; and likewise for the arms that swap."""
    plain = run(TINY, "no failure", (), text)
    for name in ("checkfree", "re-initialised", "checkpoint"):
        assert run(TINY, name, (), text).losses == plain.losses
    assert (
        run(TINY, "swap, no failure", (), text).losses
        == run(TINY, "checkfree+", (), text).losses
        != plain.losses
    )
    assert len(plain.losses) == 2
    assert plain.progress == 6


@pytest.mark.parametrize("name", ["checkfree", "checkfree+", "re-initialised", "checkpoint"])
def test_an_arm_is_the_same_each_time_and_a_failure_leaves_its_mark(text, name):
    failures = (Failure(3, 2), Failure(5, 4))
    arm = run(TINY, name, failures, text)
    assert arm == run(TINY, name, failures, text)
    assert arm.losses != run(TINY, name, (), text).losses
    assert [failure for failure, _ in arm.recoveries] == list(failures)


@pytest.mark.parametrize(
    ("name", "stage", "how"),
    [
        ("checkfree", 1, "mean of 0 and 2"),
        ("checkfree+", 1, "copy of 2"),
        ("checkfree+", 2, "mean of 1 and 3"),
        ("checkfree+", 4, "copy of 3"),
        ("re-initialised", 3, "initial weights"),
    ],
)
def test_no_other_stage_and_no_batch_pointer_changes(text, name, stage, how):
    """Invariant 6: parameters, moments and counters of the others, bit for bit;
    invariant 3 for the stage itself."""
    pipeline = Pipeline(TINY, text, name in checkfree.SWAPPED)
    for _ in range(3):
        pipeline.train()
    before = [everything(served) for served in pipeline.stages]
    assert Recovery(pipeline, name)(stage) == how
    changed = [
        place for place, served in enumerate(pipeline.stages) if everything(served) != before[place]
    ]
    assert changed == [stage]
    assert pipeline.step == 3
    replica = pipeline.stages[stage].replica
    assert not any(
        bool(x.any())
        for what in checkfree.SAVED[1:]
        for x in replica.read(replica.names, what).values()
    )


def test_a_checkpoint_sends_all_back_and_the_steps_are_spent_again(text):
    trained, broken = Pipeline(TINY, text, False), Pipeline(TINY, text, False)
    for _ in range(2):
        trained.train()
        broken.train()
    broken.save()
    broken.train()
    assert Recovery(broken, "checkpoint")(1) == "all stages from step 2"
    assert [everything(served) for served in broken.stages] == [
        everything(served) for served in trained.stages
    ]
    arm = run(TINY, "checkpoint", (Failure(3, 1),), text)
    assert arm.progress == 5
    shorter = dataclasses.replace(TINY, points=(5,))
    assert arm.losses[1] == run(shorter, "no failure", (), text).losses[0]


def test_traces_spare_the_ends_and_neighbours_and_follow_their_probability():
    failures = trace(dataclasses.replace(TINY, steps=3000, probability=0.02))
    assert failures == trace(dataclasses.replace(TINY, steps=3000, probability=0.02))
    assert failures != trace(dataclasses.replace(TINY, steps=3000, probability=0.02, seed=1))
    assert {failure.stage for failure in failures} == {1, 2, 3, 4}
    assert len(failures) == pytest.approx(0.02 * 4 * 3000, rel=0.2)
    together = set(failures)
    assert len(together) == len(failures)
    assert not any(Failure(one.step, one.stage + 1) in together for one in failures)
    assert max(failure.step for failure in failures) < 3000


def test_rows_are_of_all_arms_and_seeds(monkeypatch):
    made = []

    def experiment(trial):
        made.append(trial)
        recovered = Failure(1, 1), 0.5 + trial.seed
        arm = checkfree.Arm((4.0,) * 5 + (3.0 + trial.seed,), (recovered,) * 2, 60)
        return (Failure(1, 1),), dict.fromkeys(checkfree.ARMS, arm)

    monkeypatch.setattr(checkfree, "experiment", experiment)
    shares = []
    size = checkfree.Size(steps=66, batch=2, held_out=5, seeds=[3, 4])
    table = checkfree.compute(size, shares.append)
    rows = {row.name: row.values for row in table.rows}
    assert len(rows) == len(table.rows) == 8 * len(checkfree.ARMS)
    assert rows["checkfree+, at the end"] == [6.0, 7.0]
    assert rows["checkfree+, added by a recovery"] == [3.5, 4.5]
    assert [(trial.seed, trial.points) for trial in made] == [
        (3, (11, 22, 33, 44, 55, 66)),
        (4, (11, 22, 33, 44, 55, 66)),
    ]
    assert {
        (trial.steps, trial.warmup_steps, trial.batch, trial.held_out_sequences) for trial in made
    } == {(66, 4, 2, 5)}
    assert shares == [0.5, 1.0]
    assert not any(row.exact for row in table.rows)
