"""Sampling is a pure function of its arguments, respects its limits, slides past the context."""

import copy
import functools
import itertools
import math
from collections import Counter

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.model.generate import (
    GREEDY,
    Sampling,
    Window,
    draw,
    generate,
    penalised,
    pieces,
    sample,
    until,
)
from farflock.node.model.llama import PRESETS, build
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

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


def test_the_oldest_tokens_slide_out_of_the_context(model):
    tail = [(7 * i) % 256 for i in range(CONTEXT)]
    alone = first(20, sample(model, tail, GREEDY, seed=0))
    assert alone == first(20, sample(model, [9, 8, 7, *tail], GREEDY, seed=0))


SHORT = 16  # a context that is soon full


def without_cache(model, ids, count):
    """The likeliest tokens and their logits, each from all tokens of the window anew."""
    window, found = list(ids), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([window]))[0, -1]
        found.append((int(logits.argmax()), logits))
        window.append(found[-1][0])
        if len(window) > SHORT:
            window = window[-SHORT // 2 :]
    return found


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["grouped", "each"])
def test_the_cache_changes_no_token_and_no_logit(kv_heads, elsewhere):
    config = msgspec.structs.replace(PRESETS["tiny"], kv_heads=kv_heads, context=SHORT)
    model, prompt, count = build(config, 0), [72, 101, 108], 2 * SHORT
    expected = without_cache(model, prompt, count)
    there = copy.deepcopy(model).to(elsewhere)
    drawn = first(count, sample(there, prompt, GREEDY, seed=0))
    assert drawn == [token for token, _ in expected]
    window = Window(there, prompt)
    for token, logits in expected:
        assert float((window.logits() - logits).abs().max()) <= 1e-5
        window.append(token)


def test_a_token_costs_one_position_and_a_full_window_its_newer_half(model, monkeypatch):
    lengths, forward = [], model.forward

    def noted(x, **options):
        lengths.append(x.shape[1])
        return forward(x, **options)

    monkeypatch.setattr(model, "forward", noted)
    first(CONTEXT, sample(model, [65] * 10, ALL, seed=0))
    ones = CONTEXT - 10
    assert lengths == [10, *[1] * ones, CONTEXT // 2, *[1] * (CONTEXT - ones - 2)]


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
    hot = Sampling(temperature=5.0, top_k=None, repetition_penalty=1.1)
    assert len(text(build(config, 3), tokens=20, sampling=hot)) == 20


def test_the_end_of_text_ends_the_text(model):
    ids = first(30, sample(model, list(b"Once"), seed=1))

    class Ending(ByteTokenizer):
        end_of_text = ids[7]

    said = generate(model, Ending(), "Once", 30, seed=1)
    assert said == ByteTokenizer().decode(ids[: ids.index(ids[7])])
    assert len(said) < len(text(model, seed=1))


def test_an_empty_prompt_starts_at_a_new_line(model):
    assert text(model, prompt="") == text(model, prompt="\n")
    with pytest.raises(ValueError, match="give a prompt"):
        sample(model, [], seed=0)


def test_the_prompt_is_used_and_not_changed(model):
    ids = [1, 2, 3]
    next(sample(model, ids, seed=0))
    assert ids == [1, 2, 3]
    said = [text(model, prompt=prompt, sampling=GREEDY) for prompt in ("A", "B", [65])]
    assert said[0] == said[2] != said[1]


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
        ({"min_p": 0.5}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "min_p": 0.99}, {1}),
        ({"top_k": 4, "top_p": 0.6}, {1, 3}),
    ],
)
def test_only_the_likeliest_tokens_stay(options, left):
    assert counts([0.0, 5.0, 1.0, 4.9, 2.0], temperature=5.0, **options).keys() == left


