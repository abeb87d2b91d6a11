"""Chats: a tokenizer's template turns messages into the tokens that the model was trained with.

A template is a program in Jinja by the model's author, so it runs in Jinja's sandbox: it sees the
messages and the names of two tokens, calls no other code, and changes nothing.

To train on conversations, one has to know which tokens are answers. A template is asked twice for
each: for the text up to the place where the model answers, and for the same with the answer. What
the second has more than the first is the answer, its end of turn included.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from farflock.node.tokens.json_tokenizer import END_NAMES, MAX_FILE_BYTES, JsonTokenizer
from farflock.node.tokens.tokenizer import BadTokenizer, Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer as FastTokenizer

MAX_TEMPLATE_CHARS = 1 << 20
ASKER, ANSWERER = "user", "assistant"  # the roles of a prompt and of its answer
TEMPLATE_NAME, ABOUT_NAME = "chat_template.jinja", "tokenizer_config.json"
_REMEDY = "name another file with --chat-template, or leave out --chat"

Messages = Sequence[Mapping[str, str]]  # each with a `role` and a `content`
# Of several texts, the ids of each.
EncodeTexts = Callable[[Sequence[str]], Iterable[Sequence[int] | NDArray[np.generic]]]


class BadChat(ValueError):
    """A chat that cannot be written as the model's template wants it; the message names the
    remedy."""


class _AboutTokenizer(msgspec.Struct):
    chat_template: str | None = None  # older files may have a list of named ones, which is refused


class ChatFormat(msgspec.Struct, frozen=True):
    """The way in which a conversation becomes text: by a `template`, which may write the names of
    the tokens that begin and end a text. Without a template a prompt and its completion are joined
    as they are."""

    template: str | None = None
    begin_name: str = ""
    end_name: str = ""

    def text(self, messages: Messages, asks: bool = True) -> str:
        """Return the text of messages; `asks` adds what comes before an answer. Raise `BadChat` if
        there is no template, or if it refuses them."""
        if self.template is None:
            raise BadChat("messages need a template; name a file with --chat-template")
        names = {"bos_token": self.begin_name, "eos_token": self.end_name}
        return rendered(self.template, messages, names, asks)


class Turns(msgspec.Struct, frozen=True):
    """The text of a conversation, in pieces: a prompt, its answer, the next prompt, and so on. The
    last piece is an answer."""

    texts: tuple[str, ...]

    def __len__(self) -> int:
        return sum(map(len, self.texts))


class TurnTokens(NamedTuple):
    """The ids of a conversation (n,), and which of them are of answers (n,)."""

    ids: NDArray[np.uint32]
    is_answer: NDArray[np.bool_]


def chat_tokens(tokenizer: Tokenizer, template: str | None, messages: Messages) -> list[int]:
    """Return the tokens of a chat up to the place where the model answers, as `apply_chat_template`
    of transformers does. A message has a `role` and a `content`; names of special tokens stand for
    these tokens. Raise `BadChat` if there is no template, or if it refuses the messages."""
    if template is None:
        raise BadChat(
            "the checkpoint has no chat template, so its model was probably not trained for chats; "
            "name a file with --chat-template, or leave out --chat"
        )
    chat = chat_format(tokenizer, template)
    (found,) = text_encoder(tokenizer, chat)([chat.text(messages)])
    return [int(token) for token in found]


def conversation_tokens(
    tokenizer: Tokenizer, template: str | None, messages: Messages
) -> TurnTokens:
    """Return the tokens of a conversation up to its last answer. Raise `BadChat` if there is no
    template, or if it refuses the messages or writes them so that answers cannot be told apart."""
    chat = chat_format(tokenizer, template)
    (found,) = turn_tokens(text_encoder(tokenizer, chat), [turns_of(chat, messages)])
    return found


def chat_format(tokenizer: Tokenizer, template: str | None) -> ChatFormat:
    """Return the format of this template with the tokenizer's names; raise `BadChat` if the tokens
    are bytes, and there is a template."""
    if template is None:
        return ChatFormat()
    if not isinstance(tokenizer, JsonTokenizer):
        raise BadChat(
            "the model's tokens are bytes, which have no turns of a chat; leave out --chat"
        )
    return ChatFormat(template, tokenizer.begin_name or "", tokenizer.end_name)


def turns_of(chat: ChatFormat, messages: Messages) -> Turns:
    """Return the text of messages up to the last answer, of those after which the model would
    answer and of the answers in turn; no text if there is no answer. Raise `BadChat` as
    `conversation_tokens` does."""
    texts, before = list[str](), ""
    for place, message in enumerate(messages):
        if message["role"] != ANSWERER:
            continue
        for some, asks in ((messages[:place], True), (messages[: place + 1], False)):
            text = chat.text(some, asks)
            if not text.startswith(before):
                raise BadChat(
                    "the chat template changes what it has written once more follows (at message"
                    f" {place + 1}), so the answers cannot be told from the rest; name another file"
                    " with --chat-template, or write a conversation for each answer"
                )
            texts.append(text[len(before) :])
            before = text
    return Turns(tuple(texts))


def pair_turns(chat: ChatFormat, prompt: str, completion: str) -> Turns:
    """Return the text of a prompt and its completion: with a template, of two messages; raise
    `BadChat` as `conversation_tokens` does."""
    if chat.template is None:
        return Turns((prompt, completion))
    pair = ((ASKER, prompt), (ANSWERER, completion))
    return turns_of(chat, [{"role": role, "content": content} for role, content in pair])


def turn_tokens(encode: EncodeTexts, conversations: Sequence[Turns]) -> list[TurnTokens]:
    """Return the tokens of several conversations.

    A prompt ends where it ends when a model has to answer it: it has the tokens of its own text,
    and no token reaches into the answer. Each later text has those that it adds to the text before
    it, so that what a tokenizer does only at the beginning is not done again; or else, where both
    together begin with other tokens than the text before alone, its own."""
    encoded = iter(encode([text for each in conversations for text in _asked_for(each)]))
    return [_put_together(each, encoded) for each in conversations]


def _asked_for(turns: Turns) -> list[str]:
    """Return the texts alone, and each with the one before it."""
    return [*turns.texts, *(before + text for before, text in pairwise(turns.texts))]


def _put_together(
    turns: Turns, encoded: Iterator[Sequence[int] | NDArray[np.generic]]
) -> TurnTokens:
    alone, both = (
        [np.asarray(next(encoded), dtype=np.uint32) for _ in range(count)]
        for count in (len(turns.texts), max(len(turns.texts) - 1, 0))
    )
    pieces = alone[:1]
    for before, own, joined in zip(alone[:-1], alone[1:], both, strict=True):
        goes_on = np.array_equal(joined[: len(before)], before)
        pieces.append(joined[len(before) :] if goes_on else own)
    nothing = np.zeros(0, dtype=np.uint32)
    return TurnTokens(
        np.concatenate([nothing, *pieces]),
        np.repeat(np.arange(len(pieces)) % 2 == 1, [len(piece) for piece in pieces]),
    )


def text_encoder(tokenizer: Tokenizer, chat: ChatFormat) -> EncodeTexts:
    """Return the function that tokenizes texts of this format. In those of a template, names of
    special tokens stand for these tokens."""
    if chat.template is None:
        return tokenizer.encode_batch
    assert isinstance(tokenizer, JsonTokenizer), "`chat_format` refuses a template for bytes"
    fast = _with_special(tokenizer)

    def encoded(texts: Sequence[str]) -> list[list[int]]:
        try:
            found = fast.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library has no class of its own
            raise BadTokenizer(
                f"cannot tokenize these chats ({str(error)[:200]}); use another tokenizer"
            ) from None
        return [each.ids for each in found]

    return encoded


def rendered(template: str, messages: Messages, names: Mapping[str, str], asks: bool = True) -> str:
    """Return the text of a chat; raise `BadChat` for a template that fails."""
    import jinja2

    if len(template) > MAX_TEMPLATE_CHARS:
        raise BadChat(
            f"the chat template has {len(template):,} characters, and at most "
            f"{MAX_TEMPLATE_CHARS:,} are read; {_REMEDY}"
        )
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages], add_generation_prompt=asks, **names
        )
    except (jinja2.TemplateError, *_FAILURES) as error:
        what = " ".join(str(error).split())[:200]
        raise BadChat(f"the chat template fails ({what}); {_REMEDY}") from None


# What operators and filters raise, such as for a sum of a text and a number.
_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, AttributeError)


@functools.lru_cache(maxsize=2)
def _compiled(template: str) -> "Template":
    return _environment().from_string(template)


def _environment() -> "ImmutableSandboxedEnvironment":
    """Return the environment that authors of templates expect: that of transformers, without its
    clock."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag with which authors say what a model generates: its content is written."""

        tags = {"generation"}  # noqa: RUF012 - jinja's

        def parse(self, parser: "Parser") -> "list[Node]":
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(why: object) -> NoReturn:
        raise jinja2.TemplateError(str(why))

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    made.globals["raise_exception"] = refuse
    made.filters["tojson"] = _json_text
    return made


