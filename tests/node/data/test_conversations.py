"""Conversations become documents of which the answers count, each once; bad lines are named."""

import gzip
import itertools
import json

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.data import conversations, documents
from farflock.node.data.conversations import ConversationTokenizer, require_conversations
from farflock.node.data.documents import BadDocuments, ReadingOptions, read_documents
from farflock.node.data.prepare import chat_preparation
from farflock.node.data.sources import find_files
from farflock.node.data.verify import FolderContent
from farflock.node.errors import Usage
from farflock.node.tokens.chat import (
    ChatFormat,
    Turns,
    TurnTokens,
    chat_format,
    conversation_tokens,
    turns_of,
)
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer

MARK, END = 2**31, 255
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# All turns end with the end of text, and a new line behind it.
ENDED = CHATML.replace("'<|im_end|>\n'", "eos_token + '\n'")
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes as tokens, and the end of text."""
    pytest.importorskip("tokenizers")
    from farflock.node.model.export import byte_level

    return JsonTokenizer(byte_level())


def talk(*said):
    """A conversation in turns."""
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": each} for role, each in zip(roles, said, strict=False)]


def pair(prompt, completion):
    return {"prompt": prompt, "completion": completion}


def written(path, lines, ending=""):
    raw = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path = path.with_name(path.name + ending)
    path.write_bytes(PACK[ending](raw))
    return path


def read(path, template=None, **options):
    (file,) = find_files([str(path)]).files
    parts = list(read_documents(file, ReadingOptions(chat=ChatFormat(template), **options)))
    assert [part.read_bytes for part in parts] == sorted(part.read_bytes for part in parts)
    assert all(part.last for part in parts)
    return [None if part.content is None else part.content.texts for part in parts]


def made(paths, target, tokenizer, template=None, **options):
    """Prepare a folder in small batches; return its content."""
    terms = {"shard_bytes": 4096, **options}
    named = [str(path) for path in paths]
    _, preparation = chat_preparation(named, tokenizer, template, target, **terms)
    ticks = itertools.count(step=60.0)
    preparation.run(
        threads=1, clock=lambda: next(ticks), progress=lambda share: None, say=lambda text: None
    )
    content = FolderContent(target)
    content.verify(lambda share: None)
    return content


def found_in(content):
    """The documents in all shards, as (id, counts) of each token, sorted."""
    (source,) = content.index.sources.values()
    shards = [*content.shards["text"], *source.held_out]
    tokens = np.concatenate([np.fromfile(content.folder / each.name, "<u4") for each in shards])
    parts = np.split(tokens, np.flatnonzero(tokens == END) + 1)
    assert len(parts[-1]) == 0
    return sorted([(each % MARK, each < MARK) for each in part.tolist()] for part in parts[:-1])


def of_pair(prompt, completion):
    left_out, counted = ([*text.encode()] for text in (prompt, completion))
    return [*((each, False) for each in left_out), *((each, True) for each in [*counted, END])]


@pytest.mark.parametrize("ending", PACK)
def test_conversations_are_read_from_lines_of_json(tmp_path, ending):
    lines = [
        {"messages": talk("Q", "A", "R", "B"), "prompt": "Q", "prompt_id": 7},
        pair("p ", "c"),
        {"messages": [{"role": "assistant", "content": "Hi", "weight": 1}], "source": "x"},
    ]
    path = written(tmp_path / "a.jsonl", lines, ending)
    start, end = "<|im_start|>", "<|im_end|>\n"
    asked = f"{start}user\nQ{end}{start}assistant\n"
    assert read(path, CHATML) == [
        (asked, f"A{end}", asked.replace("Q", "R"), f"B{end}"),
        (asked.replace("Q", "p "), f"c{end}"),
        (f"{start}assistant\n", f"Hi{end}"),
    ]
    assert read(written(tmp_path / "b.jsonl", lines[1:2], ending)) == [("p ", "c")]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"messages": talk("Q")}, "it has no answer; write one, as a message of the role 'ass"),
        ({"messages": []}, "it has no answer"),
        (pair("p", ""), "it has no answer"),
        ({"messages": talk("Q", "A")}, "messages need a template; name a file with --chat-temp"),
        ({"prompt": "p"}, "it is no conversation; write messages, each with a role and a content"),
        ({"text": "p"}, "it is no conversation; write messages"),
        ({"messages": [{"role": "user"}]}, r"it is no conversation .*`content`"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"it is no conv.*got `null`"),
        ([1], r"it is no conversation \(Expected `object`, got `array`\); write messages"),
        (pair("p" * 90, "c" * 11), "it has 101 characters, and a conversation at most 100; cut"),
        ({"messages": 513 * talk("Q", "A")}, "it is no conversation .*length <= 1024"),
    ],
)
def test_each_bad_line_is_one_sentence_or_left_out(tmp_path, monkeypatch, line, why):
    monkeypatch.setattr(conversations, "MAX_DOCUMENT_CHARS", 100)
    template = CHATML if "answer" in why and "messages" in line else None
    path = written(tmp_path / "a.jsonl", [pair("p", "c"), line, pair("q", "d")])
    with pytest.raises(BadDocuments, match=rf"a.jsonl, line 2: {why}.*, or leave .* --errors skip"):
        read(path, template)
    assert [each is None for each in read(path, template, skip=True)] == [False, True, False]


def test_a_line_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p", "completion": "c"}\n\n{"prompt"')
    with pytest.raises(BadDocuments, match=r"line 3: it is not JSON .*; correct the line"):
        read(path)
    assert read(path, skip=True) == [("p", "c"), None]


def test_a_template_that_fails_names_the_line(tmp_path):
    path = written(tmp_path / "a.jsonl", [pair("p", "c")])
    with pytest.raises(BadDocuments, match=r"line 1: the chat template fails \(no\); name another"):
        read(path, "{{ raise_exception('no') }}")


@given(st.binary(max_size=120))
def test_no_bytes_crash_the_reader(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_bytes(raw)
    read(path, CHATML, skip=True)


def test_other_files_have_no_conversations(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"")
    files = find_files([str(tmp_path / "a.parquet")]).files
    with pytest.raises(Usage, match=r"a.parquet: it has no conversations; name files of JSON li"):
        require_conversations(files)
    with pytest.raises(Usage, match="it has no conversations"):
        chat_preparation(["shakespeare"], ByteTokenizer(), None, tmp_path / "out")


TEXTS = st.text(st.sampled_from("ab \n한"), max_size=30)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS.filter(bool)), min_size=2, max_size=40))
def test_each_pair_is_there_once_with_its_prompt_left_out(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("pairs")
    path = written(folder / "a.jsonl", [pair(*each) for each in pairs])
    content = made([path], folder / "out", ByteTokenizer(), held_out=0.0)
    index = content.index
    assert (index.answers, index.token_bytes, index.vocabulary) == (True, 4, 256)
    assert found_in(content) == sorted(of_pair(*each) for each in pairs)
    counted = [counts for each in pairs for _, counts in of_pair(*each)]
    assert content.answer_tokens() == sum(counted)


def test_messages_are_prepared_with_a_template(tmp_path, tokenizer):
    talks = [talk(f"What is {n}?", f"It is {n}.", "Sure?", "Yes.") for n in range(80)]
    path = written(tmp_path / "a.jsonl", [{"messages": each} for each in talks])
    content = made([path], tmp_path / "out", tokenizer, CHATML)
    expected = []
    for each in talks:
        ids, counted = conversation_tokens(tokenizer, CHATML, each)
        pairs = zip([*ids.tolist(), END], [*counted.tolist(), True], strict=True)
        expected.append(list(pairs))
    assert found_in(content) == sorted(expected)
    (source,) = content.index.sources.values()
    assert sum(shard.tokens for shard in source.held_out) >= 1


def test_the_same_conversations_and_template_have_the_same_root(tmp_path, tokenizer):
    path = written(tmp_path / "a.jsonl", [pair(f"{n}", "c" * (n % 9 + 1)) for n in range(300)])
    roots = {
        made([path], tmp_path / f"{place}", tokenizer, template).root
        for place, template in enumerate([CHATML, CHATML, None, None, ENDED])
    }
    assert len(roots) == 3


def test_the_template_is_of_what_the_result_depends_on(tmp_path, tokenizer):
    path = written(tmp_path / "a.jsonl", [pair("p", "c")])
    seen = {
        chat_preparation([str(path)], tokenizer, template, tmp_path / "out")[1].fingerprint
        for template in (CHATML, ENDED, None)
    }
    assert len(seen) == 3


def test_skipped_conversations_are_counted(tmp_path):
    lines = [pair("p", "c" * 50), pair("q", ""), {"messages": talk("Q", "A")}] * 10
    path = written(tmp_path / "a.jsonl", lines)
    _, preparation = chat_preparation(
        [str(path)], ByteTokenizer(), None, tmp_path / "out", skip=True, shard_bytes=4096
    )
    result = preparation.run(
        threads=1, clock=lambda: 0.0, progress=lambda share: None, say=lambda text: None
    )
    assert result.skipped == {"text": 20}


def test_bytes_have_no_template_and_some_vocabularies_no_bit_for_a_mark(tmp_path):
    path = written(tmp_path / "a.jsonl", [pair("p", "c")])
    with pytest.raises(Usage, match="bytes, which have no turns of a chat; name a tokenizer with"):
        chat_preparation([str(path)], ByteTokenizer(), CHATML, tmp_path / "out")
    huge = ByteTokenizer()
    huge.vocab_size = 2**31 + 1
    with pytest.raises(
        Usage, match="it has 2,147,483,649 tokens, which leave no bit to mark a pro"
    ):
        chat_preparation([str(path)], huge, None, tmp_path / "out")


def ids_and_counts(tokenizer, template, messages):
    chat = chat_format(tokenizer, template)
    (tokens,) = ConversationTokenizer(tokenizer, chat).encode_batch([turns_of(chat, messages)])
    return (tokens % MARK).tolist(), (tokens < MARK).tolist()


def test_only_the_end_of_a_document_is_an_end_that_counts(tokenizer):
    """Where each turn ends with the end of text, the last one is the document's own."""
    ids, counted = ids_and_counts(tokenizer, ENDED, talk("Q", "A", "R", "B"))
    whole, answers = conversation_tokens(tokenizer, ENDED, talk("Q", "A", "R", "B"))
    assert whole.tolist() == [*ids, END, ord("\n")]
    ends = [token == END for token in ids]
    assert sum(ends) == 3
    assert not any(itertools.compress(counted, ends))
    wanted = [counts and not end for counts, end in zip(answers.tolist(), ends, strict=False)]
    assert counted == wanted


