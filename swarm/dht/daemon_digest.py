"""A check of the libp2p daemon before it is started: a program that came inside hivemind's wheel.

Farflock neither builds nor reads that program, and it runs with all rights of the user. Its SHA-256
shows that it is the one that hivemind's authors released, and that nobody has changed it since.
"""

import hashlib
import logging
import os
import platform
import sys
from pathlib import Path

ACCEPTED_VARIABLE = "FARFLOCK_P2PD_SHA256"  # the digest of another daemon that the user accepts

_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}

# By hivemind's version and the platform, as hivemind names it. From P2P_BINARY_HASH in setup.py of
# its tag 1.1.12: release v0.5.0.hivemind1 of learning-at-home/go-libp2p-daemon. That of linux-amd64
# is also in the RECORD of the wheel on PyPI.
PINNED = {
    ("1.1.12", "darwin-amd64"): "fe00f9d79e8e4e4c007144d19da10b706c84187b3fb84de170f4664c91ecda80",
    ("1.1.12", "darwin-arm64"): "0404981a9c2b7cab5425ead2633d006c61c2c7ec85ac564ef69413ed470e65bd",
    ("1.1.12", "linux-amd64"): "42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8",
    ("1.1.12", "linux-arm64"): "046f18480c785a84bdf139d7486086d379397ca106cb2f0191598da32f81447a",
}

_log = logging.getLogger(__name__)


class UnknownDaemon(RuntimeError):
    """The libp2p daemon is not the one that is known for this version and platform."""


def platform_name() -> str:
    """Return this platform as hivemind names it, such as `linux-amd64`."""
    machine = platform.machine().lower()
    return f"{sys.platform}-{_MACHINES.get(machine, machine)}"


def require_known_daemon(path: Path, version: str, accepted: str | None) -> None:
    """Raise `UnknownDaemon` if this program is not the daemon of hivemind `version`, nor the one
    with the digest `accepted`; warn if no digest is known for this version and platform."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return  # hivemind's own error says more
    known = PINNED.get((version, platform_name()))
    if digest in (known, (accepted or "").strip().lower()):
        return
    if accepted or known:
        raise UnknownDaemon(_refusal(path, version, digest, known, accepted))
    if digest not in PINNED.values():
        _log.warning(
            "no SHA-256 is known for the libp2p daemon of hivemind %s on %s, so it is not checked;"
            " to accept only this one from now on, set %s=%s",
            version,
            platform_name(),
            ACCEPTED_VARIABLE,
            digest,
        )


def accepted_digest() -> str | None:
    """Return the digest that the user accepts, if the environment names one."""
    return os.environ.get(ACCEPTED_VARIABLE)


def _refusal(path: Path, version: str, digest: str, known: str | None, accepted: str | None) -> str:
    expected = [f"that of hivemind {version} on {platform_name()} has {known}"] if known else []
    expected += [f"{ACCEPTED_VARIABLE} names {accepted}"] if accepted else []
    return (
        f"the libp2p daemon {path} is not the expected program: its SHA-256 is {digest}, but"
        f" {', and '.join(expected)}; reinstall hivemind (pip install --force-reinstall"
        f" --no-deps hivemind=={version}), or, if you built the daemon yourself or trust whoever"
        f" did, accept it with {ACCEPTED_VARIABLE}={digest}"
    )
