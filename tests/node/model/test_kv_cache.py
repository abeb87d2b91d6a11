"""A model computes the same with the cache as without it, one position at a time or many."""

import copy
import itertools
from typing import get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.model.generate import GREEDY, Window, sample
from farflock.node.model.kv_cache import ROOM, KeyValueCache, causal, room
from farflock.node.model.llama import (
    PRESETS,
    Architecture,
    ModelConfig,
    RopeScaling,
    build,
)

CONTEXT = 24
GROUPED = ModelConfig(
    vocab_size=40, dim=24, layers=3, heads=4, kv_heads=2, ffn_dim=32, context=CONTEXT
)
UNTIED = msgspec.structs.replace(GROUPED, tied=False, kv_heads=4, rope_theta=500.0)
SCALING = RopeScaling(factor=8.0, low=1.0, high=4.0, trained_context=12)
CONFIGS = {
    "llama": GROUPED,
    "llama, untied": UNTIED,
    "llama, scaled positions": msgspec.structs.replace(GROUPED, rope_scaling=SCALING),
    "llama, one key-value head": msgspec.structs.replace(GROUPED, kv_heads=1),
    "mistral": msgspec.structs.replace(UNTIED, architecture="mistral", kv_heads=2, head_width=10),
    "qwen2": msgspec.structs.replace(UNTIED, architecture="qwen2", kv_heads=2),
    "qwen2, tied": msgspec.structs.replace(GROUPED, architecture="qwen2"),
    "qwen3": msgspec.structs.replace(UNTIED, architecture="qwen3", kv_heads=2, head_width=8),
    "qwen3, tied": msgspec.structs.replace(GROUPED, architecture="qwen3", head_width=10),
}


def lively(config, seed=0):
    """A model whose norms are not all ones, and biases not all zeros, so that forgotten ones
    show."""
    model = build(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    return model


def cache_of(model):
    return KeyValueCache(model.config.layers, model.config.context)


ON_DEVICES = ("llama, scaled positions", "mistral", "qwen2", "qwen3")


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def model(request):
    return lively(request.param)


def test_every_architecture_is_tried():
    for configs in (CONFIGS.values(), [CONFIGS[name] for name in ON_DEVICES]):
        assert {config.architecture for config in configs} == set(get_args(Architecture))


def test_a_token_at_a_time_gives_the_logits_of_all_at_once(model):
    compare_tokens(model, torch.device("cpu"))


@pytest.mark.parametrize("name", ON_DEVICES)
def test_a_token_at_a_time_gives_the_same_logits_on_a_device(name, accelerator):
    compare_tokens(lively(CONFIGS[name]), accelerator)


@torch.no_grad()
def compare_tokens(model, device):
    """Compare a device's logits, one position at a time, with the CPU's of all at once."""
    ids = torch.arange(2 * CONTEXT).view(2, CONTEXT) * 7 % 40
    whole = model(ids)
    there, cache = copy.deepcopy(model).to(device), cache_of(model)
    for at in range(CONTEXT):
        logits = there.next_logits(ids[:, at : at + 1].to(device), cache)
        assert logits.shape == (2, 40)
        torch.testing.assert_close(logits.cpu(), whole[:, at], rtol=1e-5, atol=2e-5)
        assert cache.length == at + 1


def without_cache(model, ids, count):
    """The likeliest tokens and their logits, each from all tokens of the window anew."""
    window, found = list(ids), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([window]))[0, -1]
        found.append((int(logits.argmax()), logits))
        window.append(found[-1][0])
        if len(window) > CONTEXT:
            window = window[-CONTEXT // 2 :]
    return found


def test_the_likeliest_text_is_that_without_a_cache_also_beyond_the_context(model):
    prompt, count = [3, 1, 4], 3 * CONTEXT
    expected = without_cache(model, prompt, count)
    drawn = list(itertools.islice(sample(model, prompt, GREEDY, seed=0), count))
    assert drawn == [token for token, _ in expected]
    window = Window(model, prompt)
    for token, logits in expected:
        torch.testing.assert_close(window.logits(), logits, rtol=1e-5, atol=2e-5)
        window.append(token)


@given(cuts=st.lists(st.integers(1, CONTEXT - 1), max_size=6), batch=st.integers(1, 3))
@settings(max_examples=20)
@torch.no_grad()
def test_pieces_of_any_length_give_the_logits_of_the_whole(cuts, batch):
    model = lively(GROUPED, 2)
    ids = torch.arange(batch * CONTEXT).view(batch, CONTEXT) * 5 % 40
    whole, cache, start = model(ids), cache_of(model), 0
    for stop in [*sorted(set(cuts)), CONTEXT]:
        logits = model.next_logits(ids[:, start:stop], cache)
        torch.testing.assert_close(logits, whole[:, stop - 1], rtol=1e-5, atol=2e-5)
        start = stop


@torch.no_grad()
def test_what_is_kept_survives_growth():
    config = msgspec.structs.replace(GROUPED, context=3 * ROOM)
    model, ids = lively(config), torch.arange(3 * ROOM)[None] * 7 % 40
    whole, cache = model(ids), cache_of(model)
    for start in range(0, 3 * ROOM, 16):
        logits = model.next_logits(ids[:, start : start + 16], cache)
        torch.testing.assert_close(logits, whole[:, start + 15], rtol=1e-5, atol=5e-5)


@torch.no_grad()
def test_more_positions_than_the_context_are_refused():
    model = build(PRESETS["tiny"], 0)
    cache = cache_of(model)
    model.next_logits(torch.zeros(1, 60, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match=r"a sequence of 65 tokens is longer than .* context 64"):
        model.next_logits(torch.zeros(1, 5, dtype=torch.int64), cache)
    assert cache.length == 60


def test_memory_is_taken_as_it_is_needed_and_never_beyond_the_context():
    assert [room(count, 1000) for count in (1, 64, 65, 513, 1000)] == [64, 64, 128, 1000, 1000]


def test_a_new_position_sees_those_before_it():
    assert causal(2, 3, torch.device("cpu")).tolist() == [[True, True, False], [True] * 3]
