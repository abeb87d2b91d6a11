"""Measures for Prometheus, which fetches the newest ones over HTTP whenever it likes."""

from collections.abc import Iterator

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import CollectorRegistry

from farflock.node.sinks.measures import COUNTERS, MEANINGS, NAMES, PREFIX, Measures

Family = CounterMetricFamily | GaugeMetricFamily


class PrometheusServer:
    """The sink: an HTTP server in threads of its own. Making it binds the address, and raises
    `OSError` if that cannot be done; port 0 is any free one.

    Its names are those of `measures.prometheus_name`."""

    def __init__(self, address: str, port: int) -> None:
        self._newest: Measures | None = None
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, address, registry)

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

    def collect(self) -> Iterator[Family]:
        """Yield the newest measures, as the registry asks for them."""
        newest = self._newest
        for name in NAMES if newest is not None else ():
            if (value := getattr(newest, name)) is not None:
                yield _family(name, value)


def _family(name: str, value: float) -> Family:
    make = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
    return make(PREFIX + name, MEANINGS[name], value=value)
