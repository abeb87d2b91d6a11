"""Records of members are read again as they were kept, or not at all."""

import pytest

from farflock.node.state import kept_records
from farflock.node.state.kept_records import KeptRecords


@pytest.fixture
def kept(tmp_path):
    return KeptRecords(tmp_path / "records")


def test_what_was_kept_is_read_again(kept):
    assert kept.read() == []
    kept.keep([b"one", b"two"])
    assert kept.read() == [b"one", b"two"]
    kept.keep([b"each"] * 1000)
    assert len(kept.read()) == kept_records.MAX_MEMBERS


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\x91\xa1x", bytes(kept_records.MAX_FILE_BYTES + 1)]
)
def test_a_spoilt_file_holds_none(kept, content):
    kept.path.write_bytes(content)
    assert kept.read() == []


def test_a_disk_that_takes_nothing_ends_nothing(tmp_path):
    KeptRecords(tmp_path / "missing" / "records").keep([b"one"])
