"""Documents of conversations: JSON, one a line, of which the loss will count the answers.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
    {"prompt": "…", "completion": "…"}

A document is the tokens of a conversation up to its last answer, all but the answers with a mark
(node/tokens/marks.py), and the end of text, which counts: it is where the model has to stop.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from farflock.node.data.documents import (
    MAX_DOCUMENT_CHARS,
    BadLine,
    Part,
    ReadingOptions,
    decoded_line,
    line_parts,
)
from farflock.node.data.sources import SourceFile
from farflock.node.errors import Usage
from farflock.node.tokens.chat import (
    ANSWERER,
    BadChat,
    ChatFormat,
    Turns,
    TurnTokens,
    pair_turns,
    text_encoder,
    turn_tokens,
    turns_of,
)
from farflock.node.tokens.marks import marked
from farflock.node.tokens.tokenizer import Tokenizer

MAX_MESSAGES = 1024  # of a conversation: for each answer, a template writes all before it again
_WHY = "it is no conversation"
_REMEDY = "write messages, each with a role and a content, or a prompt and a completion"


class _Message(msgspec.Struct):
    role: str
    content: str


class _Line(msgspec.Struct):
    messages: Annotated[list[_Message], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    prompt: str | None = None
    completion: str | None = None


_DECODER = msgspec.json.Decoder(_Line)


def read_conversations(file: SourceFile, options: ReadingOptions) -> Iterator[Part]:
    """Yield the conversations of a file; raise `BadDocuments` where one cannot be read, unless
    those are to be skipped."""
    assert isinstance(options.chat, ChatFormat), "the options have a format of conversations"
    assert file.kind == "lines", "`require_conversations` refuses the others"
    return line_parts(file, options, partial(_parts, options.chat))


def require_conversations(files: Iterable[SourceFile]) -> None:
    """Raise `Usage` for a file that cannot have conversations."""
    for file in files:
        if file.kind != "lines":
            raise Usage(
                file.path,
                "it has no conversations",
                "name files of JSON lines (.jsonl, also .gz and .zst), or leave out --chat",
            )


def _parts(chat: ChatFormat, line: bytes, read_bytes: int) -> Iterator[Part]:
    said = decoded_line(_DECODER, line, _WHY, _REMEDY)
    try:
        turns = _turns(chat, said)
    except BadChat as error:
        raise BadLine(str(error)) from None
    if not any(turns.texts[1::2]):
        raise BadLine(f"it has no answer; write one, as a message of the role {ANSWERER!r}")
    if len(turns) > MAX_DOCUMENT_CHARS:
        raise BadLine(
            f"it has {len(turns):,} characters, and a conversation at most"
            f" {MAX_DOCUMENT_CHARS:,}; cut it"
        )
    yield Part(turns, read_bytes)


def _turns(chat: ChatFormat, said: _Line) -> Turns:
    if said.messages is not None:  # some data have the first prompt beside them
        return turns_of(chat, [asdict(message) for message in said.messages])
    if said.prompt is None or said.completion is None:
        raise BadLine(f"{_WHY}; {_REMEDY}")
    return pair_turns(chat, said.prompt, said.completion)


class ConversationTokenizer:
    """Turns conversations into documents of this format: tokens with marks, without the end of
    text."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat) -> None:
        self._tokenizer, self._encode = tokenizer, text_encoder(tokenizer, chat)

    def encode_batch(self, conversations: Sequence[Turns]) -> list[NDArray[np.uint32]]:
        """Return the tokens of each conversation."""
        found = turn_tokens(self._encode, conversations)
        return [without_ends(each, self._tokenizer) for each in found]


def without_ends(tokens: TurnTokens, tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """Return a conversation with marks, in which no end of text counts, since only the one that
    follows it may end a document.

    Some templates end each turn with the end of text. At the end of the last answer it is the
    document's own, and is cut off with the white space behind it. Others get a mark."""
    ids, counted = tokens.ids, tokens.is_answer.copy()
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    is_last = len(ends) > 0 and counted[ends[-1]]
    if is_last and not tokenizer.decode(ids[ends[-1] :].tolist()).strip():
        ids, counted, ends = ids[: ends[-1]], counted[: ends[-1]], ends[:-1]
    counted[ends] = False
    return marked(ids, counted)
