"""Bytes in, bytes out, and an end of text that no text contains."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.tokens.tokenizer import ByteTokenizer, token_array

BYTES = ByteTokenizer()


@given(text=st.text())
def test_any_text_comes_back_and_never_holds_the_end_of_text(text):
    ids = BYTES.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert BYTES.end_of_text not in ids
    assert BYTES.decode(ids.tolist()) == text


@given(ids=st.lists(st.integers(0, 255), max_size=50))
def test_any_ids_can_be_shown_and_the_end_of_text_is_left_out(ids):
    assert BYTES.decode(ids) == BYTES.decode([i for i in ids if i != 255])


def test_a_byte_is_its_own_id():
    assert BYTES.encode("Aé").tolist() == [65, 0xC3, 0xA9]
    assert BYTES.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(ValueError, match="range"):
        BYTES.decode([256])


def test_a_batch_is_each_text_for_itself():
    texts = ["", "one", "zwei ß"]
    batch = BYTES.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [BYTES.encode(text).tolist() for text in texts]


@pytest.mark.parametrize(
    ("vocabulary", "kind"),
    [(256, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32), (2**32, np.uint32)],
)
def test_ids_take_no_more_bytes_than_the_vocabulary_needs(vocabulary, kind):
    ids = token_array([0, vocabulary - 1], vocabulary)
    assert ids.dtype == kind
    assert ids.tolist() == [0, vocabulary - 1]
