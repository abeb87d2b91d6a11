"""What a web server says is believed no more than what a peer says, and each fault has a remedy."""

import email.message
import io
import ssl
import urllib.error
from itertools import count

import pytest
from worlds.prepared import prepared

from farflock.node.data.local_shards import table_of
from farflock.node.data.web_folder import BadWebFolder, ShardFiles, WebFolder

URL = "https://data.example/plays"


class Answer(io.BytesIO):
    """What a server answers, so many bytes at a time."""

    def __init__(self, raw, status=206, kind="application/octet-stream", at_once=1 << 20):
        super().__init__(raw)
        self.status, self.at_once = status, at_once
        self.headers = email.message.Message()
        self.headers["Content-Type"] = kind

    def read1(self, size):
        return super().read1(min(size, self.at_once))


class Opener:
    """Answers each request the same way, or fails."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def open(self, request, timeout):
        self.asked.append((request.full_url, request.get_header("Range"), timeout))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def asked_of(answer, now_s=lambda: 0.0):
    return WebFolder(URL + "/", Opener(answer), now_s).range("tokens/a.bin", 10, 4)


def test_a_part_of_a_file_is_asked_for():
    opener = Opener(Answer(b"abcd", at_once=1))
    assert WebFolder(URL + "/", opener).range("tokens/a.bin", 10, 4) == b"abcd"
    assert opener.asked == [(f"{URL}/tokens/a.bin", "bytes=10-13", 30.0)]


def test_no_more_is_read_than_was_asked_for():
    assert asked_of(Answer(b"abcdefgh")) == b"abcd"


NOT_VALID = ssl.SSLCertVerificationError(1, "certificate verify failed")
NOT_VALID.verify_message = "certificate has expired"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(b"abcdefgh", status=200), "comes whole .*; name a server that serves ranges"),
        (Answer(b"ab"), "a.bin broke off; it is asked again later"),
        (urllib.error.HTTPError(URL, 404, "Not Found", {}, None), r"404.*; check the address"),
        (urllib.error.URLError(NOT_VALID), r"its certificate is not valid: certificate has exp"),
        (urllib.error.URLError(TimeoutError("timed out")), r"not a byte for 30 s\)"),
        (urllib.error.URLError("no route"), "cannot be had .*no route.*; check the address"),
    ],
)
def test_what_does_not_serve_is_said_with_a_remedy(answer, said):
    with pytest.raises(BadWebFolder, match=said):
        asked_of(answer)


def test_a_server_that_sends_a_byte_now_and_then_is_given_up():
    clock = count(0, 100.0)
    with pytest.raises(BadWebFolder, match="slower than 300 s for 4 bytes"):
        asked_of(Answer(b"abcd", at_once=1), lambda: next(clock))


def test_a_web_page_is_no_index():
    folder = WebFolder(URL, Opener(Answer(b"<html>", 200, "text/html; charset=utf-8")))
    with pytest.raises(BadWebFolder, match=r"index.json is a web page; name the address under"):
        folder.read_root()


def test_shards_lie_where_a_prepared_folder_has_them(small, texts, tmp_path):
    content = prepared(texts, tmp_path / "out", held_out=0.1).content
    table = table_of(content)
    files = ShardFiles(table)
    assert table.train < len(table)
    for number in range(len(table)):
        place = content.place(*table.place(number))
        assert files.place(number) == (str(place.path.relative_to(content.folder)), place.offset)
