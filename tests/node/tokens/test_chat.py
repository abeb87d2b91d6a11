"""Chats become the tokens that transformers makes of them, and templates reach nothing else."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.tokens import chat
from farflock.node.tokens.chat import (
    BadChat,
    ChatFormat,
    Turns,
    chat_tokens,
    conversation_tokens,
    pair_turns,
    read_template,
    rendered,
    template_beside,
    text_encoder,
    turn_ends,
    turn_tokens,
    turns_of,
)
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import BadTokenizer, ByteTokenizer

pytest.importorskip("tokenizers")

CHATML = (
    "{% for message in messages %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
)
MESSAGES = [
    {"role": "system", "content": "Be brief. <|im_end|>"},
    {"role": "user", "content": " What is 한글? "},
]


def tokenizer():
    """Bytes, and three special tokens behind them."""
    from farflock.node.model.export import byte_level

    described = msgspec.json.decode(byte_level())
    special = described["added_tokens"][0]
    for place, name in enumerate(("<|im_start|>", "<|im_end|>"), 256):
        described["added_tokens"].append(special | {"id": place, "content": name})
        described["model"]["vocab"][name] = place
    return JsonTokenizer(msgspec.json.encode(described))


def test_the_tokens_of_a_chat_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from farflock.node.model.export import tokenizer_files

    ours = tokenizer()
    for name, raw in tokenizer_files(ours, 64).items():
        (tmp_path / name).write_bytes(raw)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in (MESSAGES, MESSAGES[1:]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert chat_tokens(ours, CHATML, messages) == expected
    assert expected[:2] == [256, ord("u")]


def test_names_of_tokens_reach_the_template():
    assert rendered("{{ bos_token }}{{ eos_token }}", [], {"bos_token": "a", "eos_token": "b"}) == (
        "ab"
    )


def test_a_turn_ends_with_the_text_or_with_a_usual_token():
    assert turn_ends(tokenizer()) == (255, 255, 257)
    assert turn_ends(ByteTokenizer()) == (255,)


def test_without_a_template_or_with_bytes_a_chat_is_refused():
    with pytest.raises(BadChat, match=r"has no chat template.*name a file with --chat-template"):
        chat_tokens(tokenizer(), None, MESSAGES)
    with pytest.raises(BadChat, match=r"tokens are bytes.*leave out --chat"):
        chat_tokens(ByteTokenizer(), CHATML, MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/hostname' %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 + 'a' }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages[7].content.x }}",
        "{% for",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_or_reaches_beyond_the_chat_is_refused(template):
    with pytest.raises(BadChat, match=r"the chat template fails .*; name another file"):
        rendered(template, MESSAGES, {})


def test_a_template_of_absurd_size_is_not_compiled(monkeypatch):
    monkeypatch.setattr(chat, "MAX_TEMPLATE_CHARS", 10)
    with pytest.raises(BadChat, match="has 11 characters, and at most 10 are read"):
        rendered("x" * 11, [], {})


def test_messages_are_not_changed_and_json_is_not_escaped():
    messages = [{"role": "user", "content": "<a> & 한글"}]
    said = rendered("{% set messages = [] %}{{ '<&>한글' | tojson }}", messages, {})
    assert said == '"<&>한글"'
    assert messages == [{"role": "user", "content": "<a> & 한글"}]


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Sure? <|im_end|>"},
    {"role": "assistant", "content": " Yes, 한글 "},
]
# What a model writes is marked for transformers, which finds it by its place in the text.
TRAINING = (
    "{% for message in messages %}\n"
    "{% if message.role == 'assistant' %}\n"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message.content | trim + '<|im_end|>\\n' }}{% endgeneration %}\n"
    "{% else %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n"
    "{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
)
# As Mistral's: all turns end with the end of text, and nothing else tells them apart.
PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}[INST] {{ message.content }} [/INST]{% endif %}"
    "{% endfor %}"
)
NAMES = {"bos_token": "", "eos_token": "<|endoftext|>"}


def test_answers_are_the_tokens_that_transformers_says(tmp_path):
    transformers = pytest.importorskip("transformers")
    from farflock.node.model.export import tokenizer_files

    ours = tokenizer()
    for name, raw in tokenizer_files(ours, 64).items():
        (tmp_path / name).write_bytes(raw)
    (tmp_path / "chat_template.jinja").write_text(TRAINING)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in (TALK, TALK[:3], TALK[1:3]):
        expected = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        found = conversation_tokens(ours, TRAINING, messages)
        assert found.ids.tolist() == expected["input_ids"]
        assert found.is_answer.tolist() == [bool(each) for each in expected["assistant_masks"]]
        assert 0 < found.is_answer.sum() < len(found.ids)


@pytest.mark.parametrize("template", [CHATML, TRAINING, PLAIN])
def test_a_prompt_has_the_tokens_at_which_the_model_answers(template):
    for place in (2, 4):
        found = conversation_tokens(tokenizer(), template, TALK[: place + 1])
        answer = len(found.ids) - np.flatnonzero(~found.is_answer)[-1] - 1
        prompt = found.ids[: len(found.ids) - answer].tolist()
        assert prompt == chat_tokens(tokenizer(), template, TALK[:place])
        said = tokenizer().decode(found.ids[-answer:].tolist())
        assert said.strip().startswith(TALK[place]["content"].strip())


def test_what_follows_the_last_answer_is_left_out():
    more = [*TALK, {"role": "user", "content": "Thanks"}]
    found, expected = (conversation_tokens(tokenizer(), CHATML, each) for each in (more, TALK))
    assert found.ids.tolist() == expected.ids.tolist()
    nothing = conversation_tokens(tokenizer(), CHATML, TALK[:2])
    assert (len(nothing.ids), len(nothing.is_answer)) == (0, 0)


ROLES = st.sampled_from(["user", "assistant", "tool"])
SAID = st.text(st.sampled_from("a \n<|im_end|>한"), max_size=12)


@given(st.lists(st.tuples(ROLES, SAID), max_size=6))
def test_the_pieces_of_a_conversation_make_up_its_text(pairs):
    messages = [{"role": role, "content": content} for role, content in pairs]
    turns = turns_of(ChatFormat(CHATML), messages)
    places = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    whole = rendered(CHATML, messages[: places[-1] + 1], {}, asks=False) if places else ""
    assert "".join(turns.texts) == whole
    assert len(turns) == len(whole)
    answers = [messages[place]["content"].strip() + "<|im_end|>\n\n" for place in places]
    assert list(turns.texts[1::2]) == answers


def test_a_template_that_rewrites_what_came_before_is_refused():
    """As those do that drop the thoughts of earlier answers."""
    thought = "(message.content if loop.last or message.role != 'assistant' else '')"
    forgets = CHATML.replace("message.content", thought)
    turns_of(ChatFormat(forgets), TALK[:3])
    with pytest.raises(BadChat, match=r"once more follows \(at message 5\).*for each answer"):
        turns_of(ChatFormat(forgets), TALK)
    greets = "{% for message in messages %}{{ message.content }}{% endfor %}Bye"
    with pytest.raises(BadChat, match=r"changes what it has written once more follows \(at .* 3\)"):
        turns_of(ChatFormat(greets), TALK[:3])


def library_tokenizer(model, **parts):
    """A tokenizer of the library's own parts, with an end of text."""
    import tokenizers

    fast = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(fast, name, part)
    fast.add_special_tokens(["<|endoftext|>"])
    return JsonTokenizer(fast.to_str().encode())


