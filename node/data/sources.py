"""The files that a user names: single ones, those of folders, and those that patterns match."""

import glob
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from farflock.node.errors import Usage

TEXT_ENDINGS = (
    ".txt",
    ".md",
)  # of files that are read in a folder, as lines of JSON and tables are
LINES_ENDINGS = (".jsonl", ".ndjson")
ROWS_ENDINGS = (".parquet", ".arrow")
_ENDINGS = (*TEXT_ENDINGS, *LINES_ENDINGS, *ROWS_ENDINGS)

FileKind = Literal["text", "lines", "rows"]


class SourceFile(msgspec.Struct, frozen=True):
    """A file as it was found: its absolute path, and whether it is one text, a JSON object a line,
    or a table."""

    path: str
    kind: FileKind
    size: int  # bytes
    changed_ns: int


class FoundFiles(msgspec.Struct, frozen=True):
    """The files to read, and how many others of each ending folders have."""

    files: tuple[SourceFile, ...]
    ignored: dict[str, int]


def find_files(named: Sequence[str]) -> FoundFiles:
    """Return the files that arguments name, each once; raise `Usage` for an argument that names
    none. In folders, files with unknown endings are left alone, and so are hidden ones."""
    found, ignored = dict[str, SourceFile](), Counter[str]()
    for argument in named:
        files = [file for path in _places(argument) for file in _at(path, ignored)]
        if not files:
            endings = ", ".join(_ENDINGS)
            raise Usage(argument, "there is no text in it", f"name files, or a folder of {endings}")
        found |= {os.path.realpath(file.path): file for file in files}
    return FoundFiles(tuple(found.values()), dict(sorted(ignored.items())))


def _places(argument: str) -> list[Path]:
    """Return the paths that an argument stands for: itself, or what its pattern matches."""
    path = Path(argument).expanduser().absolute()
    if os.path.lexists(path) or not glob.has_magic(argument):
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    return [match for match in matches if not match.is_dir()]


def _at(path: Path, ignored: Counter[str]) -> Iterator[SourceFile]:
    if path.is_dir():
        yield from _below(path, ignored)
    else:
        yield _file(path)  # whatever its ending: it was asked for


def _below(folder: Path, ignored: Counter[str]) -> Iterator[SourceFile]:
    """Yield the texts in a folder. Links are followed, into each folder once."""
    entered = set[tuple[int, int]]()
    for place, folders, names in os.walk(folder, onerror=_refused, followlinks=True):
        here = os.stat(place)
        if (here.st_dev, here.st_ino) in entered:
            folders.clear()  # a link in a circle
            continue
        entered.add((here.st_dev, here.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            ending = Path(name).suffix.lower()
            if ending not in _ENDINGS:
                ignored[ending or "no ending"] += 1
            elif (path := Path(place, name)).is_file():  # and no link to nowhere, or a pipe
                yield _file(path)


def _refused(error: OSError) -> None:
    raise error


def _file(path: Path) -> SourceFile:
    try:
        found = path.stat()
    except OSError as error:
        raise Usage(str(path), str(error.strerror), "check the path of the source") from None
    if not stat.S_ISREG(found.st_mode):
        raise Usage(str(path), "it is neither a file nor a folder", "name one of them")
    return SourceFile(str(path), _kind(path.suffix.lower()), found.st_size, found.st_mtime_ns)


def _kind(ending: str) -> FileKind:
    if ending in LINES_ENDINGS:
        return "lines"
    return "rows" if ending in ROWS_ENDINGS else "text"