def chances(logits, sampling):
    """The probability of each token, as `draw` hands them to torch."""
    found = []

    def noted(weights, count, generator):
        found.append(weights)
        return torch.multinomial(weights, count, generator=generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farflock.node.model.generate.multinomial", noted)
        draw(logits, sampling, torch.Generator())
    narrowed = sampling.top_k < len(logits)
    places = logits.topk(sampling.top_k).indices if narrowed else torch.arange(len(logits))
    return torch.zeros(len(logits)).index_copy(0, places, found[0] / found[0].sum())


@given(
    logits=st.lists(st.floats(-20, 20, width=16), min_size=2, max_size=30, unique=True),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.integers(1, 30),
    top_p=st.sampled_from([0.1, 0.55, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.04, 0.3]),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
)
def test_the_tokens_that_stay_are_those_of_transformers(
    logits, temperature, top_k, top_p, min_p, penalty
):
    warpers = pytest.importorskip("transformers.generation.logits_process")
    seen, scores = {0, len(logits) - 1}, torch.tensor(logits)
    expected, ids = scores[None].clone(), torch.tensor([sorted(seen)])
    for warper in (
        warpers.RepetitionPenaltyLogitsProcessor(penalty),
        warpers.TemperatureLogitsWarper(temperature),
        warpers.TopKLogitsWarper(top_k),
        warpers.TopPLogitsWarper(top_p),
        warpers.MinPLogitsWarper(min_p),
    ):
        expected = warper(ids, expected)
    logits_V = penalised(scores, seen, penalty)
    if len(set(logits_V.tolist())) < len(logits):
        return  # which of two equal ones stays is not fixed
    found = chances(logits_V, Sampling(temperature, top_k, top_p, min_p, penalty))
    torch.testing.assert_close(found, expected[0].softmax(-1), rtol=1e-4, atol=1e-6)


def test_a_penalty_makes_what_occurred_less_likely():
    logits = torch.tensor([2.0, -2.0, 1.0])
    assert penalised(logits, {0, 1, 7}, 2.0).tolist() == [1.0, -4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]


def test_a_penalty_counts_prompt_and_text(model):
    prompt = [65, 66]
    often = first(40, sample(model, prompt, GREEDY, seed=0))
    rarely = first(40, sample(model, prompt, Sampling(0.0, None, 1, 0, 1e6), seed=0))
    assert len(set(often)) < 40
    assert len({*prompt, *rarely}) == 42


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_extreme_temperatures_still_draw_a_token(temperature):
    for options in ({}, {"top_p": 0.5}, {"min_p": 0.5}):
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
        ({"min_p": -0.5}, "min_p is -0.5; it must lie between"),
        ({"min_p": math.nan}, "min_p is nan; it must lie between"),
        ({"repetition_penalty": 0.0}, "penalty is 0.0; it must be finite and above 0"),
    ],
)
def test_options_out_of_range_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        Sampling(**options)


@given(ids=st.lists(st.integers(0, 255)), said=st.text())
def test_pieces_make_up_the_text_of_bytes(ids, said):
    tokenizer = ByteTokenizer()
    for tokens in (ids, tokenizer.encode(said).tolist()):
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_character_is_said_once_it_is_whole():
    assert list(pieces(ByteTokenizer(), "aé한".encode())) == ["a", "é", "한"]


@functools.cache
def learned():
    pytest.importorskip("tokenizers")
    return JsonTokenizer(train_tokenizer(["the cat and the hat: café 한글\n" * 9], 290))


@given(data=st.data())
def test_pieces_make_up_the_text_of_byte_level_bpe(data):
    tokenizer = learned()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    for tokens in (ids, tokenizer.encode(data.draw(st.text())).tolist()):
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_tokenizer_that_writes_spaces_between_words_keeps_them_between_pieces():
    pytest.importorskip("tokenizers")
    names = ["a", "b", "c", "</s>"]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = {"id": 3, "content": "</s>", "special": True, **special}
    words = {"type": "WordLevel", "vocab": {name: at for at, name in enumerate(names)}}
    raw = msgspec.json.encode(
        {"version": "1.0", "added_tokens": [end], "model": words | {"unk_token": "a"}}
    )
    assert list(pieces(JsonTokenizer(raw), [0, 1, 3, 2])) == ["a", " b", " c"]


@given(
    text=st.text("ab.", max_size=30),
    cuts=st.lists(st.integers(0, 30)),
    stops=st.lists(st.text("ab.", max_size=4), max_size=3),
)
def test_a_text_ends_where_a_stop_begins_however_it_was_cut(text, cuts, stops):
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    parts = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    ends = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    assert "".join(until(parts, stops)) == text[: min(ends, default=len(text))]


def test_what_cannot_begin_a_stop_is_said_at_once():
    said = until(iter(["one ", "two S", "o ", "ST", "OP three"]), ["STOP"])
    assert first(3, said) == ["one ", "two ", "So "]
    assert "".join(said) == ""


def test_no_token_is_drawn_behind_a_stop(model):
    whole = text(model, tokens=60, seed=3)
    stop = whole[20:23]
    assert text(model, tokens=60, seed=3, stops=[stop]) == whole[: whole.index(stop)]
