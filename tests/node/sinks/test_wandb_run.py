"""What W&B keeps on disk without a network are the measures, by the names that are everywhere, and
nothing that says who or where the node is. `make compat` runs these tests.
"""

import getpass
import json
import logging
import socket
import struct
import sys

import pytest
from worlds.measured import PEER, RUN, measured, origin_in
from worlds.waiting import LIMIT_S

pytest.importorskip("wandb", reason="`make compat` installs it")

import wandb

from farflock.node.errors import Usage
from farflock.node.sinks import feed
from farflock.node.sinks.choice import LogOptions, feeds
from farflock.node.sinks.measures import numbers

pytestmark = pytest.mark.net

BLOCK_BYTES, FILE_HEAD, HEAD = 32 * 1024, 7, struct.Struct("<IHB")
WHOLE, FIRST, LAST = 1, 2, 4  # kinds of pieces, as in LevelDB's log


def records(raw):
    """The records in a `.wandb` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, pieces = FILE_HEAD, b""
    while place + HEAD.size <= len(raw):
        if BLOCK_BYTES - place % BLOCK_BYTES < HEAD.size:
            place += BLOCK_BYTES - place % BLOCK_BYTES
            continue
        _, size, kind = HEAD.unpack_from(raw, place)
        place += HEAD.size
        pieces = (
            raw[place : place + size] if kind in (WHOLE, FIRST) else pieces + raw[place:][:size]
        )
        place += size
        if kind in (WHOLE, LAST):
            yield Record.FromString(pieces)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setattr(feed, "CLOSE_TIMEOUT_S", LIMIT_S)  # W&B starts slowly on a busy machine
    yield tmp_path
    wandb.teardown()


def written(folder, *several):
    with feeds(LogOptions(("wandb",), every_s=0.0), pytest.fail) as made:
        for measures in several:
            made.write(origin_in(folder), measures)
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    return path.read_bytes()


def test_the_measures_are_in_the_file_that_wandb_sync_sends(offline, caplog):
    several = [measured(step, loss=None if step == 2 else 1 / step) for step in range(1, 5)]
    found = list(records(written(offline, *several)))
    (run,) = [record.run for record in found if record.HasField("run")]
    assert (run.project, run.run_group) == ("farflock", RUN)
    assert run.display_name == f"{RUN[:8]} {PEER[-8:]}"
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in entry.item}
        for entry in (record.history for record in found if record.HasField("history"))
    ]
    ours = [{name: row[name] for name in row if not name.startswith("_")} for row in rows]
    assert ours == [{"step": each.step, **numbers(each)} for each in several]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_nothing_but_the_measures_is_kept(offline, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["farflock", "join", "farflock:a-secret-invite"])
    written(offline, measured())
    kept = b"".join(
        path.read_bytes()
        for path in offline.glob("wandb/offline-run-*/**/*")
        if path.is_file() and path.suffix != ".log"  # which stay here
    )
    secrets = ["a-secret-invite", socket.gethostname()]
    if getpass.getuser() != "root":
        secrets.append(getpass.getuser())
    assert not [secret for secret in secrets if secret.encode() in kept]


def test_without_a_key_it_is_refused_and_nobody_is_asked(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    says = "no key for Weights & Biases is on this machine; run `wandb login`, or set WANDB_MODE="
    with pytest.raises(Usage, match=says), feeds(LogOptions(("wandb",)), print):
        pytest.fail("the node began")
