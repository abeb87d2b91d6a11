"""A folder of prepared data behind a real web server."""

import asyncio
import functools
import http.server
import re
import threading
from pathlib import Path

import pytest
from worlds.prepared import prepared

from farflock.node.data.local_shards import table_of
from farflock.node.data.web_folder import BadWebFolder, WebFolder
from farflock.node.process.web_shards import WebShards

pytestmark = pytest.mark.net


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves ranges of files; what begins with `to/` leads elsewhere."""

    def log_message(self, *words):
        pass

    def do_GET(self):
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.split("/")[2] + ":///etc/hostname")
            self.end_headers()
            return
        raw = Path(self.translate_path(self.path)).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = map(int, asked.groups()) if asked else (0, len(raw) - 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(raw[first : last + 1])


@pytest.fixture
def content(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"text {number} of many, " * 20)
    return prepared(texts, tmp_path / "prepared", held_out=0.1).content


@pytest.fixture
def url(content):
    handler = functools.partial(Handler, directory=content.folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_all_shards_come_from_a_web_server_and_no_file_from_elsewhere(content, url):
    table = table_of(content)

    async def all_of():
        web = WebShards([WebFolder(url)], {table.root})
        return [await web.fetch(table, number) for number in range(len(table))]

    found = asyncio.run(all_of())
    assert found == [content.raw(*table.place(number)) for number in range(len(table))]
    for scheme, said in (("file", "is not allowed"), ("ftp", "which is no https address")):
        with pytest.raises(BadWebFolder, match=f"{scheme}:///etc/hostname'?,? {said}"):
            WebFolder(f"{url}/to/{scheme}").read_root()
