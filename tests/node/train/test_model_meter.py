"""A model's weights on held-out text: the same numbers as an evaluation of the model itself."""

import math

import pytest
import torch

from farflock.node.model.data import evaluation_rows, inputs_and_targets
from farflock.node.model.evaluation import HeldOut, copy_of, evaluate
from farflock.node.model.llama import PRESETS, build
from farflock.node.tokens.token_bytes import bytes_of_tokens
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.train.model_meter import ModelMeter

TEXT = ByteTokenizer().encode("It was the best of times, it was the worst of times. " * 8)


def never():
    return False


@pytest.fixture(scope="module")
def model():
    return build(PRESETS["tiny"], 3)


@pytest.fixture(scope="module")
def held_out():
    return HeldOut(evaluation_rows(TEXT, 32, 256), bytes_of_tokens(ByteTokenizer()))


def test_other_weights_are_measured_as_the_model_with_them_and_the_model_stays_as_it_is(
    model, held_out
):
    other = build(PRESETS["tiny"], 4)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    measure = ModelMeter(model, lambda: held_out, ByteTokenizer()).copy(
        dict(other.named_parameters())
    )
    expected = evaluate(other, *inputs_and_targets(held_out.rows))
    with torch.no_grad():
        for parameter in other.parameters():  # rounds go on meanwhile
            parameter.zero_()
    found = measure(never)
    assert found.estimate.mean == pytest.approx(expected.mean, rel=1e-6)
    assert found.estimate.standard_error == pytest.approx(expected.standard_error, rel=1e-5)
    assert found.sample
    assert found.bits_per_byte == pytest.approx(expected.mean / math.log(2))
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


def test_parameters_that_no_method_has_are_those_of_the_model(model):
    assert all(
        torch.equal(mine, own)
        for mine, own in zip(copy_of(model, {}).parameters(), model.parameters(), strict=True)
    )


def test_nothing_is_copied_before_the_text_is_here(model):
    assert ModelMeter(model, lambda: None, ByteTokenizer()).copy({}) is None


def test_it_stops_when_it_is_told_to(model, held_out):
    measure = ModelMeter(model, lambda: held_out, ByteTokenizer()).copy({})
    assert measure(lambda: True) is None
