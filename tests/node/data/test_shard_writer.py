"""Shards are of about equal size, cut no document that fits, and are listed in full pages."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.data import shard_writer
from farflock.node.data.index import DataIndex, DataShard, listed, read_page
from farflock.node.data.shard_writer import ShardWriter, write_pages

DTYPE = np.dtype("<u2")
LIMIT = 50  # tokens


def write(folder, lengths):
    """Write documents of these lengths, numbered; return the shards and their tokens."""
    writer = ShardWriter(folder, "train", DTYPE, LIMIT * 2, sum(lengths) * 2)
    for number, length in enumerate(lengths):
        writer.add(np.full(length, number, dtype=np.uint16))
    writer.finish()
    return writer.shards, [np.fromfile(folder / shard.name, DTYPE) for shard in writer.shards]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 120), max_size=40))
def test_shards_hold_everything_in_order_and_within_the_limit(tmp_path_factory, lengths):
    folder = tmp_path_factory.mktemp("shards")
    shards, arrays = write(folder, lengths)
    expected = np.repeat(np.arange(len(lengths)), lengths)
    assert np.array_equal(np.concatenate([*arrays, np.zeros(0, DTYPE)]), expected)
    assert [len(array) for array in arrays] == [shard.tokens for shard in shards]
    assert all(0 < len(array) <= LIMIT for array in arrays)
    assert sum(shard.documents for shard in shards) == len(lengths)
    for number, length in enumerate(lengths):
        holders = sum(bool((array == number).any()) for array in arrays)
        assert holders == 1 if length <= LIMIT else holders <= -(-length // LIMIT) + 1
    on_disk = {path.name for path in folder.glob("shards/*")}
    assert on_disk == {shard.name.removeprefix("shards/") for shard in shards}


def test_small_documents_make_shards_of_equal_size(tmp_path):
    shards, _ = write(tmp_path, [1] * 101)
    assert [shard.tokens for shard in shards] == [34, 34, 33]


def test_a_document_that_was_cut_off_does_not_count(tmp_path):
    writer = ShardWriter(tmp_path, "train", DTYPE, 100, 100)
    writer.add(np.zeros(3, dtype=np.uint16))
    writer.add(np.zeros(3, dtype=np.uint16), ends=False)
    writer.finish()
    assert [(shard.tokens, shard.documents) for shard in writer.shards] == [(6, 1)]


def test_a_shard_is_known_by_the_hashes_of_its_file(tmp_path):
    (shard,), _ = write(tmp_path, [3, 4])
    found = listed(tmp_path / shard.name)
    assert (shard.sha256, shard.size, shard.pieces) == (found.sha256, 14, found.pieces)


def test_pages_list_all_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "SHARDS_PER_PAGE", 2)
    shards, _ = write(tmp_path, [40] * 5)
    pages = write_pages(tmp_path, shards)
    assert [page.shards for page in pages] == [2, 2, 1]
    index = DataIndex(vocabulary=256, token_bytes=2, end_of_text=255, sources={})
    found: list[DataShard] = []
    for page in pages:
        assert listed(tmp_path / page.name).sha256 == page.sha256
        found += read_page((tmp_path / page.name).read_bytes(), page, index)
    assert found == shards
