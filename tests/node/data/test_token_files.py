"""Files of tokens give their documents; what contradicts itself or the vocabulary is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.data import token_files
from farflock.node.data.documents import BadDocuments, ReadingOptions, read_documents
from farflock.node.data.sources import find_files

END = 9
DOCUMENTS = st.lists(st.lists(st.integers(0, END - 1), max_size=30), max_size=8)


def read(path, **options):
    (file,) = find_files([str(path)]).files
    given_options = {"vocabulary": 100, "end_of_text": END, **options}
    found, before = [], []
    for part in read_documents(file, ReadingOptions(**given_options)):
        before += part.content.tolist()
        if part.last:
            found.append(before)
            before = []
    assert not before
    return found


def write(path, tokens, width=2):
    np.array(tokens, dtype=f"<u{width}").tofile(path)
    return path


@settings(max_examples=60)
@given(DOCUMENTS, st.sampled_from([2, 4]), st.integers(3, 40), st.booleans())
def test_documents_between_ends_of_text_come_back(tmp_path_factory, texts, width, block, open_end):
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    flat = [token for text in texts for token in (*text, END)]
    if open_end and flat:
        flat.pop()
    write(path, flat, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "BLOCK_TOKENS", block)
        assert read(path, token_bytes=width) == [text for text in texts if text]


@settings(max_examples=60)
@given(DOCUMENTS, st.booleans(), st.integers(3, 40))
def test_documents_with_an_index_come_back(tmp_path_factory, texts, with_ends, block):
    path = tmp_path_factory.mktemp("tokens") / "a.ds"
    texts = [[*text, END] if with_ends else text for text in texts]
    write(path, [token for text in texts for token in text])
    write(path.with_name("a.ds.index"), np.cumsum([len(text) for text in texts], dtype=int), 8)
    expected = [text[:-1] if with_ends else text for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "BLOCK_TOKENS", 8 * block)
        assert read(path) == [text for text in expected if text]


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(BadDocuments, match="has the token 100, and the tokenizer only 100; name"):
        read(write(tmp_path / "a.bin", [1, 2, 100]))


def test_half_a_token_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(BadDocuments, match="has 3 bytes, no whole number of tokens of 2 bytes"):
        read(tmp_path / "a.bin")


@pytest.mark.parametrize("ends", [[2], [2, 4], [2, 1, 3], [4, 3]])
def test_an_index_that_does_not_fit_is_refused(tmp_path, ends):
    write(tmp_path / "a.ds", [1, 2, 3])
    write(tmp_path / "a.ds.index", ends, 8)
    with pytest.raises(
        BadDocuments, match=r"does not list the ends of the documents in a.ds; copy"
    ):
        read(tmp_path / "a.ds")


def test_an_index_that_was_cut_short_is_refused(tmp_path):
    write(tmp_path / "a.ds", [1, 2, 3])
    (tmp_path / "a.ds.index").write_bytes((3).to_bytes(8, "little") + b"\0\0")
    with pytest.raises(BadDocuments, match="does not list the ends"):
        read(tmp_path / "a.ds")


def test_a_file_that_became_shorter_is_refused(tmp_path):
    path = write(tmp_path / "a.bin", [1, 2, 3])
    (file,) = find_files([str(path)]).files
    write(path, [1])
    with pytest.raises(BadDocuments, match="became shorter"):
        list(read_documents(file, ReadingOptions(vocabulary=100, end_of_text=END)))
