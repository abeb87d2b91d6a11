"""The documents of files, in bounded memory whatever the files hold.

A text is one document, and so is the field of each JSON line, and of each row of a table. A text of
more than 1 MiB is cut into passages, which count as documents of their own. All text is UTF-8 from
here on; a file of UTF-16 says so in its first bytes.
"""

import codecs
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from farflock.node.data.sources import SourceFile
from farflock.node.data.tables import BadTable, read_rows

PASSAGE_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20  # of JSON
_READ_BYTES = 1 << 20
_WHITE = (b" ", b"\n", b"\t", b"\r", b"\v", b"\f")
_MARKS = (  # in front of a text, longest first
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, ""),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class BadDocuments(ValueError):
    """A document that cannot be read, or a file that changed; the message names the place and the
    remedy."""


class Passage(msgspec.Struct, frozen=True):
    """A passage of a document: its UTF-8, its number among all, and how far the file is read.

    In place of a document that cannot be read, `fault` says why, with the place."""

    raw: bytes
    number: int
    read_bytes: int
    fault: str = ""


def read_documents(file: SourceFile, field: str) -> Iterator[Passage]:
    """Yield the passages of a file's documents that are not empty; `field` names the text in a line
    of JSON or a row, with dots between nested names. Raise `BadDocuments` for a file that is
    written to."""
    if file.kind == "text":
        yield from _text(file)
    else:
        yield from _lines_of(file, field) if file.kind == "lines" else _rows_of(file, field)
    found = os.stat(file.path)
    if (found.st_size, found.st_mtime_ns) != (file.size, file.changed_ns):
        raise BadDocuments(
            f"{file.path} was changed while it was read; wait until nobody writes it, and begin "
            "again"
        )


def cut_passages(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a text in passages of at most 1 MiB. Each ends before the last white space that fits,
    or else at a character; how the text is split into blocks does not matter."""
    held = b""
    for block in blocks:
        text, start = held + block, 0
        while len(text) - start > PASSAGE_BYTES:
            end = _end_of_passage(text, start)
            yield text[start:end]
            start = end
        held = text[start:]
    if held:
        yield held


def _end_of_passage(text: bytes, start: int) -> int:
    limit = start + PASSAGE_BYTES
    end = max(text.rfind(white, start + 1, limit) for white in _WHITE)
    if end > start:
        return end
    while text[limit] & 0xC0 == 0x80 and limit > start + PASSAGE_BYTES - 3:
        limit -= 1  # inside of a character
    return limit


def _text(file: SourceFile) -> Iterator[Passage]:
    """Yield a text's passages, once all of it proves to be text."""
    read = _Reading(file)
    try:
        if file.size > _READ_BYTES:
            for _ in read.checked():
                pass
        for number, raw in enumerate(cut_passages(read.checked())):
            yield Passage(raw, number, read.read_bytes)
    except UnicodeError as error:
        why = f"{file.path} is not UTF-8 ({error})"
        yield Passage(b"", 0, file.size, f"{why}; convert it")


def _lines_of(file: SourceFile, field: str) -> Iterator[Passage]:
    text_in, read = _field_reader(field), _Reading(file)
    number = 0
    try:
        for number, line in enumerate(_lines(read.blocks()), 1):
            if line is not None and not line.strip():
                continue
            try:
                text = text_in(_whole(line))
            except _BadLine as error:
                fault = f"{file.path}, line {number:,}: {error}"
                yield Passage(b"", 0, read.read_bytes, fault)
                continue
            for place, raw in enumerate(cut_passages([text])):
                yield Passage(raw, place, read.read_bytes)
    except UnicodeError as error:  # of a file that says that it is UTF-16
        fault = f"{file.path} is cut or damaged after line {number:,} ({error}); copy it again"
        yield Passage(b"", 0, file.size, fault)


def _rows_of(file: SourceFile, field: str) -> Iterator[Passage]:
    try:
        for number, row in enumerate(read_rows(file, field), 1):
            if row.text is None:
                fault = f"{file.path}, row {number:,}: {row.fault}"
                yield Passage(b"", 0, row.read_bytes, fault)
                continue
            for place, raw in enumerate(cut_passages([row.text])):
                yield Passage(raw, place, row.read_bytes)
    except BadTable as error:
        yield Passage(b"", 0, file.size, f"{file.path}: {error}")


class _BadLine(ValueError):
    """A line that gives no document; the message says why, and the remedy."""


def _whole(line: bytes | None) -> bytes:
    if line is None:
        raise _BadLine(f"it is longer than {MAX_LINE_BYTES >> 20} MiB; cut the document")
    return line


def _field_reader(field: str) -> Callable[[bytes], bytes]:
    """Return the function that finds the text in a line; it passes over all other members."""
    kind: type = str
    names = field.split(".")
    for name in reversed(names):
        kind = msgspec.defstruct("Line", [("value", kind)], rename={"value": name})
    decoder: msgspec.json.Decoder[msgspec.Struct] = msgspec.json.Decoder(kind)

    def text_in(line: bytes) -> bytes:
        try:
            found: object = decoder.decode(line)
            for _ in names:
                found = getattr(found, "value")  # noqa: B009 - the type is made from the names
            assert isinstance(found, str)
            return found.encode()
        except msgspec.ValidationError as error:
            raise _BadLine(
                f"it has no text in the field {field!r} ({error}); name another with --field"
            ) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise _BadLine(f"it is not JSON ({error}); correct the line") from None

    return text_in


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of a text, and None for one that is too long. They end with a line feed, or
    where a file has none, with a carriage return, which JSON has nowhere else."""
    feed, held, size = b"", list[bytes](), 0
    for block in blocks:
        if not feed:
            feed = b"\n" if b"\n" in block else b"\r" if b"\r" in block else b""
        *ended, rest = block.split(feed or b"\n")
        for piece in ended:
            size += len(piece)
            yield b"".join([*held, piece]) if size <= MAX_LINE_BYTES else None
            held, size = [], 0
        size += len(rest)
        held = [*held, rest] if size <= MAX_LINE_BYTES else []
    if size:
        yield b"".join(held) if size <= MAX_LINE_BYTES else None


class _Reading:
    """A file that is read in blocks of UTF-8."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self.read_bytes = 0

    def blocks(self) -> Iterator[bytes]:
        """Yield what the file holds, without the mark in front; raise `UnicodeError` if it is not
        in the encoding that the mark says."""
        with Path(self._file.path).open("rb") as stream:
            first = stream.read(_READ_BYTES)
            self.read_bytes = len(first)
            mark, name = next((each for each in _MARKS if first.startswith(each[0])), (b"", ""))
            rest = chain([first], iter(lambda: stream.read(_READ_BYTES), b""))
            decoder = codecs.getincrementaldecoder(name)() if name else None
            for block in rest:
                self.read_bytes = min(stream.tell(), self._file.size)
                if decoder is not None:
                    yield decoder.decode(block).encode()
                else:
                    yield block[len(mark) :] if block is first else block
            if decoder is not None:
                decoder.decode(b"", final=True)

    def checked(self) -> Iterator[bytes]:
        """Yield the blocks; raise `UnicodeError` where they are not UTF-8."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        for block in self.blocks():
            decoder.decode(block)
            yield block
        decoder.decode(b"", final=True)
