"""A prepared folder as it is on the disk: what its index says, and whether its files are whole."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from farflock.node.data.index import (
    INDEX_NAME,
    PIECE_BYTES,
    BadIndex,
    DataIndex,
    DataPage,
    DataShard,
    DataSource,
    ListedFile,
    listed,
    read_index,
    read_page,
    require_sizes,
    root_of,
)


class FolderContent:
    """The index and the pages of a folder; raise `BadIndex` if one is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        raw = _read(folder / INDEX_NAME)
        self.root = root_of(raw)
        self.index: DataIndex = read_index(raw, str(folder / INDEX_NAME))
        self.index_bytes = len(raw)
        self.shards: dict[str, tuple[DataShard, ...]] = {
            name: tuple(shard for page in source.pages for shard in self._page(page))
            for name, source in self.index.sources.items()
        }
        for source in self.index.sources.values():
            require_sizes(source.held_out, self.index)

    @property
    def bytes(self) -> int:
        """The bytes of all files that the index lists, and its own."""
        return self.index_bytes + sum(file.size for _, file in self._files())

    def answer_tokens(self) -> int:
        """Return how many of the tokens that are trained on count in the loss, all of them if none
        has a mark; raise `BadIndex` if a shard is missing or is not as long as the index says."""
        shards = [shard for each in self.shards.values() for shard in each]
        if not self.index.counts_answers:
            return sum(shard.tokens for shard in shards)
        return sum(_without_mark(self.folder / shard.name, shard) for shard in shards)

    def verify(self, progress: Callable[[float], None]) -> int:
        """Compare every file with its hashes and return how many there are; raise `BadIndex` for
        the first that is missing or damaged."""
        files = list(self._files())
        total, done = sum(file.size for _, file in files), 0
        for name, file in files:
            _require_whole(self.folder / name, file)
            done += file.size
            progress(done / total)
        return len(files)

    def _page(self, page: DataPage) -> tuple[DataShard, ...]:
        _require_whole(self.folder / page.name, page)
        return read_page(_read(self.folder / page.name), page, self.index)

    def _files(self) -> Iterator[tuple[str, ListedFile]]:
        if self.index.tokenizer is not None:
            yield self.index.tokenizer.name, self.index.tokenizer
        for name, source in self.index.sources.items():
            for page in source.pages:
                yield page.name, page
            for shard in (*self.shards[name], *source.held_out):
                yield shard.name, shard


def held_out_tokens(source: DataSource) -> int:
    """Return how many tokens of a source are held out."""
    return sum(shard.tokens for shard in source.held_out)


def _without_mark(path: Path, shard: DataShard) -> int:
    found = size = 0
    try:
        with path.open("rb") as file:
            while raw := file.read(PIECE_BYTES):
                found += int((np.frombuffer(raw[: len(raw) // 4 * 4], "<i4") >= 0).sum())
                size += len(raw)
    except OSError as error:
        raise _unreadable(path, error) from None
    if size != shard.size:
        raise _not_listed(path)
    return found


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(PIECE_BYTES + 1)
    except OSError as error:
        raise BadIndex(
            f"{path} cannot be read ({error.strerror}); name a folder that `farflock data prepare`"
            " made"
        ) from None


def _require_whole(path: Path, file: ListedFile) -> None:
    try:
        size = path.stat().st_size
        found = listed(path) if size == file.size else None
    except OSError as error:
        raise _unreadable(path, error) from None
    if found is None or (found.sha256, found.pieces) != (file.sha256, file.pieces):
        raise _not_listed(path)


def _unreadable(path: Path, error: OSError) -> BadIndex:
    return BadIndex(
        f"{path} cannot be read ({error.strerror}); copy it again, or prepare the data again"
    )


def _not_listed(path: Path) -> BadIndex:
    return BadIndex(
        f"{path} is not the file that the index lists; copy it again, or prepare the data again"
    )
