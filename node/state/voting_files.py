"""A voter's stable storage in its node's folder: `views.bin`, `votes.bin` and `proofs.bin`."""

from farflock.node.state.paths import OWNER_ONLY, RunFolder, write_whole

MAX_FILE_BYTES = 64 * 1024 * 1024  # above any chain's proof


class VotingFiles:
    """The files of one node, for what swarm/stable keeps."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path

    def read(self, name: str) -> bytes:
        """Return what was written last; empty if there is nothing that can be read."""
        try:
            with (self._folder / f"{name}.bin").open("rb") as file:
                return file.read(MAX_FILE_BYTES)
        except OSError:
            return b""

    def write(self, name: str, content: bytes) -> None:
        """Replace what is kept under a name; it is on the disk once this returns."""
        write_whole(self._folder / f"{name}.bin", content, OWNER_ONLY, lasting=True)
