"""The bytes of a text's tokens add up to the text, where the tokens' names say them."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.tokens.hf_files import byte_level
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.token_bytes import bytes_of_tokens
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

TEXT = "the cat and the hat, and that is that: the cat sat. Ça va? 한글\n" * 20


@pytest.fixture(scope="module")
def byte_pairs():
    return JsonTokenizer(train_tokenizer([TEXT], 320))


@pytest.fixture(scope="module")
def pieces():
    """A tokenizer as Llama 2 and Mistral have it: whole characters, spaces as ▁, and bytes for
    what it lacks."""
    characters = sorted({*TEXT.replace(" ", "▁")} - {"\n"})
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, "th", "the"]
    merges = ["t h", "th e"]
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    end = {"id": 1, "content": "</s>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    about = {
        "version": "1.0",
        "added_tokens": [end | flags],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {name: place for place, name in enumerate(names)},
            "merges": merges,
        },
    }
    return JsonTokenizer(msgspec.json.encode(about))


@settings(max_examples=25)
@given(text=st.text(max_size=80))
@pytest.mark.parametrize("name", ["byte_pairs", "pieces"])
def test_they_add_up_to_the_text(request, name, text):
    tokenizer = request.getfixturevalue(name)
    lengths = bytes_of_tokens(tokenizer)
    assert int(lengths[tokenizer.encode(text.replace("▁", "_"))].sum()) == len(
        text.replace("▁", "_").encode()
    )


def test_the_end_of_a_text_is_none_of_it(byte_pairs, pieces):
    for tokenizer in (byte_pairs, pieces, ByteTokenizer()):
        assert bytes_of_tokens(tokenizer)[tokenizer.end_of_text] == 0


def test_bytes_are_counted_alike_with_and_without_a_file():
    plain = bytes_of_tokens(JsonTokenizer(byte_level()))
    assert np.array_equal(plain, bytes_of_tokens(ByteTokenizer()))


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "Fuse"}]
)
def test_nothing_is_said_of_other_tokenizers(byte_pairs, decoder):
    about = msgspec.json.decode(byte_pairs.raw)
    about["decoder"] = decoder
    assert bytes_of_tokens(JsonTokenizer(msgspec.json.encode(about))) is None
