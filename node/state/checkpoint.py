"""Crash-safe checkpoints: whatever interrupts a write, the folder only ever holds complete ones.

A checkpoint is a folder `step-N` with one safetensors file per group (inner, outer, …), other small
files (config.json), and `manifest.json` with the SHA-256 of each. It is written under a hidden
temporary name, every file and folder is fsync'd, and one rename makes it appear. Reading verifies
every hash and that every value is finite.
"""

import errno
import hashlib
import logging
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from farflock.node.durable import sync_folder
from farflock.node.state.cut import Cut, raw

TensorGroups = Mapping[str, Mapping[str, Tensor] | Cut]
Passed = Callable[[int], None]  # told of bytes as they have reached the disk, or come back from it

MANIFEST_NAME = "manifest.json"
_SUFFIX = ".safetensors"
_FORMAT = 1
_MAX_MANIFEST_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_STAGE_BYTES = 4 << 20
_SYNC_BYTES = 32 << 20  # from the system's cache, where that takes the writes, to the disk at once
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint could not be written or found; the message says why and what to do, in one
    sentence."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint that was cut short or altered, or holds values that are not finite."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    step: Annotated[int, msgspec.Meta(ge=0)]
    files: dict[str, _File]
    meta: dict[str, Any]


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest file: the manifest's text and its hash, which covers `meta` too."""

    sha256: str
    manifest: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: `groups` of tensors by name, `files` the bytes of other files."""

    folder: Path
    step: int
    groups: dict[str, dict[str, Tensor]]
    meta: dict[str, Any]
    files: dict[str, bytes]


def save(
    folder: Path,
    step: int,
    groups: TensorGroups,
    meta: Mapping[str, Any],
    files: Mapping[str, bytes] | None = None,
    passed: Passed = lambda count: None,
) -> Path:
    """Write `folder/step-N` and return its path; on failure leave nothing and raise
    `CheckpointError`.

    A readable checkpoint of that step is never overwritten; a corrupt one is renamed. The groups
    are written in their order, piece by piece, and read again for their hashes; `passed` is told
    of both. `meta` holds plain JSON values (NaN would become null).
    """
    cuts = {name: group if isinstance(group, Cut) else Cut(group) for name, group in groups.items()}
    target = folder / f"step-{step}"
    partial = folder / f".step-{step}.partial"
    _require_names(step, cuts, files or {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _make_room(target)
        shutil.rmtree(partial, ignore_errors=True)  # left by a crash
        partial.mkdir()
        _write_all(partial, step, cuts, meta, files or {}, passed)
        os.replace(partial, target)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(_remedy(target, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def load(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint; raise `CheckpointCorrupt`, or `CheckpointError` if it is
    unreadable."""
    manifest = _verified(folder)
    groups, contents = {}, {}
    try:
        for name in manifest.files:
            if name.endswith(_SUFFIX):
                groups[name.removesuffix(_SUFFIX)] = _tensors(folder / name)
            else:
                contents[name] = (folder / name).read_bytes()
    except OSError as error:
        raise _unreadable(folder, error) from error
    return Checkpoint(folder, manifest.step, groups, manifest.meta, contents)


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, or None; log a warning for each broken one."""
    for _, path in reversed(steps(folder)):
        try:
            return load(path)
        except CheckpointError as error:
            log.warning("skipping a checkpoint: %s", error)
    return None


def prune(
    folder: Path, keep: int, max_bytes: int | None = None, intact: set[Path] | None = None
) -> None:
    """Delete all but the `keep` newest checkpoints that verify, then the oldest while they take
    more than `max_bytes`, and whatever crashes left behind.

    The newest one that verifies always stays. Any checkpoint newer than the oldest one kept stays
    for inspection, even if it is broken. Those in `intact` are not read again; what verifies is
    added to it.
    """
    if keep < 1:
        raise ValueError(f"prune keeps at least one checkpoint, got {keep}")
    intact = set() if intact is None else intact
    kept, taken_bytes, full = 0, 0, False
    for _, path in reversed(steps(folder)):
        taken_bytes += bytes_of(path)
        full = full or kept >= keep or bool(kept and max_bytes and taken_bytes > max_bytes)
        if full:
            shutil.rmtree(path)
        elif path in intact or _is_whole(path):
            intact.add(path)
            kept += 1
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def bytes_of(folder: Path) -> int:
    """Return the bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def steps(folder: Path) -> list[tuple[int, Path]]:
    """Return the step and path of each checkpoint in `folder` (if any), oldest first, without
    verifying them."""
    if not folder.is_dir():
        return []
    found = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def _require_names(step: int, groups: Mapping[str, Cut], files: Mapping[str, bytes]) -> None:
    if step < 0:
        raise ValueError(f"a checkpoint's step is 0 or more, got {step}")
    for name in [*(f"{group}{_SUFFIX}" for group in groups), *files]:
        is_reserved = name == MANIFEST_NAME or (name in files and name.endswith(_SUFFIX))
        if is_reserved or not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot be the name of a checkpoint's file; use letters, digits, '-', '_'"
            )


