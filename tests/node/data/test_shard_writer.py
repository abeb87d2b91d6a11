"""Shards are chunks of whole documents, which lie in files one after the other and come back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data import index, shard_writer
from farflock.node.data.index import ENTRY, read_page, require_totals
from farflock.node.data.shard_writer import ShardWriter

WIDE, END = np.dtype("<u4"), 7


def written(path, documents, shard_bytes, file_bytes=10**6, page_shards=1 << 16):
    """The list of shards of documents, and the bytes of all files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        for module in (index, shard_writer):
            patch.setattr(module, "MAX_SHARD_BYTES", shard_bytes)
            patch.setattr(module, "MAX_PAGE_SHARDS", page_shards)
        patch.setattr(shard_writer, "MAX_TOKEN_FILE_BYTES", file_bytes)
        writer = ShardWriter(path, "000-train", WIDE, END)
        for document in documents:
            writer.add(np.array(document, dtype=WIDE).tobytes())
        listed = writer.finish()
        entries = [
            read_page((path / "pages" / name).read_bytes(), name, listed.on_page(place), WIDE)
            for place, name in enumerate(listed.pages)
        ]
    files = [each.read_bytes() for each in sorted((path / "tokens").iterdir())]
    return listed, np.concatenate(entries), files


@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=30),
    shard=st.integers(2, 12),
    file=st.integers(12, 40),
    page=st.integers(1, 5),
)
def test_all_tokens_come_back_in_shards_of_whole_documents(
    tmp_path_factory, lengths, shard, file, page
):
    documents = [[10 + number] * length for number, length in enumerate(lengths)]
    path = tmp_path_factory.mktemp("done")
    listed, entries, files = written(path, documents, 4 * shard, 4 * file, page)
    require_totals(entries, listed)
    assert listed.shards == len(entries)
    tokens = np.frombuffer(b"".join(files), dtype=WIDE)
    assert [t for t in tokens if t != END] == [t for each in documents for t in each]
    assert listed.tokens == len(tokens)
    assert int(entries["documents"].sum()) == int((tokens == END).sum()) == listed.documents
    starts = np.cumsum([0, *entries["tokens"]])
    assert all(tokens[stop - 1] == END for stop in starts[1:])
    assert int(entries["tokens"].max()) <= shard
    assert all(len(each) <= 4 * file for each in files)
    if max(lengths) < shard:
        assert listed.documents == len(documents), "a document that fits into a shard is not cut"


def test_a_document_that_does_not_fit_begins_the_next_shard(tmp_path):
    _, entries, _ = written(tmp_path, [[1] * 5, [2] * 3, [3]], 40)
    assert entries["tokens"].tolist() == [10, 2]
    _, entries, _ = written(tmp_path, [[1] * 5, [2] * 4, [3]], 40)
    assert entries["tokens"].tolist() == [6, 7]


def test_the_bytes_of_a_page_are_what_they_were(tmp_path):
    listed, entries, _ = written(tmp_path, [[1, 2], [3]], 400)
    assert entries.dtype == ENTRY
    assert listed.pages == ("8488091d6761803c9a785dd76cd8ba28eb8cfbee128f24299bf1e91b598bedca",)
