"""Buckets hold each document once, in an order that is drawn, and go back to where they were."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.data import shuffle
from farflock.node.data.shuffle import Buckets, DocumentDraws
from farflock.node.errors import Failure

DTYPE = np.dtype("<u2")
PARTS = st.lists(st.lists(st.integers(0, 65_535), max_size=20), min_size=1, max_size=3)


def tokens(values):
    return np.array(values, dtype=np.uint16)


def fill(buckets, seed, documents, first=0, count=3):
    """Add documents, each a list of parts, numbered from `first`; the slow twin's input."""
    draws = DocumentDraws(seed, "web")
    for number, parts in enumerate(documents, first):
        _, bucket, order = draws.of(number)
        for part in parts:
            buckets.add(f"web.{bucket % count}", order, tokens(part))


def twin(seed, documents, count=3):
    """All documents sorted by their draws, as lists."""
    draws = DocumentDraws(seed, "web")
    keyed = sorted(
        (draws.of(number)[1] % count, draws.of(number)[2], [*itertools.chain(*parts)])
        for number, parts in enumerate(documents)
    )
    return [text for _, _, text in keyed]


def shuffled(buckets, count=3):
    return [
        document.tolist() for place in range(count) for document in buckets.shuffled(f"web.{place}")
    ]


@settings(max_examples=60)
@given(st.integers(0, 2**64), st.lists(PARTS, max_size=30), st.integers(1, 10), st.booleans())
def test_the_documents_come_in_the_order_of_their_draws(
    tmp_path_factory, seed, documents, flush_every, mapped
):
    buckets = Buckets(tmp_path_factory.mktemp("buckets") / "b", DTYPE)
    buckets.restore({})
    for first in range(0, len(documents), flush_every):
        fill(buckets, seed, documents[first : first + flush_every], first)
        buckets.flush()
        assert buckets.buffered_bytes == 0
    with pytest.MonkeyPatch.context() as patch:
        if mapped:
            patch.setattr(shuffle, "LOADED_BYTES", 1)
        assert shuffled(buckets) == twin(seed, documents)


def test_going_back_forgets_what_came_after(tmp_path):
    buckets = Buckets(tmp_path / "b", DTYPE)
    buckets.restore({})
    fill(buckets, 1, [[[1]], [[2, 3]]])
    buckets.flush()
    before, sizes = shuffled(buckets), dict(buckets.sizes)
    fill(buckets, 1, [[[4]]] * 40, 2, count=9)
    buckets.flush()
    again = Buckets(tmp_path / "b", DTYPE)
    again.restore(sizes)
    assert shuffled(again) == before
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(
        bucket + ending for bucket in sizes for ending in (".tokens", ".records")
    )


def test_a_bucket_that_lost_its_end_is_refused(tmp_path):
    buckets = Buckets(tmp_path, DTYPE)
    fill(buckets, 1, [[[1, 2, 3]]], count=1)
    buckets.flush()
    (tmp_path / "web.0.tokens").write_bytes(b"12")
    with pytest.raises(Failure, match="a part of it is missing; start over with --force"):
        Buckets(tmp_path, DTYPE).restore(buckets.sizes)


def test_seed_source_and_number_each_change_the_draws():
    base = DocumentDraws(1, "web").of(5)
    others = [
        DocumentDraws(2, "web").of(5),
        DocumentDraws(1, "code").of(5),
        DocumentDraws(1, "web").of(6),
        DocumentDraws(1, "web").of(5 + 1024),
    ]
    assert len({base, *others}) == 5
    assert DocumentDraws(1, "web").of(5) == base


def test_the_draws_are_the_same_on_every_machine():
    """As first written down: other draws would be another root."""
    assert DocumentDraws(1, "web").of(1025) == (
        16512724600825654766,
        5164321633577890157,
        17931567605590880151,
    )


def test_the_draws_are_uniform_and_independent():
    draws = DocumentDraws(3, "web")
    table = np.array([draws.of(number) for number in range(4096)], dtype=np.float64) / 2.0**64
    assert abs(table.mean(axis=0) - 0.5).max() < 5 / np.sqrt(12 * 4096)
    assert abs(np.corrcoef(table.T) - np.eye(3)).max() < 5 / np.sqrt(4096)
