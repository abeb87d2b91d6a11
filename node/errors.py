"""Errors that a user can act on: what failed, why, and what to do, with the command's exit code.

Other modules raise errors of their own with such a sentence as their message. The table below names
them, so the command line recognises them without importing those modules.
"""

import errno
from collections.abc import Iterable

_MAX_COMPARED_CHARS = 64  # of a misspelt name, which may come from an untrusted peer
INTERRUPTED = 130  # exit code after Ctrl-C, as in shells: 128 + SIGINT


class Terminated(BaseException):
    """Another program or a closing terminal asked the process to stop; this is not an error."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


class FarflockError(Exception):
    """One sentence: what happened: why; what to do. Exit codes: 1 failure, 2 usage, 3 refused."""

    exit_code = 1

    def __init__(self, what: str, why: str, remedy: str) -> None:
        cause = ": ".join(filter(None, (what, why)))
        super().__init__("; ".join(filter(None, (cause, remedy))))
        self.what, self.why, self.remedy = what, why, remedy


class Failure(FarflockError):
    """A failure on this machine or on the network."""


class Usage(FarflockError):
    """An argument, an option or a manifest with an impossible value."""

    exit_code = 2


class RefusedByRun(FarflockError):
    """The run does not accept this machine, this file or this version."""

    exit_code = 3


class LivesElsewhere(Failure):
    """Another process has this node's identity and is in the run with it."""

    exit_code = 3


EXPLAINED: dict[str, type[FarflockError]] = {
    "farflock.compression.activation.Incompatible": RefusedByRun,  # this machine's basis differs
    "farflock.compression.codec.UnencodableTensor": Failure,  # the training has diverged
    "farflock.node.state.checkpoint.CheckpointCorrupt": Failure,
    "farflock.node.state.checkpoint.CheckpointError": Failure,
    "farflock.node.model.corpus.BadCorpus": RefusedByRun,  # a founder gets `Usage` instead
    "farflock.node.data.cursor.BadCursor": Failure,
    "farflock.node.data.documents.BadDocuments": Failure,
    "farflock.node.data.index.BadIndex": Failure,
    "farflock.node.data.mixture.BadMixture": Failure,
    "farflock.node.data.samples.NoShards": Failure,
    "farflock.node.data.samples.TooShort": Failure,
    "farflock.node.model.data.BadData": Failure,
    "farflock.node.model.export.ExportRefused": Failure,
    "farflock.node.model.hf_config.BadModelFolder": Failure,
    "farflock.node.state.history.HistoryUnusable": Failure,
    "farflock.node.train.state_sync.CorruptSnapshot": Failure,
    "farflock.node.tokens.tokenizer.BadTokenizer": Failure,
    "farflock.node.use.tasks.BadTask": Failure,
    "farflock.swarm.dht.files.IdentityInUse": Failure,
    "farflock.swarm.dht.files.PortTaken": Failure,
    "farflock.swarm.dht.greeting.ClockSkew": RefusedByRun,
    "farflock.swarm.dht.greeting.DirectoryUnreachable": Failure,
    "farflock.swarm.identity.BadIdentity": Failure,
    "farflock.swarm.peer.state_download.SnapshotUnavailable": Failure,
}

_FULL = "free some space on that disk and start again; no file was overwritten"
_FORBIDDEN = "give your user permission, or choose another --folder or --port"
_TAKEN = "choose another --port or --dht-port, or 0 for any free one"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EFBIG: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.EADDRINUSE: _TAKEN,
    errno.EADDRNOTAVAIL: "give an address of this machine with --host",
    errno.ENOLCK: "choose a --folder on a disk of this machine",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a file stands where a folder should be; choose another --folder",
    errno.EEXIST: "a file stands where a folder should be; choose another --folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
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
            "close other programs, or use a smaller model",
        )
    if any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):  # torch's
        return Failure(
            "the device is out of memory",
            str(error),
            "close programs that use it, choose a smaller --micro-batch, or train on the CPU"
            " (--device cpu)",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return _from_system(error)
    return None


def _from_system(error: OSError) -> Failure:
    remedy = _REMEDIES.get(error.errno or 0, "check the path or address, and try again")
    return Failure(
        str(error.filename or "the operating system refused a request"),
        error.strerror or errno.errorcode[error.errno or 0],
        remedy,
    )


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the remedy for a misspelt name, as a clause: the nearest choice, or all of them."""
    import difflib  # only for an error: every command imports this module

    names = sorted(choices)
    close = difflib.get_close_matches(word[:_MAX_COMPARED_CHARS], names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names) or 'none'}"
