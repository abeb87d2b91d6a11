"""The seam to the directory, which introduces peers and does nothing else.

It holds slow facts only (records, the manifest's head). Readiness for a round is a direct message:
in trials, 8 busy peers agreed on a round through a DHT in two thirds of the cases, directly in all.
"""

from typing import Protocol

MAX_RECORD_AGE_S = 600.0


class Directory(Protocol):
    """A table of signed records per run: strangers read it, and only owners write their records.

    Law (tests/swarm/test_directory_law.py): others' `peers` see what `announce` stored sooner or
    later, until it expires; a record that is forged, expired, too long, or an older one replayed by
    others is never returned. Reads may be stale, stores may be lost, and views may differ between
    readers: callers must tolerate all three. A directory is opened for one run: any other run
    raises `ValueError`, and announcing another peer's record raises `BadRecord`. After `close`,
    calls end quietly; announced records stay until they expire."""

    @property
    def addresses(self) -> tuple[str, ...]: ...  # of this peer, for an invite; none: only dials

    async def announce(self, run: str, record: bytes) -> bool:
        """Store this peer's signed record; return False if no peer was reachable.

        True promises nothing."""
        ...

    async def peers(self, run: str) -> list[bytes]:
        """Return all live, verified records visible to this reader, the newest of each owner."""
        ...

    async def publish_head(self, run: str, head: bytes) -> bool:
        """Re-publish the manifest's signed head; return False if no peer was reachable."""
        ...

    async def heads(self, run: str) -> list[bytes]:
        """Return all visible heads; the caller takes the newest with the founder's signature."""
        ...

    async def close(self) -> None: ...
