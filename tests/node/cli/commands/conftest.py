"""A manifest, prepared data and the folders of stopped nodes for the tests of commands."""

import msgspec
import pytest
from worlds.peers import node_status
from worlds.prepared import prepared

from farflock.node.run.invite import Invite, founder_of, mint
from farflock.swarm.contact import Contact

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture
def manifest(tmp_path):
    """A founder's file."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "plays"\ntotal_tokens = 4096\n[model]\npreset = "tiny"\n[train]\nseq = 32\n'
    )
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of prepared data."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"text {number} of many, " * 20)
    return prepared(texts, tmp_path / "prepared", held_out=0.2).content.folder


@pytest.fixture
def stopped(tmp_path):
    """A function that makes the folder of a node that took part in a run and has stopped."""

    def leave(run):
        folder = tmp_path / "home" / "runs" / run
        folder.mkdir(parents=True)
        old = Invite(
            run, founder_of(PEER), (Contact(PEER, bytes(32), "127.0.0.1", 9, 9, 9),), "a run", 0
        )
        status = node_status(
            run=run,
            peer=PEER,
            invite=mint(old),
            step=3,
            tokens=640,
            total_tokens=1280,
            members=(PEER,),
        )
        (folder / "status.json").write_bytes(msgspec.json.encode(status))
        return folder

    return leave
