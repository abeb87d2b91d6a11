"""A manifest for the tests of commands."""

import pytest

from farflock.node.process.status import Status


@pytest.fixture
def manifest(tmp_path):
    """A founder's file."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "plays"\ntotal_tokens = 4096\n[model]\npreset = "tiny"\n[train]\nseq = 32\n'
    )
    return path


@pytest.fixture
def a_status():
    """A function that returns the status of a node that has done nothing, with this invite."""
    counts = ("step", "tokens", "total_tokens", "view", "sent_bytes", "received_bytes")
    numbers = dict.fromkeys((*counts, "unsure_rounds"), 0)
    nothing = {"members": (), "partners": (), "waits": (), "dropped": {}, "loss": None}
    return lambda invite, **more: Status(
        **{"pid": 1, "run": "r", "peer": "p", "invite": invite, "is_member": True}
        | numbers
        | nothing
        | more
    )