def _json_text(value: object, indent: int | None = None) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter writes."""
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)


# where templates are


def template_among(files: Mapping[str, bytes], origin: str) -> str | None:
    """Return the template that small files have by their names, chat_template.jinja or else
    tokenizer_config.json; None if none of them has one. Raise `BadChat` for anything else there."""
    try:
        raw = files.get(TEMPLATE_NAME)
        if raw is not None:
            return raw.decode()
        said = msgspec.json.decode(files.get(ABOUT_NAME, b"{}"), type=_AboutTokenizer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadChat(
            f"the chat template of {origin} cannot be read ({str(error)[:200]}); "
            "name a file with --chat-template"
        ) from None
    return said.chat_template


def template_beside(tokenizer: Path) -> str | None:
    """Return the template in a tokenizer's folder, or in that of its file; raise `BadChat` for one
    that cannot be read."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    there = (folder / name for name in (TEMPLATE_NAME, ABOUT_NAME))
    files = {path.name: _read(path, MAX_FILE_BYTES) for path in there if path.is_file()}
    return template_among(files, str(folder))


def read_template(path: Path) -> str:
    """Return the template in a file; raise `BadChat` if it is not a text."""
    raw = _read(path, 4 * MAX_TEMPLATE_CHARS)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadChat(f"{path} is no text ({error}); name a chat_template.jinja") from None


def _read(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise BadChat(f"{path} has more than {limit:,} bytes; name a file with --chat-template")
    return raw


# tokens


def turn_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a model's turn: the end of a text, and the usual special ones."""
    if not isinstance(tokenizer, JsonTokenizer):
        return (tokenizer.end_of_text,)
    special = {
        token.content: place
        for place, token in _with_special(tokenizer).get_added_tokens_decoder().items()
        if token.special
    }
    return (tokenizer.end_of_text, *(special[name] for name in END_NAMES if name in special))


def _with_special(tokenizer: JsonTokenizer) -> "FastTokenizer":
    """Return the tokenizer as its library has it: what is spelled like a special token is one."""
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_str(tokenizer.raw.decode())  # it could be parsed before
    fast.no_truncation()
    fast.no_padding()
    return fast
