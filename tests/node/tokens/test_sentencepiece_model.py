"""A converted model gives the ids of sentencepiece itself; other bytes are refused in words."""

import contextlib
import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.model.corpus import load_corpus
from farflock.node.tokens.json_tokenizer import JsonTokenizer, read_tokenizer
from farflock.node.tokens.sentencepiece_model import sentencepiece_to_json
from farflock.node.tokens.tokenizer import BadTokenizer

pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")
SHAKESPEARE = load_corpus("shakespeare").train[:150_000]
LINES = [*SHAKESPEARE.splitlines(), *["Café déjà, naïve", "日本語 テキスト", "a  b   c"] * 20]
LETTERS = "abc ABC  ▁<>/s0xA12\n\téß日本語한글😀ﬁ①á'\"foBR"
PARTS = [
    *["foo", "<mask>", " ", "  ", "<s>", "</s>", "<0x0A>", "<unk>", "fo", "aaa", "aa", "a", "\n"],
    *["é", "Ŧ"],
]
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LIKE_GEMMA = {
    **PLAIN,
    "add_dummy_prefix": False,
    "byte_fallback": True,
    "user_defined_symbols": ["<mask>", "foo", "▁▁", "  ", "\n"],
    "split_digits": True,
}
KINDS = {
    "nfkc": {},
    "bytes": {"byte_fallback": True},
    "like llama": {**PLAIN, "byte_fallback": True, "split_digits": True},
    "like gemma": LIKE_GEMMA,
    "pieces of the user": {**PLAIN, "user_defined_symbols": ["<mask>", "foo"]},
}


def trained(model_type, vocabulary=700, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=vocabulary,
        model_type=model_type,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def texts(count):
    rng = random.Random(0)
    for _ in range(count):
        yield "".join(rng.choices(LETTERS, k=rng.randrange(40)))
        yield "".join(rng.choices(PARTS, k=rng.randrange(12)))
        start = rng.randrange(len(SHAKESPEARE))
        yield SHAKESPEARE[start : start + rng.randrange(200)]


def is_exact(text, options):
    """False for the names of special tokens without bytes to fall back to, where the number of
    unknown tokens in a row may differ, and for a text that is one of the user's pieces."""
    named = ("<" in text or ">" in text) and "byte_fallback" not in options
    return not named and text not in options.get("user_defined_symbols", ())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_the_ids_and_the_texts_are_those_of_sentencepiece(model_type, name):
    model = trained(model_type, **KINDS[name])
    known = sentencepiece.SentencePieceProcessor(model_proto=model)
    converted = JsonTokenizer(sentencepiece_to_json(model, "a.model"))
    assert converted.vocab_size == known.vocab_size()
    assert converted.end_of_text == known.eos_id()
    for text in filter(lambda text: is_exact(text, KINDS[name]), texts(400)):
        ids = known.encode(text)
        assert converted.encode(text).tolist() == ids, text
        if known.unk_id() not in ids:  # it is shown as itself, and by sentencepiece as ⁇
            assert converted.decode(ids) == known.decode(ids), text


def test_a_text_that_spells_a_special_piece_never_gives_its_id():
    model = trained("unigram", 300, character_coverage=0.98)
    known = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert known.piece_to_id("<") == known.unk_id()
    converted = JsonTokenizer(sentencepiece_to_json(model, "a.model"))
    for text in ("<s>", "a</s>b", "</s></s>", "x <s>"):
        assert not {1, 2} & set(converted.encode(text).tolist())
        assert not {1, 2} & set(known.encode(text))


def test_equal_models_become_equal_bytes_and_are_read_by_their_suffix(tmp_path):
    model = trained("bpe", 300, hard_vocab_limit=False)
    (tmp_path / "tokenizer.model").write_bytes(model)
    raw = sentencepiece_to_json(model, "a.model")
    assert raw == sentencepiece_to_json(model, "b.model")
    assert read_tokenizer(tmp_path / "tokenizer.model").raw == raw
    assert read_tokenizer(tmp_path, "<s>").end_of_text == 1


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("word", {}, "cuts text into words or characters only"),
        ("char", {"vocab_size": 70}, "cuts text into words or characters only"),
        ("bpe", {"treat_whitespace_as_suffix": True}, "puts spaces behind words"),
    ],
)
def test_the_rare_kinds_are_refused_with_the_remedy(model_type, options, reason):
    vocabulary = options.pop("vocab_size", 300)
    model = trained(model_type, vocabulary, hard_vocab_limit=False, **options)
    with pytest.raises(BadTokenizer, match=f"rare.model {reason}.*; use a unigram or BPE model"):
        sentencepiece_to_json(model, "rare.model")


def piece(text, score=b"\0\0\0\0", kind=1):
    inner = b"\x0a" + bytes([len(text)]) + text + b"\x15" + score + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(inner)]) + inner


UNKNOWN = piece(b"<unk>", kind=2)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "holds no pieces"),
        (UNKNOWN, "holds no pieces"),
        (piece(b"a"), "no piece for what is unknown"),
        (UNKNOWN + piece(b"a") + piece(b"a"), "the same piece twice"),
        (UNKNOWN + piece(b""), "or an empty one"),
        (UNKNOWN + piece(b"a", b"\0\0\xc0\x7f"), "a score that is not finite"),
        (b"\x0a\xff\xff\xff\xff\x0f", "is not a model of sentencepiece"),
        (b"\x0a", "is not a model of sentencepiece"),
        (b"\xff" * 20, "is not a model of sentencepiece"),
        (b"\x08\x01", "is not a model of sentencepiece"),
        (b"\x0b", "is not a model of sentencepiece"),
        (piece(b"\xff"), "is not a model of sentencepiece"),
        (b'{"model": {}}', "is not a model of sentencepiece"),
    ],
)
def test_other_bytes_are_refused_in_words(raw, reason):
    with pytest.raises(BadTokenizer, match=f"a.model .*{reason}"):
        sentencepiece_to_json(raw, "a.model")


@settings(max_examples=300)
@given(raw=st.binary(max_size=60) | st.binary(max_size=30).map(lambda tail: UNKNOWN + tail))
def test_any_bytes_are_converted_or_refused(raw):
    with contextlib.suppress(BadTokenizer):
        sentencepiece_to_json(raw, "a.model")
