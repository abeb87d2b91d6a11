"""A web server with a copy of some files, in a thread of the test."""

import contextlib
import http.server
import threading


class Serving(http.server.BaseHTTPRequestHandler):
    """Serves `server.files`, with or without ranges, cut off after `server.cut` bytes. After
    `server.held` bytes of one answer it waits for `server.go`."""

    def do_GET(self):
        server = self.server
        server.asked.append((self.path, self.headers.get("Range")))
        if self.path.startswith("/away/"):
            self.send_response(302)
            self.send_header("Location", server.away)
            self.end_headers()
            return
        content = server.files.get(self.path.removeprefix("/copy/"))
        if content is None:
            self.send_error(404)
            return
        asked = self.headers.get("Range")
        if asked and server.ranges:
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
        self.send_response(206 if asked and server.ranges else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.send(content[: server.cut])

    def send(self, content):
        server = self.server
        with contextlib.suppress(OSError):  # the reader may be gone
            self.wfile.write(content[: server.held])
            if server.held is not None and len(content) > server.held:
                server.go.wait(30)
                self.wfile.write(content[server.held :])

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web_copy():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving) as made:
        made.files, made.asked, made.ranges, made.cut, made.away = {}, [], True, None, ""
        made.held, made.go = None, threading.Event()
        made.url = f"http://127.0.0.1:{made.server_port}"
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        made.go.set()
        made.shutdown()
