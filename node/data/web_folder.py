"""Shards from a web server or an object store that has a copy of a prepared folder.

What it sends is believed no more than what a peer sends: whoever asks compares each shard with its
hash. A range of a file is asked for, as plain HTTP has it, so any server of static files will do.
"""

import http.client
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from typing import IO

from farflock import __version__
from farflock.node.data.folder import lay_out
from farflock.node.data.index import INDEX_NAME, SPLITS, root_of
from farflock.node.data.shard_table import ShardTable
from farflock.node.data.shard_writer import label_of, token_file
from farflock.swarm.messages import MAX_CHUNK_BYTES

SILENT_S = 30.0  # without a byte
SHARD_S = 300.0  # for one shard, however slowly it comes
READ_BYTES = 1 << 16


class BadWebFolder(Exception):
    """A server that does not serve what was asked for; the message names the remedy."""


class WebFolder:
    """A copy of a prepared folder at a URL. `root` is that of its index, once it was read."""

    def __init__(
        self,
        url: str,
        opener: urllib.request.OpenerDirector | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url, self.root, self._now_s = url.rstrip("/"), "", now_s
        redirects = _Redirects(urllib.parse.urlsplit(url).scheme)
        self._opener = opener or urllib.request.build_opener(redirects)

    def read_root(self) -> str:
        """Return the root of the data that are there; raise `BadWebFolder` if it serves none."""
        if not self.root:
            with self._open(INDEX_NAME, {}) as answer:
                if answer.headers.get_content_type() == "text/html":
                    raise BadWebFolder(
                        f"{self.url}/{INDEX_NAME} is a web page; name the address under which the "
                        "files of a prepared folder lie"
                    )
                self.root = root_of(self._body(answer, MAX_CHUNK_BYTES + 1))
        return self.root

    def range(self, name: str, offset: int, size: int) -> bytes:
        """Return a part of a file, unverified; raise `BadWebFolder` if it does not come whole."""
        asked = {"Range": f"bytes={offset}-{offset + size - 1}"}
        with self._open(name, asked) as answer:
            if answer.status != HTTPStatus.PARTIAL_CONTENT:
                raise BadWebFolder(
                    f"{self.url}/{name} comes whole where a part of it was asked for; name a server"
                    " that serves ranges of files"
                )
            raw = self._body(answer, size)
        if len(raw) < size:
            raise BadWebFolder(f"{self.url}/{name} broke off; it is asked again later")
        return raw

    def _open(self, name: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        url = f"{self.url}/{name}"
        request = urllib.request.Request(
            url, headers={"User-Agent": f"farflock/{__version__}", **headers}
        )
        try:
            answer: http.client.HTTPResponse = self._opener.open(request, timeout=SILENT_S)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BadWebFolder(f"{url} cannot be had ({_said(error)}); check the address") from None
        return answer

    def _body(self, answer: http.client.HTTPResponse, size: int) -> bytes:
        """Return up to so many bytes of an answer, as far as it comes."""
        raw, ends_s = bytearray(), self._now_s() + SHARD_S
        try:
            while len(raw) < size and (data := answer.read1(min(READ_BYTES, size - len(raw)))):
                raw += data
                if self._now_s() >= ends_s:
                    raise TimeoutError(f"slower than {SHARD_S:.0f} s for {size:,} bytes")
        except (OSError, http.client.HTTPException) as error:
            raise BadWebFolder(
                f"{self.url} broke off ({_said(error)}); it is asked again later"
            ) from None
        return bytes(raw)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections to the same scheme, and to https."""

    def __init__(self, scheme: str) -> None:
        self._allowed = {scheme, "https"}

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the request that follows a redirection; raise `BadWebFolder` if it may not."""
        if urllib.parse.urlsplit(newurl).scheme not in self._allowed:
            raise BadWebFolder(
                f"{req.full_url} leads to {newurl[:200]}, which is no https address; name the one "
                "at which the files lie"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _said(error: Exception) -> str:
    """Return what went wrong, in words."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {reason.verify_message}"
    if isinstance(reason, TimeoutError) and "slower" not in str(reason):
        return f"not a byte for {SILENT_S:.0f} s"
    return str(error)


class ShardFiles:
    """Where in which file of a prepared folder each shard of a table lies."""

    def __init__(self, table: ShardTable) -> None:
        width, first = table.index.token_type.itemsize, 0
        self._places = list[tuple[str, int]]()
        for split in SPLITS:
            for number, increment in enumerate(table.index.increments):
                last = first + increment.split(split).shards
                files, offsets, _ = lay_out(list(map(table.tokens, range(first, last))), width)
                label = label_of(number, split)
                self._places += [
                    (token_file(label, file), offset)
                    for file, offset in zip(files, offsets, strict=True)
                ]
                first = last

    def place(self, number: int) -> tuple[str, int]:
        """Return the name of a shard's file, and its first byte there."""
        return self._places[number]
