"""Sampling is a pure function of its arguments, respects its limits, slides past the context."""

import itertools
import math
from collections import Counter

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.model.generate import (
    GREEDY,
    Sampling,
    draw,
    generate,
    nucleus,
    pieces,
    sample,
    stream,
)
from farflock.node.model.llama import PRESETS, build
from farflock.node.tokens.tokenizer import ByteTokenizer

ALL = Sampling(temperature=1.0, top_k=None)
CONTEXT = PRESETS["tiny"].context


@pytest.fixture(scope="module")
def model():
    model = build(PRESETS["tiny"], 0)
    with torch.no_grad():  # far from uniform, so that temperature and top-k matter
        model.model.norm.weight.mul_(3)
    return model


def text(model, prompt="Once", tokens=30, **options):
    return generate(model, ByteTokenizer(), prompt, tokens, **options)


def first(count, tokens):
    return list(itertools.islice(tokens, count))


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model):
    state = torch.get_rng_state()
    assert text(model, seed=1) == text(model, seed=1)
    assert text(model, seed=1) != text(model, seed=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_number_of_tokens_is_kept_beyond_the_context(model):
    assert len(first(2 * CONTEXT, sample(model, [65], ALL, seed=0))) == 2 * CONTEXT
    assert text(model, tokens=0) == ""


def test_of_a_prompt_beyond_the_context_the_beginning_drops_out(model):
    tail = [(7 * i) % 256 for i in range(CONTEXT)]
    alone = first(20, sample(model, tail, GREEDY, seed=0))
    assert alone == first(20, sample(model, [9, 8, 7, *tail], GREEDY, seed=0))


def test_a_token_costs_one_position_and_a_full_window_its_newer_half(model, monkeypatch):
    lengths, next_logits = [], model.next_logits

    def noted(ids_BL, cache):
        lengths.append(ids_BL.shape[1])
        return next_logits(ids_BL, cache)

    monkeypatch.setattr(model, "next_logits", noted)
    first(CONTEXT, sample(model, [65] * 10, ALL, seed=0))
    ones = CONTEXT - 10
    assert lengths == [10, *[1] * ones, CONTEXT // 2, *[1] * (CONTEXT - ones - 2)]


def test_a_context_of_one_token_is_enough():
    model = build(msgspec.structs.replace(PRESETS["tiny"], context=1), 0)
    assert len(first(5, sample(model, [65, 66], ALL, seed=0))) == 5


def test_temperature_zero_takes_the_likeliest_token(model):
    ids = [72, 101]
    token = next(sample(model, ids, GREEDY, seed=3))
    assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
    greedy = text(model, sampling=GREEDY, seed=1)
    assert greedy == text(model, sampling=GREEDY, seed=2)
    assert greedy == text(model, sampling=Sampling(top_k=1))


def test_tokens_that_the_tokenizer_lacks_are_never_drawn(model):
    with torch.no_grad():
        last = model(torch.tensor([[72, 101]]))[0, -1]
    limit = int(last.argmax())
    drawn = next(sample(model, [72, 101], GREEDY, seed=0, vocabulary=limit))
    assert drawn == int(last[:limit].argmax())
    config = msgspec.structs.replace(model.config, vocab_size=5_000)
    hot = Sampling(temperature=5.0, top_k=None)
    assert len(text(build(config, 3), tokens=20, sampling=hot)) == 20


def test_the_end_of_text_ends_the_text_and_is_not_part_of_it(model):
    ids = first(30, sample(model, list(b"Once"), seed=1))
    end = ids[7]
    said = text(model, seed=1, end=end)
    assert said == ByteTokenizer().decode(ids[: ids.index(end)])
    assert len(said) < len(text(model, seed=1))
    absent = next(token for token in range(256) if token not in ids)
    assert text(model, seed=1, end=absent) == text(model, seed=1)


def test_an_empty_prompt_starts_at_a_new_line(model):
    assert text(model, prompt="") == text(model, prompt="\n")
    with pytest.raises(ValueError, match="give a prompt"):
        sample(model, [], seed=0)


def test_the_prompt_is_used_and_not_changed(model):
    ids = [1, 2, 3]
    first(3, sample(model, ids, seed=0))
    assert ids == [1, 2, 3]
    assert text(model, prompt="A", sampling=GREEDY) != text(model, prompt="B", sampling=GREEDY)


def test_a_piece_is_there_before_the_next_token_is_computed(model, monkeypatch):
    asked, next_logits = [], model.next_logits

    def noted(ids_BL, cache):
        asked.append(ids_BL.shape[1])
        return next_logits(ids_BL, cache)

    monkeypatch.setattr(model, "next_logits", noted)
    ascii_only = Sampling(temperature=0.0, top_k=None)
    said = stream(model, SevenBits(), "Once", 30, sampling=ascii_only)
    for number in range(1, 6):
        assert len(next(said)) == 1
        assert len(asked) == number


class SevenBits(ByteTokenizer):
    """Bytes below 128 alone, each of which is a character."""

    vocab_size = 128


def counts(logits, count=300, **options):
    """How often each token is drawn."""
    generator, sampling = torch.Generator().manual_seed(0), Sampling(**{"top_k": None} | options)
    return Counter(draw(torch.tensor(logits), sampling, generator) for _ in range(count))


def test_draws_follow_the_softmax_at_the_temperature():
    found = counts([0.0, 1.0, 2.0], 4000, temperature=2.0)
    weights = [math.exp(logit / 2) for logit in (0, 1, 2)]
    for token, weight in enumerate(weights):
        assert found[token] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {1, 3}),  # the likeliest one has 0.32
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 4, "top_p": 0.6}, {1, 3}),
    ],
)
def test_only_the_likeliest_tokens_stay(options, left):
    assert counts([0.0, 5.0, 1.0, 4.9, 2.0], temperature=5.0, **options).keys() == left


