"""Bytes in, bytes out, and a hash that changes with the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.model.tokenizer import TOKENIZERS, ByteTokenizer


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text())
def test_any_text_comes_back_and_every_id_is_below_the_vocabulary(kind, text):
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert not len(ids) or int(ids.max()) < tokenizer.vocab_size <= 65_536
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_any_ids_can_be_shown(kind, data):
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=50))
    assert isinstance(tokenizer.decode(ids), str)


def test_a_byte_is_its_own_id():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("Aé").tolist() == [65, 0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(ValueError, match="range"):
        tokenizer.decode([256])
