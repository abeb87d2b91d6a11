"""The views of a peer's last life are in its folder, whole or not at all."""

import errno

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.chains.return_records import MEMBERS, RUN, chain_of, returned

from farflock.node.state import kept_views
from farflock.node.state.kept_views import KeptViews
from farflock.swarm.protocol.views import encode


@pytest.fixture
def kept(tmp_path):
    return KeptViews(tmp_path / "views")


def hashes(chain):
    return [entry.view.hash for entry in chain.views]


def test_what_was_kept_is_read_again_with_the_goodbyes(kept):
    chain = returned(chain_of())
    chain.goodbyes[MEMBERS[1].peer] = b"s" * 64
    kept.keep(chain)
    again = kept.read(RUN)
    assert hashes(again) == hashes(chain)
    assert again.goodbyes == chain.goodbyes
    assert kept.read("another run") is None


def test_of_a_long_chain_the_newest_views_are_kept(kept, monkeypatch):
    chain = returned(chain_of())
    sizes = [len(encode(entry)) for entry in chain.views]
    for room_bytes, count in ((sum(sizes), 3), (sum(sizes[1:]), 2), (1, 1)):
        monkeypatch.setattr(kept_views, "MAX_VIEWS_BYTES", room_bytes)
        kept.keep(chain)
        assert hashes(kept.read(RUN)) == hashes(chain)[-count:]


def test_whoever_is_left_alone_by_goodbyes_is_alone(kept):
    me, *others = (member.peer for member in MEMBERS)
    assert not kept.alone(RUN, me), "it knows no view"
    chain = chain_of()
    kept.keep(chain)
    assert not kept.alone(RUN, me)
    chain.goodbyes.update(dict.fromkeys(others, b"s" * 64))
    kept.keep(chain)
    assert kept.alone(RUN, me)
    assert not kept.alone(RUN, others[0])


def test_no_file_is_no_view(kept):
    assert kept.read(RUN) is None


@given(st.data())
def test_a_spoilt_file_is_no_view_or_the_views_of_before(tmp_path_factory, data):
    kept = KeptViews(tmp_path_factory.mktemp("folder") / "views")
    kept.keep(returned(chain_of()))
    raw = bytearray(kept.path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    kept.path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    found = kept.read(RUN)
    assert found is None or found.newest.number <= 2


def test_a_file_that_is_too_long_or_nonsense_is_not_read(kept):
    kept.path.write_bytes(bytes(kept_views.MAX_FILE_BYTES + 1))
    assert kept.read(RUN) is None
    kept.path.write_bytes(msgspec.msgpack.encode([RUN, [b"junk"], {}]))
    assert kept.read(RUN) is None


def test_a_full_disk_is_said_once_and_ends_nothing(kept, monkeypatch, caplog):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_views, "write_durably", full)
    for _ in range(3):
        kept.keep(chain_of())
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
