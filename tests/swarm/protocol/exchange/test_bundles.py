"""The cut of shards into bundles, and the lists of bundles, with hostile bytes."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.messages import MAX_CHUNK_BYTES, MAX_MEMBERS
from farflock.swarm.protocol.exchange import bundles
from farflock.swarm.protocol.exchange.bundles import (
    MAX_BUNDLE_SHARDS,
    MAX_GATHER_BUNDLES,
    MAX_LONE_SHARDS,
    MAX_MEAN_BUNDLES,
    BadBundle,
    BundleCut,
    decode_list,
    encode_list,
    list_bytes,
)

counts = st.integers(1, 5000) | st.integers(1, MAX_MEAN_BUNDLES * MAX_BUNDLE_SHARDS)
entries = st.lists(
    st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 100)), min_size=1, max_size=9
)


@given(shards=counts, last_alone=st.booleans(), mean=st.booleans())
def test_bundles_have_every_shard_once_in_order_and_sizes_that_differ_by_one_at_most(
    shards, last_alone, mean
):
    shards += last_alone
    cut = (BundleCut.of_mean if mean else BundleCut.of_gather)(shards, last_alone=last_alone)
    parts = [cut.shards_of(bundle) for bundle in range(cut.bundles)]
    assert parts[0].start == 0
    assert parts[-1].stop == shards
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    if last_alone:
        assert len(parts.pop()) == 1
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_few_shards_have_a_bundle_each_and_of_a_gather_more_shards_have_one_bundle():
    assert BundleCut.of_mean(128) == BundleCut(128, 128)
    assert BundleCut.of_mean(129).bundles == MAX_MEAN_BUNDLES == 128
    assert BundleCut.of_gather(MAX_LONE_SHARDS).bundles == MAX_LONE_SHARDS
    assert BundleCut.of_gather(MAX_LONE_SHARDS + 1).bundles == 1
    assert BundleCut.of_gather(MAX_BUNDLE_SHARDS).bundles == 1
    assert BundleCut.of_gather(MAX_BUNDLE_SHARDS + 1).bundles == 2
    assert BundleCut.of_gather(1, last_alone=True).bundles == 1
    assert MAX_GATHER_BUNDLES * MAX_MEMBERS <= 4096


@given(entries)
def test_a_list_is_read_as_it_was_written(made):
    raw = encode_list(made)
    assert len(raw) == list_bytes(len(made))
    assert decode_list(raw, len(made), 100) == made


def test_the_list_of_the_largest_bundle_is_one_chunk():
    assert list_bytes(bundles.MAX_BUNDLE_SHARDS) <= MAX_CHUNK_BYTES


@given(raw=st.binary(max_size=200), shards=st.integers(2, 5))
def test_any_bytes_are_a_list_of_that_many_shards_that_fit_or_refused(raw, shards):
    try:
        found = decode_list(raw, shards, 1000)
    except BadBundle:
        return
    assert len(found) == shards
    assert all(len(digest) == 32 and size <= 1000 for digest, size in found)
    assert encode_list(found) == raw


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (bytes(71), "a list of 71 bytes; 2 shards have 72"),
        (b"", "a list of 0 bytes"),
        (bytes(36) + bytes(32) + struct.pack("<I", 11), "a shard above 10 bytes"),
    ],
)
def test_a_wrong_list_is_refused_in_words(raw, said):
    with pytest.raises(BadBundle, match=said):
        decode_list(raw, 2, 10)
