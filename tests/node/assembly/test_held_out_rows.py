"""The sequences that a run is evaluated on are the same, however their shards come."""

import random

import numpy as np
import pytest
from worlds.prepared import prepared

from farflock.node.assembly import held_out_rows, text
from farflock.node.assembly.held_out_rows import HeldOutRows
from farflock.node.assembly.text import RunText
from farflock.node.data.local_shards import table_of
from farflock.node.model.data import BadData, evaluation_rows
from farflock.node.tokens.tokenizer import ByteTokenizer


@pytest.fixture
def folders(small, texts, tmp_path):
    """Two folders with several held-out shards, one of other texts."""
    more = tmp_path / "more"
    more.mkdir()
    for number in range(80):
        (more / f"{number}.txt").write_text(f"another text, number {number}, of many. " * 3)
    return [
        prepared(texts, tmp_path / "one", held_out=0.4).content,
        prepared(more, tmp_path / "two", held_out=0.4).content,
    ]


def taken(rows, folders, order=lambda shards: shards):
    for shard in order(list(rows.missing)):
        assert rows.rows is None
        split, number = rows_place(folders[shard.source], shard.number)
        rows.take(shard, folders[shard.source].read(split, number))
    return rows.rows


def rows_place(folder, number):
    return table_of(folder).place(number)


@pytest.mark.parametrize("limit", [1 << 24, 3000])
@pytest.mark.parametrize("sequences", [3, 1000])
def test_they_are_those_of_a_node_with_all_folders(folders, limit, sequences, monkeypatch):
    for module in (text, held_out_rows):
        monkeypatch.setattr(module, "MAX_HELD_OUT_TOKENS", limit)
    whole = RunText(tuple(folders), (1.0, 1.0), ByteTokenizer()).held_out()
    expected = evaluation_rows(whole, 16, sequences)
    rows = HeldOutRows([table_of(each) for each in folders], 16, sequences)
    assert {shard.source for shard in rows.missing} == {0, 1}

    def shuffled(shards):
        random.Random(1).shuffle(shards)
        return shards

    assert np.array_equal(taken(rows, folders, shuffled), expected)


def test_only_shards_with_a_part_of_them_are_missing(folders):
    rows = HeldOutRows([table_of(folders[0])], 16, 1)
    assert [shard.number for shard in rows.missing] == [table_of(folders[0]).train]
    assert folders[0].shards("held-out") > 1


def test_too_little_text_is_refused(folders):
    with pytest.raises(BadData, match="hold out more text"):
        HeldOutRows([table_of(folders[0])], 10**6, 4)
