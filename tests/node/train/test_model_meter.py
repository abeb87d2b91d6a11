"""A model's weights on held-out text: the same numbers as an evaluation of the model itself."""

import math

import pytest
import torch

from farflock.node.model.data import BadData
from farflock.node.model.evaluation import HeldOut, copy_of, evaluate, held_out_of
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
    return held_out_of(TEXT, 32, 256, bytes_of_tokens(ByteTokenizer()))


def test_it_takes_all_sequences_that_there_are(held_out):
    assert held_out.x.shape == ((len(TEXT) - 1) // 32, 32)
    with pytest.raises(BadData, match="too few"):
        held_out_of(TEXT[:20], 32, 256, None)


def test_other_weights_are_measured_as_the_model_with_them_and_the_model_stays_as_it_is(
    model, held_out
):
    other = build(PRESETS["tiny"], 4)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    measure = ModelMeter(model, held_out, ByteTokenizer()).copy(dict(other.named_parameters()))
    expected = evaluate(other, held_out.x, held_out.y)
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


def test_it_stops_when_it_is_told_to(model, held_out):
    measure = ModelMeter(model, held_out, ByteTokenizer()).copy({})
    assert measure(lambda: True) is None


def test_bits_a_byte_count_the_bytes_of_the_tokens():
    x = torch.zeros(2, 8, dtype=torch.int64)
    assert HeldOut(x, x, 64).bits_per_byte(1.0) == pytest.approx(0.25 / math.log(2))
    assert HeldOut(x, x, None).bits_per_byte(1.0) is None