def test_an_end_of_text_that_is_spelled_in_an_answer_cuts_nothing(tokenizer):
    said = talk("Q", "It is spelled <|endoftext|> there")
    ids, counted = ids_and_counts(tokenizer, CHATML, said)
    whole, answers = conversation_tokens(tokenizer, CHATML, said)
    assert ids == whole.tolist()
    assert sum(counted) == answers.sum() - 1


@given(st.lists(st.tuples(st.sampled_from([9, 32, 65, END]), st.booleans()), max_size=12))
def test_no_end_of_text_is_left_without_a_mark(pairs):
    ids = np.array([token for token, _ in pairs], np.uint32)
    counted = np.array([counts for _, counts in pairs], bool)
    tokens = conversations.without_ends(TurnTokens(ids, counted), ByteTokenizer())
    assert END not in tokens
    assert (tokens % MARK).tolist() == ids.tolist()[: len(tokens)]
    assert bytes(ids[len(tokens) :].tolist()).strip(b"\xff \t") == b""
    assert (tokens < MARK).tolist() == (counted & (ids != END)).tolist()[: len(tokens)]


def test_an_end_of_text_of_a_prompt_is_not_taken_for_the_documents():
    tokens = TurnTokens(np.array([65, END], np.uint32), np.array([True, False]))
    assert conversations.without_ends(tokens, ByteTokenizer()).tolist() == [65, END + MARK]


def test_conversations_and_texts_are_tokenized_by_the_same_rule():
    """A batch keeps its order, whatever is in it."""
    turns = [Turns((text, text.upper())) for text in ("ab", "c", "")]
    found = ConversationTokenizer(ByteTokenizer(), ChatFormat()).encode_batch(turns)
    assert [(each % MARK).tolist() for each in found] == [[*b"abAB"], [*b"cC"], []]


def test_a_conversation_is_never_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PART_CHARS", 10)
    path = written(tmp_path / "a.jsonl", [pair("p" * 50, "c\n" * 50)])
    assert read(path) == [("p" * 50, "c\n" * 50)]
