"""A model computes the same with the cache as without it, one position at a time or many."""

import copy

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.model.kv_cache import ROOM, KeyValueCache, causal
from farflock.node.model.llama import PRESETS, build

TINY = PRESETS["tiny"]  # two heads share one of keys and values
SHAPES = {
    "grouped": TINY,
    "untied": msgspec.structs.replace(TINY, tied=False, kv_heads=2),
    "experts": msgspec.structs.replace(TINY, experts=4, experts_per_token=2, balance=0.01),
    "long": msgspec.structs.replace(TINY, context=3 * ROOM),
}


def cache_of(model):
    return KeyValueCache(model.config.layers, model.config.context)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def model(request):
    return build(request.param, 1)


@torch.no_grad()
def test_a_token_at_a_time_gives_the_logits_of_all_at_once(model, elsewhere):
    ids = torch.arange(model.config.context)[None] * 7 % 256
    whole = model(ids)[0]
    model, cache = copy.deepcopy(model).to(elsewhere), cache_of(model)
    for at in range(model.config.context):
        logits = model(ids[:, at : at + 1].to(elsewhere), cache=cache)
        assert logits.shape == (1, 1, 256)
        assert float((logits[0, 0].cpu() - whole[at]).abs().max()) <= 1e-5
        assert cache.length == at + 1


@given(cuts=st.lists(st.integers(1, 63), max_size=6), batch=st.integers(1, 3))
@settings(max_examples=20)
@torch.no_grad()
def test_pieces_of_any_length_give_the_logits_of_the_whole(cuts, batch):
    model = build(TINY, 2)
    ids = torch.arange(batch * 64).view(batch, 64) * 5 % 256
    whole, cache, start = model(ids), cache_of(model), 0
    for stop in [*sorted(set(cuts)), 64]:
        logits = model(ids[:, start:stop], cache=cache)
        assert float((logits[:, 0] - whole[:, stop - 1]).abs().max()) <= 1e-5
        start = stop


@torch.no_grad()
def test_more_positions_than_the_context_are_refused():
    model = build(TINY, 0)
    cache = cache_of(model)
    model(torch.zeros(1, 60, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match=r"a sequence of 65 tokens is longer than .* context 64"):
        model(torch.zeros(1, 5, dtype=torch.int64), cache=cache)


def test_memory_is_taken_as_it_is_needed_and_never_beyond_the_context():
    cache = KeyValueCache(1, 1000)
    assert [cache.room_for(count) for count in (1, 64, 65, 513, 1000)] == [64, 64, 128, 1000, 1000]


def test_a_new_position_sees_those_before_it():
    assert causal(1, 5, torch.device("cpu")) is None
    assert causal(2, 3, torch.device("cpu")).tolist() == [[True, True, False], [True] * 3]
