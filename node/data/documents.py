"""Documents of files, in order and in bounded memory: plain text, and JSON, an object a line.

columns.py reads tables, conversations.py chats, token_files.py what others have tokenized already.
A file is input that may be damaged or hostile: sizes are bounded, and each complaint names the
place.
"""

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import msgspec

from farflock.node.data.sources import SourceFile
from farflock.node.tokens.chat import ChatFormat, Turns
from farflock.node.tokens.tokenizer import TokenIds

PART_CHARS = 1 << 20  # longer documents are tokenized in parts, cut at the ends of lines
MAX_DOCUMENT_CHARS = 64 << 20  # of text, or tokens: what is longer becomes several documents
MAX_LINE_BYTES = 32 << 20  # of JSON
_READ_BYTES = 8192  # of compressed data at a time: these may hold thousands of times as many
_MARK = b"\xef\xbb\xbf"  # U+FEFF, which some editors write in front of a text

_SKIP = "or leave such documents out with --errors skip"
ContentT = TypeVar("ContentT", str, TokenIds)
LineT = TypeVar("LineT", bound=msgspec.Struct)


class BadDocuments(ValueError):
    """A file whose documents cannot be read; the message names the place and the remedy."""


class ReadingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which files are read. `field` is the member or column with the text, with dots
    between the names of nested ones; `skip` leaves out what cannot be read. Tokens of others take
    `token_bytes` bytes each, are below `vocabulary`, and may have `end_of_text` between
    documents. With `chat` the documents are conversations, of which the loss counts the answers."""

    field: str = "text"
    skip: bool = False
    split: str = "train"
    token_bytes: int = 2
    vocabulary: int = 256
    end_of_text: int = 255
    chat: ChatFormat | msgspec.UnsetType = msgspec.UNSET

    @property
    def has_marks(self) -> bool:
        """True if the loss leaves out some of the tokens."""
        return self.chat is not msgspec.UNSET


class Part(msgspec.Struct, frozen=True):
    """A document, or a part of a long one: text, or tokens; or a whole conversation; None if it
    could not be read.

    `read_bytes` says how far its file has been read; `last` that the document ends with it.
    `held_out` is known for a document of a text that fixes what is held out."""

    content: str | TokenIds | Turns | None
    read_bytes: int
    last: bool = True
    held_out: bool | None = None


def read_documents(file: SourceFile, options: ReadingOptions) -> Iterator[Part]:
    """Yield the documents of a file that are not empty; raise `BadDocuments` where one cannot be
    read, unless those are to be skipped."""
    if options.has_marks:
        from farflock.node.data.conversations import read_conversations

        return read_conversations(file, options)
    if file.kind == "text":
        return _text(file, options)
    if file.kind == "lines":
        return _json_lines(file, options)
    if file.kind == "shipped":
        return _plays()
    if file.kind == "tokens":
        from farflock.node.data.token_files import read_token_file

        return read_token_file(file, options)
    from farflock.node.data.columns import read_columns

    return read_columns(file, options)


def parts_of(
    pieces: Iterable[tuple[ContentT, int]], held_out: bool | None = None
) -> Iterator[Part]:
    """Yield a document's pieces, each with how far its file was read, as parts; the limit of a
    document cuts one that is longer."""
    size, before = 0, None
    for content, at in pieces:
        if before is not None:
            full = size + len(content) > MAX_DOCUMENT_CHARS
            yield Part(*before, last=full, held_out=held_out)
            size = 0 if full else size
        size += len(content)
        before = (content, at)
    if before is not None:
        yield Part(*before, held_out=held_out)


def text_parts(text: str, read_bytes: int, held_out: bool | None = None) -> Iterator[Part]:
    """Yield a text that is in memory; nothing if it is empty."""
    return parts_of(_pieces(text, read_bytes), held_out) if text else iter(())


def refused_document(sentence: str, options: ReadingOptions, read_bytes: int) -> Part:
    """Return what stands for a document that cannot be read, or raise `BadDocuments`."""
    if options.skip:
        return Part(None, read_bytes)
    raise BadDocuments(f"{sentence}, {_SKIP}")


def _pieces(text: str, read_bytes: int) -> Iterator[tuple[str, int]]:
    start = 0
    while len(text) - start > PART_CHARS:
        end = start + PART_CHARS
        end = text.rfind("\n", start + PART_CHARS // 2, end) + 1 or end
        yield text[start:end], read_bytes
        start = end
    yield text[start:], read_bytes


def _text(file: SourceFile, options: ReadingOptions) -> Iterator[Part]:
    """Yield a file of UTF-8 as one document."""
    try:
        if options.skip:  # a long one is yielded in parts before its end is known
            with _opened(file) as (stream, raw):
                for _ in _decoded(file, stream, raw):
                    pass
        with _opened(file) as (stream, raw):
            yield from parts_of(_decoded(file, stream, raw))
    except UnicodeDecodeError as error:
        yield refused_document(
            f"{file.path} is not UTF-8 at byte {error.start:,}; convert it", options, file.size
        )


def _decoded(file: SourceFile, stream: BinaryIO, raw: BinaryIO) -> Iterator[tuple[str, int]]:
    """Yield the text in pieces; raise `UnicodeDecodeError` with the place in the whole text."""
    start = 0
    for block in _blocks(stream):
        first = block.removeprefix(_MARK) if start == 0 else block
        try:
            text = first.decode()
        except UnicodeDecodeError as error:
            error.start += start + len(block) - len(first)
            raise
        start += len(block)
        if text:
            yield text, min(raw.tell(), file.size)


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield all bytes of a stream in blocks, cut at the ends of lines or at least of characters."""
    held = b""
    while block := stream.read(PART_CHARS):
        held += block
        if len(held) > PART_CHARS:
            cut = held.rfind(b"\n", len(held) // 2) + 1 or _last_character(held)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _last_character(raw: bytes) -> int:
    """Return where the last character of UTF-8 begins."""
    place = len(raw) - 1
    while raw[place] & 0xC0 == 0x80 and place > len(raw) - 4:
        place -= 1
    return place


def _json_lines(file: SourceFile, options: ReadingOptions) -> Iterator[Part]:
    decoder, names = msgspec.json.Decoder(_shape(options.field)), options.field.split(".")
    why, remedy = f"it has no text in the field {options.field!r}", "name another with --field"

    def parts(line: bytes, at: int) -> Iterator[Part]:
        found = decoded_line(decoder, line, why, remedy)
        for _ in names:
            found = getattr(found, "value")  # noqa: B009 - the type is made from the names
        assert isinstance(found, str)
        return text_parts(found, at)

    return line_parts(file, options, parts)


class BadLine(ValueError):
    """A line that gives no document; the message says why, and the remedy."""


def line_parts(
    file: SourceFile, options: ReadingOptions, parts: Callable[[bytes, int], Iterator[Part]]
) -> Iterator[Part]:
    """Yield the documents of a file with one in each line that is not blank: its `parts`, after so
    many bytes of the file. A line for which that raises `BadLine`, or which is too long, is
    refused."""
    with _opened(file) as (stream, raw):
        for number, line in enumerate(_lines(stream), 1):
            at = min(raw.tell(), file.size)
            line = line.removeprefix(_MARK) if line is not None and number == 1 else line
            if line is None or line.strip():
                try:
                    yield from parts(_whole(line), at)
                except BadLine as error:
                    place = f"{file.path}, line {number:,}"
                    yield refused_document(f"{place}: {error}", options, at)


def _whole(line: bytes | None) -> bytes:
    if line is None:
        raise BadLine(f"it is longer than {MAX_LINE_BYTES >> 20} MiB; cut the document")
    return line


def decoded_line(
    decoder: "msgspec.json.Decoder[LineT]", line: bytes, why: str, remedy: str
) -> LineT:
    """Return a line's JSON; raise `BadLine` for anything else, with this reason and remedy for JSON
    of another type."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise BadLine(f"{why} ({error}); {remedy}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"it is not JSON ({error}); correct the line") from None


def _shape(field: str) -> type[msgspec.Struct]:
    """Return a type with nothing but the field: all other members are passed over."""
    kind: type = str
    for name in reversed(field.split(".")):
        kind = msgspec.defstruct("Line", [("value", kind)], rename={"value": name})
    return kind


def _lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a stream, and None for one that is too long."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        yield None


@contextlib.contextmanager
def _opened(file: SourceFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file; yield the stream of its content, unpacked, and the file, whose place tells how
    far it was read."""
    with Path(file.path).open("rb") as raw:
        try:
            if file.packing == ".gz":
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield cast(BinaryIO, stream), raw
            elif file.packing == ".zst":
                yield cast(BinaryIO, io.BufferedReader(_Zstandard(raw), 1 << 16)), raw
            else:
                yield raw, raw
        except (EOFError, gzip.BadGzipFile, zlib.error, _BadZstandard) as error:
            raise BadDocuments(
                f"{file.path} cannot be unpacked ({error}); copy or pack it again"
            ) from None


class _BadZstandard(ValueError):
    """A file that Zstandard cannot unpack."""


class _Zstandard(io.RawIOBase):
    """The unpacked content of a file of Zstandard frames. The library's own reader takes a file
    that was cut short for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw, self._error = raw, zstandard.ZstdError
        self._make = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj
        self._frame, self._begun = self._make(), False
        self._packed, self._plain = b"", memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, target: "memoryview") -> int:  # type: ignore[override]
        """Fill a buffer with what comes next; return how many bytes, 0 at the end."""
        while not self._plain:
            self._packed = self._packed or self._raw.read(_READ_BYTES)
            if not self._packed:
                if self._begun:
                    raise EOFError("its end is missing")
                return 0
            self._unpack()
        count = min(len(target), len(self._plain))
        target[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _unpack(self) -> None:
        try:
            self._plain = memoryview(self._frame.decompress(self._packed))
        except self._error as error:
            raise _BadZstandard(str(error)) from None
        self._packed, self._begun = b"", True
        if self._frame.eof:
            self._packed = self._frame.unused_data
            self._frame, self._begun = self._make(), False


def _plays() -> Iterator[Part]:
    """Yield the shipped plays, a document each. They themselves say which are held out."""
    from importlib.resources import files

    from farflock.node.model.corpus import SHIPPED, About, load_corpus

    corpus = load_corpus(SHIPPED)
    raw = (files("farflock.node") / "texts" / "shakespeare.json").read_bytes()
    texts = {False: corpus.train.encode(), True: corpus.held_out.encode()}
    done = {False: 0, True: 0}
    for play in msgspec.json.decode(raw, type=About).plays:
        start = done[play.held_out]
        done[play.held_out] = start + play.size_bytes
        text = texts[play.held_out][start : done[play.held_out]].decode()
        yield from text_parts(text, sum(done.values()), play.held_out)
