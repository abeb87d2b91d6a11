"""The sources that a user names, as a list of files in a fixed order.

A source is `[NAME=]PATH`. PATH is a file, a folder of files, a folder written by the `save_to_disk`
of Hugging Face's `datasets`, `hf:NAME` or `hf:NAME:CONFIG` on their hub, or the word `shakespeare`
for the plays that come with Farflock. Sources with one NAME are one source, in the order in which
they were named.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from farflock.node.data.index import MAX_SOURCES, SourceName
from farflock.node.errors import Usage
from farflock.node.model.corpus import SHIPPED

DEFAULT_SOURCE = "text"
TEXT_ENDINGS = (".txt", ".md", ".rst")
PACKED_ENDINGS = (".gz", ".zst")
HUB_PREFIX = "hf:"

FileKind = Literal["text", "lines", "parquet", "arrow", "tokens", "hub", "shipped"]
_ENDINGS: dict[str, FileKind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".bin": "tokens",
    ".ds": "tokens",
}
_SAVED, _SAVED_SPLITS = "dataset_info.json", "dataset_dict.json"
# How many bytes of text a byte of a file holds, roughly.
_PACKED, _PARQUET = 4, 3
_NAME = msgspec.json.Decoder(SourceName)


class SourceFile(msgspec.Struct, frozen=True):
    """One file of a source, as it was found. `path` is absolute, or a name on the hub, or that of
    the shipped plays, which have no `changed_ns`."""

    source: str
    path: str
    kind: FileKind
    size: int = 0  # bytes
    changed_ns: int = 0

    @property
    def packing(self) -> str:
        """The ending of the compression, or an empty string."""
        ending = Path(self.path).suffix.lower()
        return ending if self.kind in ("text", "lines") and ending in PACKED_ENDINGS else ""

    @property
    def text_bytes(self) -> int:
        """A guess at the bytes of text in it."""
        if self.packing:
            return self.size * _PACKED
        return self.size * _PARQUET if self.kind == "parquet" else self.size


class FoundFiles(msgspec.Struct, frozen=True):
    """The files to read, in order, and how many others of each ending are left alone."""

    files: tuple[SourceFile, ...]
    ignored: dict[str, int]


def find_files(
    named: Sequence[str], text_endings: Sequence[str] = TEXT_ENDINGS, split: str = "train"
) -> FoundFiles:
    """Return the files of all sources; raise `Usage` for a path without any, or too many
    sources."""
    files, ignored = list[SourceFile](), Counter[str]()
    endings = dict(_ENDINGS)
    endings.update((each.lower(), "text") for each in text_endings)
    for argument in named:
        source, place = named_source(argument)
        found = list(_of_one(source, place, endings, split, ignored))
        if not found:
            raise Usage(place, "there is no file to read", f"{_known(endings)}, or --text-endings")
        files += found
    if len({file.source for file in files}) > MAX_SOURCES:
        raise Usage("SOURCE", f"more than {MAX_SOURCES} different names", "use fewer names")
    return FoundFiles(tuple(files), dict(sorted(ignored.items())))


def named_source(argument: str) -> tuple[str, str]:
    """Return the name and the path of `[NAME=]PATH`; raise `Usage` for a wrong name."""
    name, equals, place = argument.partition("=")
    if not equals or "/" in name or os.path.lexists(argument):
        return DEFAULT_SOURCE, argument
    try:
        _NAME.decode(msgspec.json.encode(name))
    except msgspec.ValidationError:
        raise Usage(
            f"the name {name[:40]!r} of a source",
            "it may have 1 to 32 of the characters a-z, 0-9, _ and -, the first of them no sign",
            "write NAME=PATH",
        ) from None
    return name, place


def _of_one(
    source: str, place: str, endings: dict[str, FileKind], split: str, ignored: Counter[str]
) -> Iterator[SourceFile]:
    if place == SHIPPED:
        yield SourceFile(source, SHIPPED, "shipped", 5_000_000)
        return
    if place.startswith(HUB_PREFIX):
        from farflock.node.data.columns import hub_size

        yield SourceFile(source, place, "hub", hub_size(place, split))
        return
    path = Path(place).expanduser().absolute()
    if path.is_dir():
        if (path / _SAVED_SPLITS).is_file():
            path = _split_of(path, split)
        saved = (path / _SAVED).is_file()
        yield from _saved(source, path) if saved else _below(source, path, endings, ignored)
        return
    if (kind := _kind(path.name, endings)) is None and path.is_file():
        raise Usage(place, "it has an unknown ending", f"{_known(endings)}, or --text-endings")
    yield _file(source, path, kind or "text")


def _file(source: str, path: Path, kind: FileKind) -> SourceFile:
    try:
        found = path.stat()
    except OSError as error:
        raise Usage(str(path), str(error.strerror), "check the path of the source") from None
    if not stat.S_ISREG(found.st_mode):
        raise Usage(str(path), "it is neither a file nor a folder", "name one of them")
    return SourceFile(source, str(path), kind, found.st_size, found.st_mtime_ns)


def _below(
    source: str, folder: Path, endings: dict[str, FileKind], ignored: Counter[str]
) -> Iterator[SourceFile]:
    """Yield the files below a folder, by the bytes of their relative paths. Hidden ones are left
    out, and so is what a link fetches from elsewhere."""
    inside = folder.resolve()
    for path in sorted(_walked(folder), key=lambda path: os.fsencode(path.relative_to(folder))):
        if not path.is_file() or not path.resolve().is_relative_to(inside):
            continue
        if (kind := _kind(path.name, endings)) is not None:
            yield _file(source, path, kind)
        else:
            ignored[path.suffix.lower() or "no ending"] += 1


def _walked(folder: Path) -> Iterator[Path]:
    def refused(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=refused):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _kind(name: str, endings: dict[str, FileKind]) -> FileKind | None:
    name = name.lower()
    for packed in PACKED_ENDINGS:
        if name.endswith(packed):
            kind = endings.get(Path(name.removesuffix(packed)).suffix)
            return kind if kind in ("text", "lines") else None
    return endings.get(Path(name).suffix)


def _split_of(folder: Path, split: str) -> Path:
    try:
        splits = msgspec.json.decode(
            (folder / _SAVED_SPLITS).read_bytes(), type=dict[str, list[str]]
        )["splits"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        raise Usage(str(folder), f"{_SAVED_SPLITS} does not list splits", "save it again") from None
    if split not in splits:
        shown = ", ".join(splits)[:200]
        raise Usage(str(folder), f"it has no split {split!r}", f"choose --split from {shown}")
    return folder / split


class _DataFile(msgspec.Struct):
    filename: str


class _SavedState(msgspec.Struct):
    files: list[_DataFile] = msgspec.field(name="_data_files")


def _saved(source: str, folder: Path) -> Iterator[SourceFile]:
    """Yield the files of a folder that `datasets` saved, in its order."""
    try:
        state = msgspec.json.decode((folder / "state.json").read_bytes(), type=_SavedState)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Usage(
            str(folder), f"it has no usable state.json ({error})", "save it again"
        ) from None
    for each in state.files:
        if Path(each.filename).name != each.filename:
            raise Usage(str(folder), f"it names {each.filename[:80]!r}", "save it again")
        yield _file(source, folder / each.filename, "arrow")


def _known(endings: dict[str, FileKind]) -> str:
    return f"name files that end in {', '.join(endings)}"
