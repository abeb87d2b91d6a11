"""The founder's statements in a node's folder: those that a command left, and all that are known.

`farflock ban` and the like append to `orders.json`, also while no node runs; a node takes them in
from there, and keeps all statements of its run in `statements.json`, so that a restart forgets no
ban.
"""

import asyncio
import logging
from pathlib import Path

import msgspec

from farflock.node.state.paths import OWNER_ONLY, RunFolder, write_whole
from farflock.swarm.peer.peer import Peer
from farflock.swarm.statements import BadStatement, StatementLog

LOOK_EVERY_S = 1.0
MAX_FILE_BYTES = 4 * 1024 * 1024

log = logging.getLogger(__name__)


class _File(msgspec.Struct, frozen=True):
    run: str
    statements: tuple[bytes, ...]


class StatementFiles:
    """Both files of one folder and run."""

    def __init__(self, folder: RunFolder, run: str) -> None:
        self.orders, self.known = folder.path / "orders.json", folder.path / "statements.json"
        self._run = run

    def read(self) -> tuple[bytes, ...]:
        """Return the statements in both files, which may name some twice; those of other runs and
        files that cannot be read count for nothing."""
        return (*self._read(self.known), *self._read(self.orders))

    def order(self, log_here: StatementLog, blob: bytes) -> None:
        """Add a statement to those that the node is to take in; raise `OSError` if it cannot."""
        if not log_here.add(blob):
            raise BadStatement("it does not follow from the statements in the folder")
        self._write(self.orders, (*self._read(self.orders), blob))

    def keep(self, statements: tuple[bytes, ...]) -> None:
        """Keep all statements that the node knows."""
        self._write(self.known, statements)

    def _write(self, path: Path, statements: tuple[bytes, ...]) -> None:
        write_whole(path, msgspec.json.encode(_File(self._run, statements)), OWNER_ONLY)

    def _read(self, path: Path) -> tuple[bytes, ...]:
        try:
            with path.open("rb") as file:
                found = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=_File)
        except (OSError, ValueError):  # msgspec's errors are `ValueError`s
            return ()
        return found.statements if found.run == self._run else ()


class StatementKeeper:
    """Brings the statements of a folder to its peer, and what the peer hears to the folder."""

    def __init__(self, folder: RunFolder, peer: Peer) -> None:
        self._files = StatementFiles(folder, peer.terms.run)
        self._peer = peer
        self._kept: tuple[bytes, ...] = ()

    async def run(self) -> None:
        """Look at the folder every `LOOK_EVERY_S`, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Take in what is new in the folder, and write what is new here."""
        statements = self._peer.membership.admission.statements
        statements.take(self._files.read())
        if (known := tuple(statements.log.since(1))) != self._kept:
            self._kept = known
            try:
                self._files.keep(known)
            except OSError as error:  # a full disk must not end the node
                log.warning("the founder's statements cannot be kept: %s", error.strerror)
            for words in statements.log.said[-1:]:
                log.warning("the founder states, %s", words)
