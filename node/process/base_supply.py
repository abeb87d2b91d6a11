"""The base of a run of adapters on its way to this machine.

A folder that the user names is used as it is if its weights are the run's, however they are split
and stored. Otherwise the founder's files come from members, piece by piece, into a cache beside
that of the data; when all are there, it is a folder that transformers reads. It counts for no limit
of the data's cache and nothing deletes it, because the run needs all of it for as long as it lasts.

Either way this node lends to others what it has of the founder's files.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from farflock.node.data.base_index import BaseIndex, BytesProgress, index_of, read_base_index
from farflock.node.data.index import AfterPiece, root_of
from farflock.node.data.local_data import LocalData, partial_of
from farflock.node.errors import Failure, RefusedByRun, explained
from farflock.node.model.hf_config import BadModelFolder
from farflock.node.model.llama import ModelConfig
from farflock.node.process.data_fetch import LOOK_EVERY_S, DataFetcher, NothingCame
from farflock.node.process.data_supply import INDEX_TIMEOUT_S
from farflock.node.process.network import MachineOptions
from farflock.node.run.model_section import ModelSection
from farflock.node.state.paths import NO_LINK
from farflock.node.state.weights_file import WeightsFolder
from farflock.swarm.chunks import Chunks
from farflock.swarm.compute import Worker
from farflock.swarm.links import PeerId

BASES = "bases"  # in the cache of the data, whose own folders are called after hashes
LEND_TIMEOUT_S = 10.0  # without any progress, before a node with a folder of its own lends nothing
T = TypeVar("T")
_LOCK = ".lock"
_GIVE = "name a folder of the model with --base"

log = logging.getLogger(__name__)


class BaseSupply:
    """The base of one run as this node gets it: weights of the shape `config` and with the hash
    `start`. `folders` are those that the user names."""

    def __init__(
        self, fetcher: DataFetcher, folders: Sequence[Path], config: ModelConfig, start: str
    ) -> None:
        self.fetcher, self.local = fetcher, fetcher.local
        self._folders, self._config, self._start = tuple(folders), config, start

    async def folder(self, progress: BytesProgress = lambda here, total: None) -> Path:
        """Return a folder whose weights are the run's, after downloading them if the user named
        none, and lend its files. `progress` is called with the bytes that are here.

        Raise `RefusedByRun` if a named folder has other weights, if there is nobody to ask, if
        nothing comes for too long, or if what came has other weights than the manifest says; and
        `Failure` if the disk is full. What has come stays for the next try."""
        if self._folders:
            named = await self._fitting()
            await self.lend(named)
            return named
        cache, index = self.local.cache, await self._index()
        if not await self._is_here(index):
            async with _alone(cache / _LOCK):
                await self._download(index, progress)
        return cache

    async def lend(self, folder: Path) -> None:
        """Lend to others what this machine has of the founder's files. `folder` is indexed if there
        is nobody who might have the index, as at a founder."""
        raw = await self.fetcher.work(self.local.index_bytes)
        if raw is None and self.fetcher.is_alone:
            raw = await self.fetcher.reading(partial(_index_of, folder, self.local.root))
        elif raw is None:
            with contextlib.suppress(NothingCame):
                raw = await self.fetcher.coming(self.fetcher.index_bytes(), LEND_TIMEOUT_S)
        if raw is None:
            log.info("the index of the run's base cannot be had; this node lends nothing of it")
            return
        await self._noted(raw, "the index of the base")

    async def _noted(self, raw: bytes, origin: str) -> BaseIndex:
        """Keep an index, and look which of its files are here."""
        index = read_base_index(raw, origin, self.local.root)
        await self.fetcher.work(partial(self.local.keep_index, raw))
        await self.fetcher.work(partial(self.local.note, index.files))
        return index

    # folders

    async def _fitting(self) -> Path:
        """Return the first named folder with the run's weights."""
        reasons = []
        for folder in self._folders:
            reason = await self._misfit(folder)
            if reason is None:
                return folder
            reasons.append(reason)
        raise RefusedByRun(
            "no folder named with --base has the model that the run trains beside",
            " and ".join(reasons),
            "name the right one, or leave --base out, and the model comes from the members",
        )

    async def _misfit(self, folder: Path) -> str | None:
        """Return why the weights in a folder are not the run's; None if they are."""
        try:
            found = await self.fetcher.reading(partial(_hash_of, folder, self._config))
        except BadModelFolder as error:
            return str(error)
        except OSError as error:
            return f"{folder} cannot be read ({error.strerror})"
        if found == self._start:
            return None
        return f"{folder} holds the weights {found[:16]}…, and the run's are {self._start[:16]}…"

    async def _is_here(self, index: BaseIndex) -> bool:
        """Return whether the whole base is in the cache and intact."""
        if not await self.fetcher.work(lambda: all(map(self.local.find, index.files))):
            return False
        for file in index.beside:
            if not await self.fetcher.reading(partial(self.local.has, file)):
                return False
        reason = await self._misfit(self.local.cache)
        if reason is not None:
            log.warning("%s; its files are compared with their hashes", reason)
        return reason is None

    # downloads

    async def _index(self) -> BaseIndex:
        raw = await self.fetcher.work(self.local.index_bytes)
        if raw is None:
            self._require_members()
            raw = await self._coming(self.fetcher.index_bytes())
        return await self._noted(raw, "the index of the base that members sent")

    async def _download(self, index: BaseIndex, progress: BytesProgress) -> None:
        """Fetch what is missing or damaged of the base, the small files first."""
        self._require_members()
        cache, before = self.local.cache, 0
        await self.fetcher.work(partial(_require_room, cache, index))
        try:
            for file in sorted(index.files, key=lambda file: file.size):
                here = partial(_add, progress, before, index.size)
                await self._coming(self.fetcher.bring(file, progress=here))
                before += file.size
                progress(before, index.size)
        except OSError as error:
            known = explained(error)
            raise Failure(
                f"the run's base model cannot be kept in {cache}",
                error.strerror or str(error),
                known.remedy if known else "",
            ) from None
        reason = await self._misfit(cache)
        if reason is not None:
            raise RefusedByRun(
                "the run's base model is not what its manifest says",
                reason,
                "tell its founder, who has to start it anew",
            )

    async def _coming(self, fetching: Coroutine[Any, Any, T]) -> T:
        try:
            return await self.fetcher.coming(fetching, INDEX_TIMEOUT_S)
        except NothingCame:
            raise RefusedByRun(
                "the run's base model cannot be had",
                f"nothing more of it came within {INDEX_TIMEOUT_S:.0f} s",
                f"try again later, when what has come counts, or {_GIVE}",
            ) from None

    def _require_members(self) -> None:
        if self.fetcher.is_alone:
            raise RefusedByRun(
                "the run's base model is not on this machine",
                "there is no member that could send it",
                _GIVE,
            )


