"""True steps find how much of a batch a device computes at once, and leave nothing on it."""

import pytest
from worlds.card import CARD, probabilities_bytes

from farflock.node.assembly.trial_step import fitting
from farflock.node.model.device import Device
from farflock.node.model.step_options import StepOptions
from farflock.node.run.manifest import resolve
from farflock.node.run.memory import StepChoices, min_device_bytes, needed_device_bytes

PLAIN = StepOptions()
SHAPE = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32, "context": 32}
WIDE = SHAPE | {"dim": 128, "ffn_dim": 512}
DEEP = SHAPE | {"layers": 8}


def plan(method="local", shape=SHAPE, **train):
    terms = {"batch": 4, "seq": 32} | train
    return resolve({"model": shape, "method": {"name": method}, "train": terms}).plan()


def reckoned(run, sequences, checkpoints=False):
    """Return the bytes that steps take in float32 on the double, whose attention is not fused."""
    choices = StepChoices(sequences, on_device=True, checkpoints=checkpoints, is_lower=False)
    layers = 1 if checkpoints else run.model.layers
    kept = probabilities_bytes(run, sequences) * layers // run.model.layers
    return needed_device_bytes(run, choices) + kept


@pytest.fixture
def card_of(card):
    """A card that computes in this precision, nothing on it."""

    def made(precision="fp32"):
        found = Device(card, "Double Card", precision)
        found.release()
        CARD.reset_counters()
        return found

    return made


@pytest.mark.parametrize(
    ("method", "shape", "optimizer"),
    [
        ("ddp", SHAPE, "adamw"),
        pytest.param("local", SHAPE, "adamw", marks=pytest.mark.ci_more),
        pytest.param("local", WIDE, "muon", marks=pytest.mark.ci_more),
        pytest.param("local", WIDE, "sgd", marks=pytest.mark.ci_more),
    ],
)
def test_what_is_reckoned_is_what_a_step_takes(card_of, method, shape, optimizer):
    run, there, before = plan(method, shape, optimizer=optimizer), card_of(), CARD.used_bytes
    assert fitting(run, there, PLAIN) == StepOptions(micro_batch=4)
    taken = CARD.peak_bytes - before
    assert min_device_bytes(run) <= taken <= reckoned(run, 4) <= 1.4 * taken


@pytest.mark.ci_more
def test_what_does_not_fit_is_halved_until_it_does_and_leaves_nothing(card_of):
    run, there, before = plan(), card_of(), CARD.used_bytes
    CARD.capacity_bytes = before + reckoned(run, 1)
    assert fitting(run, there, PLAIN).micro_batch in (1, 2)
    there.release()
    assert CARD.used_bytes == before
    CARD.capacity_bytes = before + reckoned(run, 2)
    assert fitting(run, there, PLAIN) == StepOptions(micro_batch=2)
    there.release()
    # what lies there beside the model takes its room
    beside = reckoned(run, 2) - reckoned(run, 1)
    assert fitting(run, there, PLAIN, beside) == StepOptions(micro_batch=1)


def test_layers_are_computed_again_only_where_one_sequence_does_not_fit_otherwise(card_of):
    run, there, before = plan(shape=DEEP, batch=2), card_of(), CARD.used_bytes
    few = reckoned(run, 1, checkpoints=True)
    assert few < 0.7 * reckoned(run, 1)
    CARD.capacity_bytes = before + few
    assert fitting(run, there, PLAIN).checkpointing == "on"
    assert fitting(run, there, StepOptions("off")) is None


@pytest.mark.parametrize("share", [0.9, pytest.param(0.3, marks=pytest.mark.ci_more)])
def test_a_model_without_room_for_one_sequence_is_found_and_leaves_nothing(card_of, share):
    run, there, before = plan(batch=2), card_of(), CARD.used_bytes
    CARD.capacity_bytes = before + int(share * min_device_bytes(run))
    assert fitting(run, there, PLAIN) is None
    there.release()
    assert CARD.used_bytes == before


@pytest.mark.ci_more
def test_it_tries_the_precision_that_will_train(card_of):
    found = fitting(plan(shape=WIDE, batch=2), card_of("fp16"), PLAIN)
    assert found == StepOptions(micro_batch=2)
