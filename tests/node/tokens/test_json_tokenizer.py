"""A tokenizer.json gives the ids that the library gives; other files are refused in words."""

import contextlib

import msgspec
import numpy as np
import pytest
import tokenizers
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.tokens import json_tokenizer
from farflock.node.tokens.json_tokenizer import END_NAMES, JsonTokenizer, read_tokenizer
from farflock.node.tokens.tokenizer import BadTokenizer, ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

TEXT = "the cat and the hat, and that is that: the cat sat. Ça va? 한글\n" * 20
SIZE = 280
SPELLING = "the <|endoftext|> cat"


def special(place, name):
    return {
        "id": place,
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def words(*names, added=(), **more):
    """A tokenizer.json of whole words, with these special tokens behind them."""
    vocabulary = {name: place for place, name in enumerate((*names, *added))}
    return msgspec.json.encode(
        {
            "version": "1.0",
            "added_tokens": [special(vocabulary[name], name) for name in added],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": names[0]},
            **more,
        }
    )


@pytest.fixture(scope="module")
def raw():
    return train_tokenizer([TEXT], SIZE)


@pytest.fixture(scope="module")
def tokenizer(raw):
    return JsonTokenizer(raw)


def test_the_file_is_kept_and_known_by_its_hash(raw, tokenizer):
    assert tokenizer.raw == raw
    assert tokenizer.hash == blake3(raw).hexdigest()
    assert tokenizer.vocab_size == SIZE
    assert (tokenizer.end_of_text, tokenizer.end_name) == (0, "<|endoftext|>")


@given(text=st.text() | st.sampled_from([TEXT, SPELLING, "<|endoftext|>" * 3]))
def test_any_text_comes_back_and_never_holds_the_end_of_text(raw, text):
    tokenizer = JsonTokenizer(raw)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert not len(ids) or int(ids.max()) < tokenizer.vocab_size
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids.tolist()) == text


def test_the_ids_are_those_of_the_library(raw, tokenizer):
    other = tokenizers.Tokenizer.from_str(raw.decode())
    assert tokenizer.encode(TEXT).tolist() == other.encode(TEXT).ids
    assert tokenizer.encode(SPELLING).tolist() != other.encode(SPELLING).ids


def test_a_batch_is_each_text_for_itself(tokenizer):
    texts = ["", TEXT, SPELLING, "한글"]
    batch = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in texts]
    assert {ids.dtype for ids in batch} == {np.dtype(np.uint16)}


@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=30))
def test_any_ids_can_be_shown_and_the_end_of_text_is_left_out(raw, ids):
    tokenizer = JsonTokenizer(raw)
    assert tokenizer.decode(ids) == tokenizer.decode([i for i in ids if i != 0])


def test_what_the_file_would_cut_off_pad_or_add_is_left_alone():
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    raw = words(
        "?",
        "a",
        added=("<s>", "</s>"),
        truncation={
            "max_length": 2,
            "stride": 0,
            "strategy": "LongestFirst",
            "direction": "Right",
        },
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "?",
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}},
        },
    )
    tokenizer = JsonTokenizer(raw)
    assert tokenizer.encode("a a a a").tolist() == [1, 1, 1, 1]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", "a a a"])] == [[1], [1, 1, 1]]


@pytest.mark.parametrize("name", END_NAMES)
def test_the_usual_names_of_the_end_of_text_are_found(name):
    assert JsonTokenizer(words("?", "a", added=("<x>", name))).end_of_text == 3


def test_the_end_of_a_document_comes_before_the_end_of_a_turn():
    chat = words("?", added=("<|im_end|>", "<|eot_id|>", "<|end_of_text|>"))
    assert JsonTokenizer(chat).end_name == "<|end_of_text|>"