def base_supply_of(
    machine: MachineOptions,
    model: ModelSection,
    chunks: Chunks,
    members: Callable[[], Sequence[PeerId]],
) -> BaseSupply | None:
    """Return the supply of a run of adapters; None if a run trains all weights."""
    if model.files is None or model.start is None:
        return None
    founded = () if machine.model is None else (machine.model,)
    folders = (*founded, *machine.base)
    local = LocalData(model.files, folders, machine.cache.folder / BASES)
    fetcher = DataFetcher(local, chunks, members, (), Worker("base"), "the base model")
    return BaseSupply(fetcher, folders, model.shape, model.start)


def _hash_of(folder: Path, config: ModelConfig, after: AfterPiece) -> str:
    return WeightsFolder(folder, config).hash_of(after)


def _index_of(folder: Path, root: str, after: AfterPiece) -> bytes | None:
    """Return the index of a folder; None if its files are not those with this root."""
    try:
        raw = index_of(folder, lambda done, total: after(0))
    except BadModelFolder:
        return None
    return raw if root_of(raw) == root else None


def _add(progress: BytesProgress, before: int, total: int, here: int) -> None:
    progress(before + here, total)


def _require_room(cache: Path, index: BaseIndex) -> None:
    """Raise `Failure` unless the missing files fit on the disk."""
    missing = 0
    for file in index.files:
        path = cache / file.name
        if not path.exists():
            missing += file.size - _allocated(partial_of(path))
    free = shutil.disk_usage(cache).free
    if missing > free:
        raise Failure(
            f"the run's base model does not fit into {cache}",
            f"{missing / 1e9:,.1f} GB are missing, and that disk has {free / 1e9:,.1f} GB free",
            f"free some space there, or {_GIVE}",
        )


def _allocated(path: Path) -> int:
    """Return the bytes of a disk that a file takes."""
    return path.stat().st_blocks * 512 if path.exists() else 0


@contextlib.asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """Let one node of this machine at a time run the block. The system frees the lock of a process
    that ends."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | NO_LINK, 0o644), "wb") as lock:
        if not _is_locked(lock):
            log.info("another node of this machine fetches the base model; this one waits for it")
        while not _is_locked(lock):  # noqa: ASYNC110 - the lock is another process's
            await asyncio.sleep(LOOK_EVERY_S)
        yield


def _is_locked(lock: BinaryIO) -> bool:
    """Return whether this node has the lock, after taking it if it is free."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system: two nodes fetch the same, which does no harm
        return True
    return True
