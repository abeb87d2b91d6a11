"""Files of the data from a web server or an object store that holds a copy of a prepared folder.

What it serves is believed no more than what a peer sends: each piece is compared with its hash. A
file is read piece by piece, so that its reader can end between two of them, or within one.
"""

import contextlib
import http.client
import os
import socket
import urllib.error
import urllib.parse
import urllib.request
from typing import IO

from farflock import __version__
from farflock.node.data.index import PIECE_BYTES
from farflock.node.data.local_data import Arrival, NamedFile

SILENT_TIMEOUT_S = 30.0  # without a byte
SCHEMES = ("http", "https")


class BadMirror(ValueError):
    """A server that does not serve what was asked for; the message names the remedy."""


class Mirror:
    """A copy of a prepared folder at an http or https URL."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise BadMirror(
                f"{url[:200]!r} is not a web address; write it as in https://example.org/plays"
            )
        self.url = url.rstrip("/")
        self._opener = urllib.request.build_opener(WebRedirects(parts.scheme))

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return a small file; raise `BadMirror` if it is larger than `max_bytes`, or not there."""
        with self._open(name, {}) as answer:
            content: bytes = answer.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise BadMirror(f"{self.url}/{name} has more than {max_bytes:,} bytes; check the URL")
        return content

    def stream(self, file: NamedFile, arrival: Arrival) -> "MirrorStream":
        """Ask for the first missing pieces of a file that follow one another; raise `BadMirror` if
        the server has none."""
        first = stop = min(arrival.missing)
        while stop in arrival.missing:
            stop += 1
        last = min(stop * PIECE_BYTES, file.size) - 1
        answer = self._open(file.name, {"Range": f"bytes={first * PIECE_BYTES}-{last}"})
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            first, stop = 0, max(arrival.missing) + 1
        return MirrorStream(answer, f"{self.url}/{file.name}", file.size, range(first, stop))

    def _open(self, name: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        request = urllib.request.Request(
            f"{self.url}/{name}", headers={"User-Agent": f"farflock/{__version__}", **headers}
        )
        try:
            answer: http.client.HTTPResponse = self._opener.open(request, timeout=SILENT_TIMEOUT_S)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BadMirror(f"{self.url}/{name} cannot be had ({error}); check the URL") from None
        return answer


class MirrorStream:
    """Pieces of a file of `size` bytes on their way from a web server, in order.

    A server without ranges sends the file from its beginning: what is here already is read past."""

    def __init__(
        self, answer: http.client.HTTPResponse, url: str, size: int, places: range
    ) -> None:
        self._answer, self._url, self._size = answer, url, size
        self._places = iter(places)
        # A second name of the connection, by which another thread than the reader's can end it. An
        # empty answer has none any more.
        closed = answer.isclosed()
        self._line = None if closed else socket.socket(fileno=os.dup(answer.fileno()))

    def take(self, arrival: Arrival) -> bool:
        """Read the next piece into the arrival; return False if there is none. Raise `BadMirror`
        if it is not the right one, or does not come."""
        place = next(self._places, None)
        if place is None:
            return False
        size = min(PIECE_BYTES, self._size - place * PIECE_BYTES)
        try:
            piece = self._answer.read(size)
        except (OSError, http.client.HTTPException) as error:
            raise BadMirror(f"{self._url} broke off ({error}); try again later") from None
        if len(piece) < size:
            raise BadMirror(f"{self._url} broke off within piece {place}; try again later")
        if place in arrival.missing and not arrival.put(place, piece):
            raise BadMirror(
                f"{self._url} is not the file that the run's index lists; "
                "name a copy of the same folder"
            )
        return True

    def close(self) -> None:
        """End the connection. A piece that is being read in another thread does not come."""
        if self._line is not None:
            with contextlib.suppress(OSError):  # the server may have ended it
                self._line.shutdown(socket.SHUT_RDWR)
            self._line.close()
        self._answer.close()


class WebRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections to http and https, but never from https to http."""

    def __init__(self, scheme: str) -> None:
        self._allowed = ("https",) if scheme == "https" else SCHEMES

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the request that follows a redirection; raise `BadMirror` if it may not."""
        if urllib.parse.urlsplit(newurl).scheme not in self._allowed:
            raise BadMirror(f"{req.full_url} leads to {newurl[:200]}; name the right URL")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
