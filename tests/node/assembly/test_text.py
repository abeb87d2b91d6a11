"""Stages of a pipeline count every token, so a text of answers is refused there."""

import msgspec
import numpy as np
import pytest
from worlds.prepared import prepared

from farflock.node.assembly.text import require_all_counted
from farflock.node.data.index import read_index
from farflock.node.data.sequences import ShardedText
from farflock.node.model.data import BadData


def test_a_text_of_answers_is_refused_in_words(tmp_path):
    prepared(tmp_path, vocabulary=70_000)
    index = read_index((tmp_path / "index.json").read_bytes(), "it")
    require_all_counted(np.zeros(9, np.uint16))
    require_all_counted(ShardedText(index, {}, None, lambda shard: None))
    marked = msgspec.structs.replace(index, answers=True)
    with pytest.raises(BadData, match=r"count every token; train whole models .*without --chat"):
        require_all_counted(ShardedText(marked, {}, None, lambda shard: None))