def test_what_begins_a_text_does_not_begin_an_answer():
    """A tokenizer of sentencepiece writes a space in front of a text; after a prompt it does not,
    and neither may the answer's own tokens."""
    from tokenizers import models, pre_tokenizers

    letters = [(each, -1.0) for each in "▁[INST]/QA.yes "]
    model = models.Unigram([("<unk>", 0.0), *letters, ("▁[", -1.0)], 0)
    made = library_tokenizer(
        model, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    )
    template = PLAIN.replace("%} {{", "%}{{")
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "yes"}] * 2
    found, encode = conversation_tokens(made, template, talk), text_encoder(made, ChatFormat("x"))
    expected, alone = encode([rendered(template, talk, NAMES, asks=False), "yes<|endoftext|>"])
    assert found.ids.tolist() == expected
    answers = np.split(found.ids, np.flatnonzero(np.diff(found.is_answer)) + 1)[1::2]
    assert [each.tolist() for each in answers] == [alone[1:], alone[1:]]


def test_no_token_reaches_from_a_prompt_into_an_answer():
    from tokenizers import models, pre_tokenizers

    vocabulary = {"a": 0, "Ċ": 1, "ĊĊ": 2, "b": 3, "ĊĊb": 4}
    model = models.BPE(vocabulary, [("Ċ", "Ċ"), ("ĊĊ", "b")])
    made = library_tokenizer(
        model, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    )
    assert made.encode("a\n\nb").tolist() == [0, 4]
    pair = turn_tokens(made.encode_batch, [Turns(("a\n\n", "b"))])[0]
    assert pair.ids.tolist() == [*made.encode("a\n\n").tolist(), *made.encode("b").tolist()]
    assert pair.is_answer.tolist() == [False, False, True]


@given(st.lists(st.lists(SAID, max_size=5).map(tuple), max_size=4))
def test_bytes_of_many_conversations_are_those_of_their_texts(conversations):
    found = turn_tokens(ByteTokenizer().encode_batch, [Turns(each) for each in conversations])
    for turns, tokens in zip(conversations, found, strict=True):
        assert tokens.ids.tolist() == list("".join(turns).encode())
        assert tokens.is_answer.tolist() == [
            place % 2 == 1 for place, text in enumerate(turns) for _ in text.encode()
        ]


def test_a_pair_is_two_messages_of_a_template_or_joined_as_it_is():
    assert pair_turns(ChatFormat(), "a ", "b").texts == ("a ", "b")
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = ChatFormat(CHATML)
    assert pair_turns(chat, "a", "b") == turns_of(chat, asked)
    with pytest.raises(BadChat, match="messages need a template; name a file with --chat-template"):
        turns_of(ChatFormat(), asked)


def test_a_tokenizer_that_fails_is_refused_in_words():
    from tokenizers import models

    made = library_tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="none"))
    with pytest.raises(BadTokenizer, match=r"cannot tokenize these chats .*; use another"):
        conversation_tokens(made, PLAIN, TALK)


def test_a_template_is_found_beside_its_tokenizer(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"{}")
    assert template_beside(file) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ 1 }}"}')
    assert template_beside(file) == "{{ 1 }}"
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert template_beside(file) == template_beside(tmp_path) == CHATML
    assert read_template(tmp_path / "chat_template.jinja") == CHATML


def test_a_template_that_is_no_text_or_too_large_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xff")
    with pytest.raises(BadChat, match=r"chat_template.jinja is no text .*; name a chat_template"):
        read_template(path)
    with pytest.raises(BadChat, match=r"the chat template of .* cannot be read .*--chat-template"):
        template_beside(tmp_path)
    monkeypatch.setattr(chat, "MAX_TEMPLATE_CHARS", 1)
    path.write_bytes(b"12345")
    with pytest.raises(BadChat, match="has more than 4 bytes"):
        read_template(path)
