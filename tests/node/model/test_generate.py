"""Sampling is a pure function of its arguments, respects its limits, slides past the context."""

import itertools
import math
from collections import Counter

import msgspec
import pytest
import torch

from farflock.node.model.generate import draw, generate, sample
from farflock.node.model.llama import PRESETS, build
from farflock.node.tokens.tokenizer import ByteTokenizer

CONTEXT = PRESETS["tiny"].context


@pytest.fixture(scope="module")
def model():
    model = build(PRESETS["tiny"], 0)
    with torch.no_grad():  # far from uniform, so that temperature and top-k matter
        model.model.norm.weight.mul_(3)
    return model


def text(model, prompt="Once", tokens=30, **options):
    return generate(model, ByteTokenizer(), prompt, tokens, **options)


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model):
    state = torch.get_rng_state()
    assert text(model, seed=1) == text(model, seed=1)
    assert text(model, seed=1) != text(model, seed=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_number_of_tokens_is_kept_beyond_the_context(model):
    options = {"temperature": 1.0, "top_k": None, "seed": 0}
    ids = list(itertools.islice(sample(model, [65], **options), 2 * CONTEXT))
    assert len(ids) == 2 * CONTEXT
    assert text(model, tokens=0) == ""


def test_the_oldest_tokens_slide_out_of_the_context(model):
    tail = [(7 * i) % 256 for i in range(CONTEXT)]
    options = {"temperature": 0.0, "top_k": None, "seed": 0}
    alone = list(itertools.islice(sample(model, tail, **options), 20))
    after_more = list(itertools.islice(sample(model, [9, 8, 7, *tail], **options), 20))
    assert alone == after_more


def test_temperature_zero_takes_the_likeliest_token(model):
    ids = [72, 101]
    first = next(sample(model, ids, temperature=0.0, top_k=None, seed=3))
    assert first == int(model(torch.tensor([ids]))[0, -1].argmax())
    assert text(model, temperature=0.0, seed=1) == text(model, temperature=0.0, seed=2)
    assert text(model, temperature=0.0) == text(model, top_k=1)


def test_tokens_that_the_tokenizer_lacks_are_never_drawn(model):
    with torch.no_grad():
        last = model(torch.tensor([[72, 101]]))[0, -1]
    limit = int(last.argmax())
    drawn = next(sample(model, [72, 101], temperature=0.0, top_k=None, seed=0, vocabulary=limit))
    assert drawn == int(last[:limit].argmax())
    config = msgspec.structs.replace(model.config, vocab_size=5_000)
    assert len(text(build(config, 3), tokens=20, temperature=5.0, top_k=None)) == 20


def test_an_empty_prompt_starts_at_a_new_line(model):
    assert text(model, prompt="") == text(model, prompt="\n")
    with pytest.raises(ValueError, match="give a prompt"):
        sample(model, [], temperature=1.0, top_k=None, seed=0)


def test_the_prompt_is_used_and_not_changed(model):
    ids = [1, 2, 3]
    next(sample(model, ids, temperature=1.0, top_k=None, seed=0))
    assert ids == [1, 2, 3]
    assert text(model, prompt="A", temperature=0.0) != text(model, prompt="B", temperature=0.0)


def test_draws_follow_the_softmax_at_the_temperature():
    logits, generator = torch.tensor([0.0, 1.0, 2.0]), torch.Generator().manual_seed(0)
    counts = Counter(draw(logits, 2.0, None, generator) for _ in range(4000))
    weights = [math.exp(logit / 2) for logit in (0, 1, 2)]
    for token, weight in enumerate(weights):
        assert counts[token] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_top_k_leaves_only_the_k_likeliest():
    logits, generator = torch.tensor([0.0, 5.0, 1.0, 4.9, 2.0]), torch.Generator().manual_seed(0)
    assert {draw(logits, 5.0, 3, generator) for _ in range(300)} == {1, 3, 4}
    assert {draw(logits, 5.0, 99, generator) for _ in range(300)} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_extreme_temperatures_still_draw_a_token(temperature):
    generator = torch.Generator().manual_seed(0)
    assert draw(torch.tensor([-80.0, 90.0, 3.0]), temperature, None, generator) in (0, 1, 2)


@pytest.mark.parametrize("temperature", [-0.1, math.inf, math.nan])
def test_a_temperature_out_of_range_is_refused(model, temperature):
    with pytest.raises(ValueError, match="it must be finite and 0 or more"):
        text(model, temperature=temperature)


def test_a_top_k_below_one_is_refused(model):
    with pytest.raises(ValueError, match="top_k is 0; it must be 1 or more"):
        text(model, top_k=0)
