"""The seam to the directory: it introduces peers, and nothing more.

Slow facts only (records, the manifest's head). Readiness for a round is a direct message: in trials, 8 busy peers
agreed on a round through a DHT in two thirds of the cases, directly in all.
"""

from typing import Protocol

MAX_RECORD_AGE_S = 600.0


class Directory(Protocol):
    """A table of signed records per run, readable by strangers, written only by each record's owner.

    Law (tests/swarm/test_directory_law.py): what `announce` stored is seen by `peers` of others sooner or later,
    until it expires; a record that is forged, expired, too long, or an older one replayed by others is never returned.
    Reads may be stale, stores may be lost, and views may differ between readers: callers must live with all three.
    It is opened for one run: another is `ValueError`, announcing somebody else's record `BadRecord`. After `close` calls
    end quietly; what was announced stays until it expires.
    """

    async def announce(self, run: str, record: bytes) -> bool:
        """Store my signed record; False if nobody could be reached. A True is a hope, not a proof."""
        ...

    async def peers(self, run: str) -> list[bytes]:
        """All live, verified records that this reader can see, newest of each owner."""
        ...

    async def publish_head(self, run: str, head: bytes) -> bool:
        """Re-publish the manifest's signed head."""
        ...

    async def heads(self, run: str) -> list[bytes]:
        """All heads that this reader can see; the caller verifies the founder's signature and takes the newest."""
        ...

    async def close(self) -> None: ...