def test_the_end_of_text_can_be_named_and_is_unknown_without_a_usual_name():
    raw = words("?", "a", added=("<stop>",))
    assert JsonTokenizer(raw, "<stop>").end_of_text == JsonTokenizer(raw, 2).end_of_text == 2
    unnamed = JsonTokenizer(raw)
    assert (unnamed.end_of_text, unnamed.end_name) == (None, None)
    assert unnamed.decode([1, 2]) == "a <stop>"
    for wrong in ("<halt>", 3, -1, 2**40):
        with pytest.raises(BadTokenizer, match=r"has no token .*--end-of-text"):
            JsonTokenizer(raw, wrong)


def test_a_word_of_the_vocabulary_is_no_end_of_text_by_its_name_alone():
    assert JsonTokenizer(words("?", "</s>")).end_of_text is None


def test_ids_with_holes_between_them_count_up_to_the_highest():
    raw = words("?", added=("</s>",)).replace(b'"?":0', b'"?":0,"far":4294967295')
    tokenizer = JsonTokenizer(raw)
    assert tokenizer.vocab_size == 2**32
    assert tokenizer.encode("far").tolist() == [2**32 - 1]
    assert tokenizer.decode([0, 77, 2**32 - 1]) == "? far"


DEEP = b'{"model":' * 100_000


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"{}",
        b"[]",
        b"null",
        DEEP,
        words("?").replace(b'"?":0', b'"?":4294967296'),
        words("?").replace(b'"?":0', b'"?":-1'),
        words("?").replace(b"WordLevel", b"Other"),
        words("?", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ],
    ids=range(11),
)
def test_a_file_that_is_no_tokenizer_is_refused_in_one_sentence(raw):
    with pytest.raises(BadTokenizer, match=r"is not a tokenizer.json \(.*\); name") as caught:
        JsonTokenizer(raw)
    assert "\n" not in str(caught.value)


@given(at=st.integers(0, 2000), byte=st.integers(0, 255))
def test_a_damaged_file_is_read_or_refused(raw, at, byte):
    damaged = raw[:at] + bytes([byte]) + raw[at + 1 :]
    with contextlib.suppress(BadTokenizer):
        JsonTokenizer(damaged).encode(SPELLING)


def test_an_empty_vocabulary_is_refused():
    with pytest.raises(BadTokenizer, match="has 1 tokens, and a tokenizer 2 to"):
        JsonTokenizer(words("?"))


def test_a_text_that_a_tokenizer_has_no_ids_for_is_refused():
    raw = words("?", "a", added=("</s>",)).replace(b'"unk_token":"?"', b'"unk_token":"!"')
    with pytest.raises(BadTokenizer, match=r"cannot tokenize this text \(.*\); use another"):
        JsonTokenizer(raw).encode("b")
    with pytest.raises(BadTokenizer, match="cannot tokenize these texts"):
        JsonTokenizer(raw).encode_batch(["a", "b"])


def test_a_file_that_is_too_large_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(json_tokenizer, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(bytes(1001))
    with pytest.raises(BadTokenizer, match="has more than 1,000 bytes"):
        read_tokenizer(path)
    with pytest.raises(BadTokenizer, match="has more than 1,000 bytes"):
        JsonTokenizer(bytes(1001))


def test_a_tokenizer_is_named_by_bytes_a_file_or_a_folder(raw, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(raw)
    assert isinstance(read_tokenizer("bytes"), ByteTokenizer)
    assert read_tokenizer(tmp_path / "tokenizer.json").raw == raw
    assert read_tokenizer(str(tmp_path), "A").end_name == "A"


@pytest.mark.parametrize("name", ["nothing", "."])
def test_a_path_that_holds_no_tokenizer_is_refused_with_the_remedy(tmp_path, name):
    with pytest.raises(BadTokenizer, match=r"cannot be read \(.*\); name a tokenizer.json"):
        read_tokenizer(tmp_path / name)


def test_bytes_have_an_end_of_text_of_their_own():
    with pytest.raises(BadTokenizer, match="leave --end-of-text out"):
        read_tokenizer("bytes", "</s>")
