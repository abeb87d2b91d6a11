"""Exported tokenizers give the ids of ours, and name the token that ends a text."""

import msgspec
import pytest

from farflock.node.tokens.hf_files import (
    byte_level,
    printable_bytes,
    tokenizer_files,
    tokenizer_in,
)
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import BadTokenizer, ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

TEXT = "To be, or not to be:\n\tthat is the question. Café — 한글 \x00\x7f"


def files(tokenizer):
    found = tokenizer_files(tokenizer, 64)
    return found["tokenizer.json"], msgspec.json.decode(found["tokenizer_config.json"])


def test_each_byte_has_a_printable_stand_in_of_its_own():
    stand_ins = printable_bytes()
    assert len(set(stand_ins)) == 256
    assert stand_ins[ord("A")] == "A"
    assert stand_ins[ord(" ")] == "Ġ"
    assert stand_ins[ord("\n")] == "Ċ"
    assert all(character.isprintable() and not character.isspace() for character in stand_ins)


def test_bytes_become_a_file_in_which_each_is_a_token_and_255_ends_a_text():
    raw, about = files(ByteTokenizer())
    read = JsonTokenizer(raw)
    assert read.encode(TEXT).tolist() == ByteTokenizer().encode(TEXT).tolist()
    assert read.vocab_size == 256
    assert (read.end_of_text, read.end_name) == (255, about["eos_token"])
    assert read.decode([*b"To be", 255]) == "To be"
    assert about["model_max_length"] == 64


def test_a_file_stays_as_it_is_and_its_end_of_text_is_named():
    tokenizer = JsonTokenizer(train_tokenizer([TEXT * 3], 280))
    raw, about = files(tokenizer)
    assert raw == tokenizer.raw
    assert about["eos_token"] == tokenizer.end_name == "<|endoftext|>"


def test_nothing_is_invented_where_nothing_says_what_ends_a_text():
    raw = train_tokenizer([TEXT * 3], 280).replace(b"<|endoftext|>", b"<|unheard of|>")
    assert files(JsonTokenizer(raw))[1]["eos_token"] is None
    named = JsonTokenizer(raw, "<|unheard of|>")
    assert files(named)[1]["eos_token"] == "<|unheard of|>"


def test_the_file_for_bytes_is_read_as_bytes_again():
    assert isinstance(tokenizer_in(byte_level(), "a file"), ByteTokenizer)
    raw = train_tokenizer([TEXT * 3], 280)
    assert tokenizer_in(raw, "a file").raw == raw
    with pytest.raises(BadTokenizer, match=r"a file is not a tokenizer\.json"):
        tokenizer_in(b"{}", "a file")