def _make_room(target: Path) -> None:
    """Raise `CheckpointError` if `target` is intact; rename a corrupt one to the first free
    `.corrupt-N` name."""
    if not target.exists():
        return
    if _is_whole(target):
        raise CheckpointError(
            f"{target} exists already and is not overwritten; move it away, or resume from it"
        )
    number = 1
    while (aside := target.with_name(f"{target.name}.corrupt-{number}")).exists():
        number += 1
    log.warning("%s is corrupt; renaming it to %s", target, aside.name)
    os.replace(target, aside)


def _is_whole(folder: Path) -> bool:
    try:
        _verified(folder)
    except CheckpointError:
        return False
    return True


def _write_all(
    partial: Path,
    step: int,
    groups: Mapping[str, Cut],
    meta: Mapping[str, Any],
    files: Mapping[str, bytes],
    passed: Passed,
) -> None:
    names = [*(f"{group}{_SUFFIX}" for group in groups), *files]
    for group, cut in groups.items():
        _write(partial / f"{group}{_SUFFIX}", _finite_pieces(group, cut), passed)
    for name, content in files.items():
        _write(partial / name, [content], passed)
    # after all cuts are read: until then, a step that changes them has to copy them
    written = {name: _finished(partial / name, passed) for name in names}
    manifest = msgspec.json.encode(_Manifest(_FORMAT, step, written, dict(meta)))
    sealed = _Sealed(hashlib.sha256(manifest).hexdigest(), msgspec.Raw(manifest))
    _write(partial / MANIFEST_NAME, [msgspec.json.encode(sealed)], passed)
    _finished(partial / MANIFEST_NAME, passed)
    sync_folder(partial)


def _finite_pieces(group: str, cut: Cut) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a cut's file; raise `CheckpointError` for values that are not finite."""
    yield cut.head
    for name, piece in cut.read():
        if not _finite(piece):
            raise CheckpointError(
                f"{group}/{name} holds NaN or infinite values, so this state is not saved; "
                "resume from the last checkpoint with a lower learning rate"
            )
        yield raw(piece)


def _write(path: Path, content: Iterable[bytes | memoryview], passed: Passed) -> None:
    """Write a new file, past the system's cache where that is possible: to make room there for a
    whole checkpoint costs more than to write it. Elsewhere the cache is emptied again and again, or
    a slow disk would take all of it at the end, while nobody hears of any progress."""
    # whole pages, as the disk wants them
    stage, filled, written = memoryview(mmap.mmap(-1, _STAGE_BYTES)), 0, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _set_direct(descriptor, wanted=True)
        for piece in content:
            rest = memoryview(piece)
            while rest:
                head, rest = rest[: _STAGE_BYTES - filled], rest[_STAGE_BYTES - filled :]
                stage[filled : filled + len(head)] = head
                filled += len(head)
                if filled == _STAGE_BYTES:
                    _put(descriptor, stage)
                    filled, written = 0, written + _STAGE_BYTES
                    if written % _SYNC_BYTES == 0:
                        os.fsync(descriptor)
                    passed(_STAGE_BYTES)
        _set_direct(descriptor, wanted=False)
        _put(descriptor, stage[:filled])
        passed(filled)
    finally:
        os.close(descriptor)


