"""The libp2p daemon that is started is the one that hivemind's authors released."""

import asyncio
import hashlib
import re
from importlib.resources import files

import pytest

pytest.importorskip("hivemind")

import hivemind

from farflock.swarm.dht import daemon_digest
from farflock.swarm.dht.daemon import BoundDaemon
from farflock.swarm.dht.daemon_digest import (
    ACCEPTED_VARIABLE,
    PINNED,
    UnknownDaemon,
    platform_name,
    require_known_daemon,
)

VERSION, CONTENT = "1.1.12", b"a daemon"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def daemon(tmp_path):
    (tmp_path / "p2pd").write_bytes(CONTENT)
    return tmp_path / "p2pd"


@pytest.fixture
def pin(monkeypatch):
    """A function that makes a digest the known one for this platform."""

    def known(digest):
        monkeypatch.setattr(daemon_digest, "PINNED", {(VERSION, platform_name()): digest})

    return known


def test_the_installed_daemon_is_the_known_one(caplog):
    version = hivemind.__version__
    if (version, platform_name()) not in PINNED:
        pytest.skip(f"no digest is known for {version} on {platform_name()}")
    require_known_daemon(files("hivemind.hivemind_cli") / "p2pd", version, None)
    assert not caplog.messages


def test_every_digest_is_one(daemon):
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in PINNED.values())
    assert len(set(PINNED.values())) == len(PINNED)


def test_a_changed_daemon_is_refused_with_both_digests_and_a_remedy(daemon, pin):
    pin(DIGEST)
    require_known_daemon(daemon, VERSION, None)
    daemon.write_bytes(CONTENT + b"!")
    other = hashlib.sha256(CONTENT + b"!").hexdigest()
    with pytest.raises(UnknownDaemon, match=f"{other}.*{DIGEST}.*reinstall hivemind.*={other}"):
        require_known_daemon(daemon, VERSION, None)


def test_a_daemon_that_the_user_accepts_is_started_and_no_third_one(daemon, pin):
    pin("0" * 64)
    require_known_daemon(daemon, VERSION, f" {DIGEST.upper()}\n")
    with pytest.raises(UnknownDaemon, match=f"{ACCEPTED_VARIABLE} names {'1' * 64}"):
        require_known_daemon(daemon, VERSION, "1" * 64)
    with pytest.raises(UnknownDaemon, match="names"):
        require_known_daemon(daemon, "9.9", "1" * 64)


def test_of_an_unknown_version_or_platform_a_warning_names_the_digest(daemon, pin, caplog):
    pin("0" * 64)
    require_known_daemon(daemon, "9.9", None)
    (line,) = caplog.messages
    assert f"hivemind 9.9 on {platform_name()}" in line
    assert f"{ACCEPTED_VARIABLE}={DIGEST}" in line


def test_a_known_daemon_in_a_newer_version_is_no_news(daemon, pin, caplog):
    pin(DIGEST)
    require_known_daemon(daemon, "9.9", None)
    assert not caplog.messages


def test_a_missing_daemon_is_left_to_hivemind(tmp_path):
    require_known_daemon(tmp_path / "none", VERSION, None)


def test_no_unknown_daemon_is_started(monkeypatch, tmp_path):
    started = []
    monkeypatch.setenv(ACCEPTED_VARIABLE, "0" * 64)
    monkeypatch.setattr(
        daemon_digest, "PINNED", {(hivemind.__version__, platform_name()): "1" * 64}
    )
    monkeypatch.setattr(
        "asyncio.subprocess.create_subprocess_exec", lambda *words, **_: started.append(words)
    )
    with pytest.raises(UnknownDaemon, match=r"0000.*reinstall hivemind"):
        asyncio.run(BoundDaemon.start())
    assert not started
