"""Documents have an order that their text alone decides, and parts of one text stay together."""

import numpy as np

from farflock.node.data.ordering import (
    IDENTITY,
    DocumentIds,
    begins,
    document_hash,
    held_out_below,
    in_order,
)


def identities(*texts):
    """The identities of texts, each given by its parts."""
    made = DocumentIds()
    found = [made.of(document_hash(part), n) for text in texts for n, part in enumerate(text)]
    return np.array(found, dtype=IDENTITY)


def test_the_hash_of_a_document_is_what_it_was():
    assert document_hash(b"one").hex()[:16] == "22461715e0c906ff"


def test_the_order_does_not_depend_on_how_documents_came():
    texts = [(b"%d" % number,) for number in range(50)]
    first, second = identities(*texts), identities(*reversed(texts))
    assert np.array_equal(first[in_order(first)], second[in_order(second)])
    assert not np.array_equal(first[in_order(first)], first), "it is shuffled"


def test_parts_of_a_text_follow_each_other():
    found = identities(*((b"%d" % number, b"x", b"y") for number in range(20)))
    ordered = found[in_order(found)]
    assert ordered["passage"].tolist() == [0, 1, 2] * 20


def test_equal_documents_are_neighbours_and_others_differ():
    found = identities((b"a",), (b"b", b"rest"), (b"a",), (b"c",), (b"b", b"other"))
    first = begins(found[in_order(found)])
    assert (len(first), int(first.sum())) == (7, 5)
    assert begins(found[:0]).tolist() == []


def test_about_the_share_is_held_out():
    own = [document_hash(b"%d" % number) for number in range(4000)]
    below = held_out_below(0.1)
    held = sum(int.from_bytes(digest[8:16], "big") < below for digest in own)
    assert 320 < held < 480
    assert held_out_below(0) == 0
