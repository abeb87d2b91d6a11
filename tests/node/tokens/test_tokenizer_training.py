"""A tokenizer learned from texts encodes any text, and the same texts give the same bytes."""

import pytest

from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import BadTokenizer
from farflock.node.tokens.tokenizer_training import MIN_TRAINED, train_tokenizer

TEXT = "".join(f"{a} {b}ing, the {a}{b}s.\n" for a in ("sea", "sun", "ant") for b in ("go", "see"))


def test_it_has_the_asked_number_of_tokens_and_shortens_the_text():
    tokenizer = JsonTokenizer(train_tokenizer([TEXT], 280))
    assert tokenizer.vocab_size == 280
    assert tokenizer.end_name == "<|endoftext|>"
    assert len(tokenizer.encode(TEXT)) < 0.6 * len(TEXT)
    for text in (TEXT, "한글 \x00 😀", " \n\t "):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_the_same_texts_give_the_same_bytes():
    assert train_tokenizer([TEXT], 300) == train_tokenizer([TEXT], 300)


def test_where_the_texts_are_cut_does_not_matter_at_the_ends_of_lines():
    assert train_tokenizer([TEXT], 300) == train_tokenizer(["", *TEXT.splitlines(True)], 300)


def test_texts_with_few_words_give_fewer_tokens():
    assert MIN_TRAINED <= JsonTokenizer(train_tokenizer(["aa ab ab"], 5000)).vocab_size < 300


@pytest.mark.parametrize("texts", [[], [""], ["a"], ["\n"]])
def test_texts_without_pairs_are_refused(texts):
    with pytest.raises(BadTokenizer, match=r"nothing to learn .*; name texts with words"):
        train_tokenizer(texts, 300)


@pytest.mark.parametrize("vocabulary", [0, 257, 2**20 + 1, 2**32])
def test_a_vocabulary_out_of_range_is_refused_before_memory_is_taken(vocabulary):
    with pytest.raises(BadTokenizer, match=f"vocabulary of {vocabulary} is not allowed; choose"):
        train_tokenizer([TEXT], vocabulary)
