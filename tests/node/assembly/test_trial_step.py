"""True steps find how much of a batch a device computes at once, and leave nothing on it."""

import pytest
from worlds.card import CARD

from farflock.node.assembly.trial_step import fitting
from farflock.node.model.device import Device
from farflock.node.model.step_options import StepOptions
from farflock.node.run.manifest import resolve
from farflock.node.run.memory import StepChoices, min_device_bytes, needed_device_bytes

PLAIN = StepOptions()
SHAPE = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32, "context": 32}
WIDE = SHAPE | {"dim": 128, "ffn_dim": 512}


def plan(method="local", shape=SHAPE, **train):
    terms = {"batch": 4, "seq": 32} | train
    return resolve({"model": shape, "method": {"name": method}, "train": terms}).plan()


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
    assert fitting(run, there, PLAIN) == 4
    taken = CARD.peak_bytes - before
    assert min_device_bytes(run) <= taken <= needed_device_bytes(run) <= 1.4 * taken


@pytest.mark.ci_more
def test_what_does_not_fit_is_halved_until_it_does_and_leaves_nothing(card_of):
    run, there, before = plan(), card_of(), CARD.used_bytes
    CARD.capacity_bytes = before + needed_device_bytes(run, StepChoices(1))
    assert fitting(run, there, PLAIN) in (1, 2)
    there.release()
    assert CARD.used_bytes == before
    CARD.capacity_bytes = before + needed_device_bytes(run, StepChoices(2))
    assert fitting(run, there, PLAIN) == 2
    assert fitting(run, there, StepOptions(micro_batch=1)) == 1


@pytest.mark.parametrize("share", [0.9, pytest.param(0.3, marks=pytest.mark.ci_more)])
def test_a_model_without_room_for_one_sequence_is_found_and_leaves_nothing(card_of, share):
    run, there, before = plan(batch=2), card_of(), CARD.used_bytes
    CARD.capacity_bytes = before + int(share * min_device_bytes(run))
    assert fitting(run, there, PLAIN) is None
    there.release()
    assert CARD.used_bytes == before


@pytest.mark.ci_more
def test_it_tries_the_precision_that_will_train(card_of):
    assert fitting(plan(shape=WIDE, batch=2), card_of("fp16"), PLAIN) == 2