@given(
    logits=st.lists(st.floats(-20, 20, width=16), min_size=2, max_size=30, unique=True),
    top_p=st.sampled_from([0.1, 0.55, 0.9, 1.0]),
)
@settings(max_examples=25)
def test_the_tokens_that_stay_are_those_of_transformers(logits, top_p):
    warpers = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.tensor(logits)
    expected = warpers.TopPLogitsWarper(top_p)(torch.tensor([[0]]), scores[None].clone())[0]
    kept = nucleus(scores.softmax(-1), top_p)
    torch.testing.assert_close(kept / kept.sum(), expected.softmax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_extreme_temperatures_still_draw_a_token(temperature):
    for options in ({}, {"top_p": 0.5}):
        assert counts([-80.0, 90.0, 3.0], 5, temperature=temperature, **options).keys() <= {0, 1, 2}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temperature": -0.1}, "it must be finite and 0 or more"),
        ({"temperature": math.inf}, "it must be finite and 0 or more"),
        ({"temperature": math.nan}, "it must be finite and 0 or more"),
        ({"top_k": 0}, "top_k is 0; it must be 1 or more"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0"),
        ({"top_p": math.nan}, "top_p is nan; it must be above 0"),
    ],
)
def test_options_out_of_range_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        Sampling(**options)


@given(ids=st.lists(st.integers(0, 255)), said=st.text())
@settings(max_examples=25)
def test_pieces_make_up_the_text(ids, said):
    tokenizer = ByteTokenizer()
    for tokens in (ids, tokenizer.encode(said).tolist()):
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_character_is_said_once_it_is_whole():
    assert list(pieces(ByteTokenizer(), "aé한".encode())) == ["a", "é", "한"]


def test_half_a_character_at_the_end_is_shown_as_the_tokenizer_shows_it():
    assert list(pieces(ByteTokenizer(), "aé".encode()[:-1])) == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_a_tokenizer_that_writes_spaces_between_words_keeps_them_between_pieces():
    class Words(ByteTokenizer):
        def decode(self, ids):
            return " ".join("abc"[token] for token in ids)

    assert list(pieces(Words(), [0, 1, 2])) == ["a", " b", " c"]
