"""A web server's copy of the data is used piece by piece, and believed no more than a peer."""

import threading
import time
import urllib.request

import numpy as np
import pytest
from worlds.folders.web_copy import Serving, web_copy
from worlds.prepared import write_shards

from farflock.node.data import mirror as module
from farflock.node.data.index import PIECE_BYTES
from farflock.node.data.local_data import LocalData
from farflock.node.data.mirror import BadMirror, Mirror


@pytest.fixture
def server():
    with web_copy() as made:
        yield made


@pytest.fixture
def shard(tmp_path, server):
    tokens = np.random.default_rng(1).integers(2**16, size=3 * PIECE_BYTES // 2 + 5, dtype="<u2")
    (made,) = write_shards(tmp_path / "there", [tokens])
    server.files[made.name] = (tmp_path / "there" / made.name).read_bytes()
    return made


@pytest.fixture
def held(tmp_path):
    return LocalData("ab" * 32, (), tmp_path / "cache")


def fill(mirror, file, arrival):
    """Download all that is missing."""
    while arrival.missing:
        stream = mirror.stream(file, arrival)
        try:
            while stream.take(arrival):
                pass
        finally:
            stream.close()


def piece(server, shard, place):
    return server.files[shard.name][place * PIECE_BYTES : (place + 1) * PIECE_BYTES]


@pytest.mark.parametrize("ranges", [True, False])
def test_missing_pieces_come_with_or_without_ranges(server, shard, held, ranges):
    server.ranges = ranges
    arrival = held.arrival(shard)
    assert arrival.put(1, piece(server, shard, 1))
    fill(Mirror(f"{server.url}/copy/"), shard, arrival)
    held.arrived(shard, arrival)
    assert held.find(shard).read_bytes() == server.files[shard.name]
    wanted = [f"bytes=0-{PIECE_BYTES - 1}", f"bytes={2 * PIECE_BYTES}-{shard.size - 1}"]
    assert [asked for _, asked in server.asked] == wanted[: 2 if ranges else 1]  # all at once


def test_a_server_with_something_else_is_named(server, shard, held):
    server.files[shard.name] = bytes(shard.size)
    arrival = held.arrival(shard)
    with pytest.raises(BadMirror, match="is not the file that the run's index lists"):
        fill(Mirror(f"{server.url}/copy"), shard, arrival)
    assert len(arrival.missing) == 4
    arrival.close()


def test_a_line_that_breaks_leaves_what_has_come(server, shard, held):
    server.cut = PIECE_BYTES + 1000
    arrival = held.arrival(shard)
    with pytest.raises(BadMirror, match="broke off within piece 1; try again later"):
        fill(Mirror(f"{server.url}/copy"), shard, arrival)
    assert sorted(arrival.missing) == [1, 2, 3]
    arrival.close()


def test_a_server_without_ranges_is_read_past_what_is_here(server, shard, held):
    server.ranges = False
    arrival = held.arrival(shard)
    for place in (0, 2):
        assert arrival.put(place, piece(server, shard, place))
    stream = Mirror(f"{server.url}/copy").stream(shard, arrival)
    seen = []
    while stream.take(arrival):
        seen.append(sorted(arrival.missing))
    stream.close()
    assert seen == [[1, 3], [3], [3], []]


def test_an_empty_answer_is_no_piece(server, shard, held):
    server.files[shard.name] = b""
    with pytest.raises(BadMirror, match="broke off within piece 0"):
        fill(Mirror(f"{server.url}/copy"), shard, held.arrival(shard))


def test_a_piece_that_does_not_come_can_be_given_up_from_another_thread(server, shard, held):
    server.held = PIECE_BYTES + 1000
    arrival = held.arrival(shard)
    stream = Mirror(f"{server.url}/copy").stream(shard, arrival)
    assert stream.take(arrival)
    failed = []

    def read():
        try:
            stream.take(arrival)
        except BadMirror as error:
            failed.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.1)  # it waits for the rest of the piece
    began_s = time.monotonic()
    stream.close()
    reader.join(10)
    assert not reader.is_alive()
    assert time.monotonic() - began_s < 5  # the server would be silent for far longer
    assert failed
    assert sorted(arrival.missing) == [1, 2, 3]


def test_what_a_server_lacks_is_said(server, held, shard):
    del server.files[shard.name]
    with pytest.raises(BadMirror, match=r"cannot be had \(HTTP Error 404.*; check the URL"):
        fill(Mirror(f"{server.url}/copy"), shard, held.arrival(shard))
    with pytest.raises(BadMirror, match="cannot be had"):
        Mirror("http://127.0.0.1:9").read("index.json", 10)


def test_a_silent_server_is_given_up(monkeypatch, server):
    monkeypatch.setattr(module, "SILENT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(Serving, "do_GET", lambda self: threading.Event().wait(2))
    with pytest.raises(BadMirror, match="cannot be had"):
        Mirror(server.url).read("index.json", 10)


def test_a_small_file_is_not_read_beyond_its_limit(server):
    server.files["index.json"] = b"x" * 11
    assert Mirror(f"{server.url}/copy").read("index.json", 11) == b"x" * 11
    with pytest.raises(BadMirror, match="more than 10 bytes"):
        Mirror(f"{server.url}/copy").read("index.json", 10)


def test_redirections_lead_to_the_web_alone(server, tmp_path):
    server.files["index.json"] = b"yes"
    server.away = f"{server.url}/copy/index.json"
    assert Mirror(f"{server.url}/away").read("index.json", 10) == b"yes"
    (tmp_path / "secret").write_text("no")
    server.away = (tmp_path / "secret").as_uri()
    with pytest.raises(BadMirror, match=r"file:.*is not allowed"):
        Mirror(f"{server.url}/away").read("index.json", 10)


def test_a_secret_road_does_not_lead_to_an_open_one():
    safe, asked = module.WebRedirects("https"), urllib.request.Request("https://a/b")
    with pytest.raises(BadMirror, match="leads to http://c; name the right URL"):
        safe.redirect_request(asked, None, 302, "Found", {}, "http://c")
    assert safe.redirect_request(asked, None, 302, "Found", {}, "https://c").full_url == "https://c"


@pytest.mark.parametrize("url", ["ftp://a/b", "file:///etc", "https://", "data:x", "http:///a"])
def test_other_addresses_are_refused(url):
    with pytest.raises(BadMirror, match="is not a web address"):
        Mirror(url)
