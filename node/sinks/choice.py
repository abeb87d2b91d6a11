"""The sinks that a user has chosen, checked and opened before the node is in its run."""

import contextlib
import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from farflock.node.errors import Failure, Usage, nearest
from farflock.node.sinks.csv_file import CsvFile
from farflock.node.sinks.feed import Feeds, OpenSink

EVERY_S = 10.0
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
# name of `--log`, which is that of the package and of an extra too: module, whose `chosen` opens a
# sink
LOGS = {
    "tensorboard": "farflock.node.sinks.tensorboard_events",
    "wandb": "farflock.node.sinks.wandb_run",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where Prometheus finds the measures."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The sinks beside the CSV file, and the seconds between two measures."""

    logs: tuple[str, ...] = ()
    metrics: Endpoint | None = None
    every_s: float = EVERY_S


def parse_logs(text: str) -> tuple[str, ...]:
    """Return the names in a list such as `tensorboard,wandb`; raise `Usage` for an unknown one."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in LOGS:
            raise Usage("--log", f"{name[:64]!r} is not known", nearest(name, LOGS))
    return names


def parse_address(text: str) -> Endpoint:
    """Return the address in `PORT` (of loopback), `IPV4:PORT` or `[IPV6]:PORT`; raise `Usage`."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):
        known = ipaddress.ip_address(bare or LOOPBACK)
        is_spelt = (known.version == 6) == (host != bare) and (host or ":" not in text)
        if is_spelt and port.isascii() and port.isdigit() and int(port) <= MAX_PORT:
            return Endpoint(str(known), int(port))
    raise Usage(
        "--metrics", f"{text[:64]!r} is no address", f"write a port, or both as in {LOOPBACK}:9464"
    )


@contextlib.contextmanager
def feeds(options: LogOptions, say: Callable[[str], None]) -> Iterator[Feeds]:
    """Open the chosen sinks while the block runs; raise `Usage` or `Failure` if one cannot be.

    `say` is told where Prometheus finds the measures."""
    sinks: dict[str, OpenSink] = {"measures.csv": CsvFile}
    sinks |= {name: _of_extra(name) for name in options.logs}
    with contextlib.ExitStack() as stack:
        if options.metrics is not None:
            sinks["prometheus"] = _serving(options.metrics, stack, say)
        made = Feeds(sinks, options.every_s)
        stack.callback(made.close)
        yield made


def _of_extra(name: str) -> OpenSink:
    try:
        module = import_module(LOGS[name])
    except ImportError as error:
        what = f"--log {name}"
        raise Usage(what, str(error), f"run `pip install 'farflock[{name}]'`") from None
    opener: OpenSink = module.chosen()
    return opener


def _serving(
    address: Endpoint, stack: contextlib.ExitStack, say: Callable[[str], None]
) -> OpenSink:
    """Return the opener of a server that answers from now on until the stack is left."""
    from farflock.node.sinks.prometheus import PrometheusServer  # late, as it takes a while

    try:
        server = PrometheusServer(address.host, address.port)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        remedy = "choose another port, or an address of this machine"
        raise Failure(f"--metrics {address} cannot be used", why, remedy) from None
    stack.callback(server.close)
    say(f"Prometheus finds the measures at http://{Endpoint(address.host, server.port)}/metrics")
    return lambda origin: server
