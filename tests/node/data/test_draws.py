"""Draws are a pure function of seed, peer and number: without replacement, and mixed exactly."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data.draws import BLOCK_DRAWS, BadDraws, Drawn, Draws, block_places
from farflock.node.model.random_order import philox_key, raw_outputs

LENGTH = 10
TOKENS = {"web": [95, 9, 40, 123], "code": [30, 51]}  # 9, 0, 4, 12 and 3, 5 windows
WINDOWS = {"web": 25, "code": 8}
MIX = {"web": 0.75, "code": 0.25}
sources = st.dictionaries(
    st.sampled_from(["web", "code", "books", "wiki"]),
    st.lists(st.integers(1, 60), min_size=1, max_size=5).filter(lambda each: max(each) >= LENGTH),
    min_size=1,
)
numbers = st.integers(0, 2**70)


def draws(peer="alice", run_seed=1, tokens=TOKENS, mix=None, length=LENGTH):
    return Draws(tokens, length, run_seed, peer, mix)


def by_hand(tokens, run_seed, peer, counts, until):
    """The draws of numbers 0 to `until` - 1, run forward."""

    def shuffled(key, place, items):
        outputs = raw_outputs(key, place, len(items)).tolist()
        return [item for _, item in sorted(zip(outputs, items, strict=True))]

    def forever(source):
        key = philox_key(f"farflock-data-windows-v1 {run_seed} {peer} {source}")
        windows = {shard: size // LENGTH for shard, size in enumerate(tokens[source])}
        shards = [shard for shard, count in windows.items() if count]
        for epoch in itertools.count():
            for shard in shuffled(key, (epoch, 0), shards):
                for window in shuffled(key, (epoch, shard + 1), range(windows[shard])):
                    yield Drawn(source, shard, window, epoch)

    streams, found = {source: forever(source) for source in tokens}, []
    key = philox_key(f"farflock-data-mixture-v1 {run_seed} {peer}")
    for block in itertools.count():
        places = [source for source, count in counts.items() for _ in range(count)]
        outputs = raw_outputs(key, (block, 0), len(places))
        order = np.argsort(outputs, kind="stable").tolist()
        found.extend(next(streams[places[place]]) for place in order)
        if len(found) >= until:
            return found[:until]


@given(sources, st.integers(0, 2**64), st.text(max_size=20), st.integers(1, 3 * BLOCK_DRAWS))
def test_draws_by_number_are_those_of_a_walk(tokens, seed, peer, until):
    one = draws(peer, seed, tokens)
    weights = {
        source: Fraction(sum(size // LENGTH for size in shards))
        for source, shards in tokens.items()
    }
    expected = by_hand(tokens, seed, peer, block_places(weights), until)
    for number in (until - 1, *range(0, until, 97), until // 2):
        assert one.draw(number) == expected[number]


@given(st.lists(numbers, min_size=1, max_size=20))
def test_a_draw_depends_on_its_number_alone(asked):
    one = draws()
    assert [one.draw(number) for number in asked] == [draws().draw(number) for number in asked]


@given(sources, st.integers(0, 5))
def test_each_window_of_a_source_comes_once_in_an_epoch(tokens, epoch):
    source = next(iter(tokens))
    one = draws(tokens={source: tokens[source]})
    windows = [
        (shard, window)
        for shard, size in enumerate(tokens[source])
        for window in range(size // LENGTH)
    ]
    first = epoch * len(windows)
    drawn = [one.draw(number) for number in range(first, first + len(windows))]
    assert sorted((each.shard, each.window) for each in drawn) == windows
    assert {each.epoch for each in drawn} == {epoch}
    turns = [shard for shard, _ in itertools.groupby(each.shard for each in drawn)]
    assert len(set(turns)) == len(turns), "a shard is used up before the next is begun"


def test_each_window_comes_once_in_an_epoch_of_a_mixture_too():
    one = draws(mix=MIX)
    drawn = [one.draw(number) for number in range(4 * BLOCK_DRAWS)]
    for source, windows in WINDOWS.items():
        own = [each for each in drawn if each.source == source]
        for at in range(0, len(own) - windows + 1, windows):
            epoch = own[at : at + windows]
            assert {each.epoch for each in epoch} == {at // windows}
            assert len({(each.shard, each.window) for each in epoch}) == windows


@pytest.mark.parametrize(
    ("mix", "counts"),
    [
        (MIX, {"web": 768, "code": 256}),
        (None, {"web": 776, "code": 248}),  # 25 to 8
        ({"web": 1, "code": 1e-9}, {"web": 1023, "code": 1}),
        ({"code": 5}, {"code": 1024}),
        ({"web": 0.0, "code": 0.1}, {"code": 1024}),
    ],
)
def test_each_block_has_exactly_the_mixture(mix, counts):
    one = draws(mix=mix)
    for block in (0, 1, 2**50):
        first = block * BLOCK_DRAWS
        drawn = [one.draw(number).source for number in range(first, first + BLOCK_DRAWS)]
        assert Counter(drawn) == counts
        assert counts.keys() == {"code"} or drawn != sorted(drawn), "in a random order"


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=3),
        st.floats(0, 1e300).map(Fraction),
        min_size=1,
        max_size=64,
    ).filter(lambda weights: any(weights.values()))
)
def test_places_are_divided_like_the_weights(weights):
    places = block_places(weights)
    assert sum(places.values()) == BLOCK_DRAWS
    assert places.keys() == {source for source, weight in weights.items() if weight}
    total = sum(weights.values())
    small = sum(weight * BLOCK_DRAWS < total for weight in weights.values() if weight)
    for source, count in places.items():
        share = BLOCK_DRAWS * weights[source] / total
        assert count >= 1
        assert share - 64 <= count < share + 1 if small else abs(count - share) < 1


def test_equal_remainders_go_to_the_first_sources():
    assert block_places(dict.fromkeys("abc", Fraction(1))) == {"a": 342, "b": 341, "c": 341}


def test_the_weights_of_a_mix_need_no_unit():
    halves, counts = draws(mix={"web": 0.5, "code": 0.5}), draws(mix={"code": 700, "web": 700})
    assert all(halves.draw(number) == counts.draw(number) for number in range(100))


def test_other_peers_seeds_and_epochs_have_other_orders():
    def order(epoch=0, **who):
        one = draws(tokens={"web": TOKENS["web"]}, **who)
        return [
            (one.draw(epoch * 25 + at).shard, one.draw(epoch * 25 + at).window) for at in range(25)
        ]

    orders = [order(), order(peer="bob"), order(run_seed=2), order(epoch=1), order(epoch=2**63 - 1)]
    assert all(sorted(one) == sorted(orders[0]) for one in orders)
    assert all(one != other for one, other in itertools.combinations(orders, 2))
    assert order(epoch=2**63) == order(), "only after so many do orders recur"


def test_sources_with_equal_shards_have_orders_of_their_own():
    one = draws(tokens={"web": [200], "code": [200]}, mix={"web": 1, "code": 1})
    drawn = [one.draw(number) for number in range(200)]
    web, code = ([each.window for each in drawn if each.source == name] for name in ("web", "code"))
    assert web[:20] != code[:20]


def test_draws_are_the_same_on_every_machine():
    """As first written down: another order would be another run."""
    one = draws("12D3Koo", 7, mix=MIX)
    drawn = [one.draw(number) for number in (0, 1, 2, 3, 1023, 1024, 10**6, 2**64)]
    assert [(each.source, each.shard, each.window, each.epoch) for each in drawn] == [
        ("web", 3, 2, 0),
        ("code", 0, 2, 0),
        ("web", 3, 11, 0),
        ("web", 3, 5, 0),
        ("code", 0, 2, 31),
        ("web", 3, 3, 30),
        ("web", 2, 0, 29999),
        ("code", 0, 0, 576460752303423488),
    ]


@given(sources, st.integers(0, 5 * BLOCK_DRAWS), st.integers(0, 300))
def test_shards_needed_are_those_of_the_draws_in_their_order(tokens, first, count):
    one = draws(tokens=tokens)
    drawn = [one.draw(number) for number in range(first, first + count)]
    expected = list(dict.fromkeys((each.source, each.shard) for each in drawn))
    assert one.shards_needed(first, count) == expected


def test_shards_needed_by_an_endless_run_are_all_that_have_windows():
    needed = draws(mix={"web": 1, "code": 0.001}).shards_needed(12_345, 10**15)
    assert sorted(needed) == [("code", 0), ("code", 1), ("web", 0), ("web", 2), ("web", 3)]


def test_a_peer_begins_one_shard_of_a_source_after_another():
    tokens = {"web": [2049 * 16_384] * 4096, "code": [2049 * 1000] * 50}
    one = draws(tokens=tokens, mix=MIX, length=2049)
    assert len(one.shards_needed(5_000, 10_000)) <= 2 + 4
    assert one.draw(10**12) == draws(tokens=tokens, mix=MIX, length=2049).draw(10**12)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"length": 200}, "no shard of web has 200 tokens.*shorter sequences"),
        ({"tokens": {"web": [9]}}, "no shard of web has 10 tokens.*leave the source out"),
        ({"tokens": {"web": []}}, "no shard of web"),
        ({"mix": {"books": 1.0, "web": 1}}, "the mix names books, and the data has web, code;"),
        ({"mix": {"web": -0.5}}, "the weight of web is -0.5; use 0 or a positive"),
        ({"mix": {"web": math.nan}}, "the weight of web is nan"),
        ({"mix": {"web": math.inf}}, "the weight of web is inf"),
        ({"mix": {"web": 0}}, "no source of the mix has a weight; give"),
        ({"mix": {}}, "no source of the mix has a weight"),
        ({"tokens": {f"s{n}": [20] for n in range(1025)}}, "1025 sources, and a mixture at most"),
    ],
)
def test_what_nothing_can_be_drawn_from_is_refused(change, sentence):
    with pytest.raises(BadDraws, match=sentence):
        draws(**change)


def test_a_source_that_the_mix_leaves_out_may_have_no_window():
    tokens = {**TOKENS, "tiny": [3]}
    assert draws(tokens=tokens, mix=MIX).draw(5) == draws(mix=MIX).draw(5)
    assert draws(tokens=tokens, mix={**MIX, "tiny": 0}).draw(5) == draws(mix=MIX).draw(5)


def test_a_negative_number_is_refused():
    with pytest.raises(BadDraws, match="number them from 0"):
        draws().draw(-1)