def _put(descriptor: int, rest: memoryview) -> None:
    while rest:
        try:
            written = os.write(descriptor, rest)  # it may take less
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(descriptor, wanted=False):
                raise
        else:
            rest = rest[written:]


def _set_direct(descriptor: int, *, wanted: bool) -> bool:
    """Let writes go past the cache, or not; return whether that changed anything."""
    import fcntl  # late: every system can import this module

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    direct = getattr(os, "O_DIRECT", 0)
    changed = flags | direct if wanted else flags & ~direct
    if changed == flags:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, changed)
    except OSError:  # not every file system can
        return False
    return True


def _finished(path: Path, passed: Passed) -> _File:
    """Make a file's content durable, and return its description."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return _File(_digest(path, passed), path.stat().st_size)


def _digest(path: Path, passed: Passed = lambda count: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while piece := content.read(_READ_BYTES):
            digest.update(piece)
            passed(len(piece))
    return digest.hexdigest()


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST_NAME
    size_bytes = path.stat().st_size
    if size_bytes > _MAX_MANIFEST_BYTES:
        raise CheckpointCorrupt(
            _corrupt(path, f"has {size_bytes} bytes, above {_MAX_MANIFEST_BYTES}")
        )
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=_Sealed)
        if hashlib.sha256(sealed.manifest).hexdigest() != sealed.sha256:
            raise CheckpointCorrupt(_corrupt(path, "does not have the SHA-256 that it states"))
        manifest = msgspec.json.decode(sealed.manifest, type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointCorrupt(_corrupt(path, f"cannot be parsed ({error})")) from None
    if manifest.format != _FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {manifest.format}, but this version of Farflock "
            f"reads format {_FORMAT}; use the version that wrote it"
        )
    for name in manifest.files:
        if not _NAME.fullmatch(name):
            raise CheckpointCorrupt(_corrupt(path, f"names a file {name[:100]!r}"))
    return manifest


def _verified(folder: Path) -> _Manifest:
    """Return the manifest of a checkpoint whose files are what it says."""
    try:
        manifest = _read_manifest(folder)
        for name, file in manifest.files.items():
            _verify(folder / name, file)
    except OSError as error:
        raise _unreadable(folder, error) from error
    return manifest


def _verify(path: Path, file: _File) -> None:
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        raise CheckpointCorrupt(
            _corrupt(path, f"has {size_bytes} bytes instead of {file.size_bytes}")
        )
    if (found := _digest(path)) != file.sha256:
        raise CheckpointCorrupt(
            _corrupt(path, f"has SHA-256 {found[:16]}… instead of {file.sha256[:16]}…")
        )


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors, each mapped: memory is taken for what is read, or changed."""
    try:
        tensors = safetensors.load_file(path)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointCorrupt(_corrupt(path, f"is not a safetensors file ({error})")) from None
    for name, tensor in tensors.items():
        if not _finite(tensor):
            raise CheckpointCorrupt(_corrupt(path, f"holds NaN or infinite values in {name[:200]}"))
    return tensors


def _finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
        return True
    return bool(torch.isfinite(tensor).all())  # the sum of finite values may be infinite


def _corrupt(path: Path, what: str) -> str:
    return f"{path} {what}; the checkpoint is damaged, use an earlier one or the swarm's snapshot"


def _unreadable(folder: Path, error: OSError) -> CheckpointError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        missing = Path(error.filename or folder)
        if not folder.is_dir():
            return CheckpointError(
                f"there is no checkpoint at {folder}; give a folder called step-N"
            )
        return CheckpointCorrupt(_corrupt(missing, "is missing"))
    return CheckpointError(
        f"{error.filename or folder} cannot be read ({error.strerror}); check its permissions"
    )


def _remedy(target: Path, error: OSError) -> str:
    if error.errno in _FULL:
        return f"no room on the disk for {target}; free some space (earlier checkpoints are intact)"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to write {target}; make its folder writable or choose another one"
    return f"{target} could not be written ({error.strerror or error}); check the disk"
