"""Errors that a person can act on: what failed, why, and what to do, with the command's exit code.

Other modules raise errors of their own whose message is such a sentence. The table below names
them, so that the command line recognises them without importing those modules.
"""

import errno
from collections.abc import Iterable

_COMPARED_CHARS = 64  # of a misspelt name, which may come from a stranger
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it: 128 + SIGINT


class Terminated(BaseException):
    """A request to end from another program or a closing terminal; not an error."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


class FarflockError(Exception):
    """A sentence with cause and remedy. Exit codes: 1 failure, 2 usage, 3 refused by the run."""

    exit_code = 1

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(": ".join(filter(None, (what, "; ".join(filter(None, (why, remedy)))))))
        self.what, self.why, self.remedy = what, why, remedy


class Failure(FarflockError):
    """A failure on this machine or on the network."""


class Usage(FarflockError):
    """An argument or option that is impossible."""

    exit_code = 2


class RefusedByRun(FarflockError):
    """The run does not accept this machine, this file or this version."""

    exit_code = 3


EXPLAINED: dict[str, type[FarflockError]] = {
    "farflock.compression.activation.Incompatible": RefusedByRun,  # the basis here is another
    "farflock.compression.codec.UnencodableTensor": Failure,  # the training has diverged
    "farflock.node.state.checkpoint.CheckpointCorrupt": Failure,
    "farflock.node.state.checkpoint.CheckpointError": Failure,
    "farflock.node.model.corpus.BadCorpus": RefusedByRun,  # a founder's is found with the manifest
    "farflock.node.model.data.BadData": Failure,
    "farflock.node.model.export.ExportRefused": Failure,
    "farflock.node.state.history.HistoryUnusable": Failure,
    "farflock.node.train.state_sync.CorruptSnapshot": Failure,
    "farflock.swarm.dht.files.IdentityInUse": Failure,
    "farflock.swarm.dht.files.PortTaken": Failure,
    "farflock.swarm.dht.greeting.ClockSkew": RefusedByRun,
    "farflock.swarm.dht.greeting.DirectoryUnreachable": Failure,
    "farflock.swarm.identity.BadIdentity": Failure,
    "farflock.swarm.peer.snapshots.SnapshotUnavailable": Failure,
}

_FULL = "free some space on that disk and start again; nothing was overwritten"
_FORBIDDEN = "give this user permission, or choose another --folder or --port"
_TAKEN = "choose another --port or --dht-port, or 0 for any that is free"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EFBIG: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.EADDRINUSE: _TAKEN,
    errno.EADDRNOTAVAIL: "name an address of this machine with --host",
    errno.ENOENT: "check that path",
    errno.ENOTDIR: "a file stands where a folder should be; choose another --folder",
    errno.EEXIST: "a file stands where a folder should be; choose another --folder",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def explained(error: BaseException) -> FarflockError | None:
    """Return the sentence for an error that is not a bug; None for a bug."""
    if isinstance(error, FarflockError):
        return error
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return explained(error.exceptions[0])
    kind = EXPLAINED.get(f"{type(error).__module__}.{type(error).__qualname__}")
    if kind is not None:
        return kind("", str(error), "")
    if isinstance(error, MemoryError):
        return Failure(
            "not enough memory",
            str(error) or "an allocation failed",
            "close programs, or take a smaller model",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return _from_system(error)
    return None


def _from_system(error: OSError) -> Failure:
    remedy = _REMEDIES.get(error.errno or 0, "check that path or address and try again")
    return Failure(
        str(error.filename or "the system refused"),
        error.strerror or errno.errorcode[error.errno or 0],
        remedy,
    )


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the remedy for a misspelt name, as a clause: the nearest choice, or all in order."""
    import difflib  # only for an error: every command imports this module

    names = sorted(choices)
    close = difflib.get_close_matches(word[:_COMPARED_CHARS], names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names) or 'none'}"
