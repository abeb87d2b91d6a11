"""Measures for Prometheus, which fetches the newest ones over HTTP whenever it likes."""

import io
import socket
import threading
from collections.abc import Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from farflock.node.sinks.measures import COUNTERS, MEANINGS, NAMES, PREFIX, Measures

MAX_CLIENTS = 8  # at once
CLIENT_TIMEOUT_S = 5.0  # for each piece of a request


class PrometheusServer:
    """The sink: an HTTP server in threads of its own. Making it binds the address, and raises
    `OSError` if that cannot be done; port 0 is any free one.

    Its names are those of `measures.prometheus_name`."""

    def __init__(self, address: str, port: int) -> None:
        self._newest: Measures | None = None
        registry = CollectorRegistry()
        registry.register(self)
        self._server = _BoundedServer(address, port)
        self._server.set_app(make_wsgi_app(registry, disable_compression=True))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="prometheus", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._server.server_port)

    def write(self, measures: Measures) -> None:
        """Replace what the next fetch gets."""
        self._newest = measures

    def close(self) -> None:
        """Give the address back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yield the newest measures, as the registry asks for them."""
        newest = self._newest
        for name in NAMES if newest is not None else ():
            if (value := getattr(newest, name)) is not None:
                yield _family(name, value)


class _BoundedServer(ThreadingMixIn, WSGIServer):
    """A thread for each of a few clients: whoever reaches the address must not take all threads
    and open files of the node, or fill its terminal."""

    daemon_threads = True
    request_queue_size = MAX_CLIENTS

    def __init__(self, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._room = threading.Semaphore(MAX_CLIENTS)
        super().__init__((address, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - http's
        """Serve a client in a thread, or turn it away."""
        if self._room.acquire(blocking=False):
            request.settimeout(CLIENT_TIMEOUT_S)
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Serve a client to the end, and make room for another."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - http's
        """Say nothing: a client that breaks off harms itself alone."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of a request."""

    def get_stderr(self) -> io.StringIO:
        """Return where what a request breaks is told: nowhere."""
        return io.StringIO()


def _family(name: str, value: float) -> Metric:
    make = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
    return make(PREFIX + name, MEANINGS[name], value=value)
