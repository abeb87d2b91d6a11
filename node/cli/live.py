"""The live view: a swarm or one node as a changing table on a terminal, as plain lines elsewhere.

It shows nodes' own statuses (node/process/status.py) on standard error: standard output is for
results. It takes over the screen with the first thing to show, so that what was printed before, an
invite above all, stays.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from farflock.node.demo.demo import Child, Moment
from farflock.node.process.status import Status

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_EVERY = 0.05  # without a terminal: a line per twentieth of the run
LINE_EVERY_SHOWS = 30  # of a node: longest silence, in statuses, which come once a second
NEWS_LINES = 4
BAR_CELLS = 60

Shown = TypeVar("Shown")


@contextlib.contextmanager
def live(title: str) -> Iterator[Callable[[Moment], None]]:
    """A function that shows a demo's moments for as long as the block runs."""
    with _shown(_DemoLines(title), lambda moment: _demo_table(title, moment)) as show:
        yield show


@contextlib.contextmanager
def watching(title: str) -> Iterator[Callable[[Status], None]]:
    """A function that shows a node's statuses for as long as the block runs."""
    news = _News()
    with _shown(_NodeLines(title, news), lambda status: node_table(title, status, news)) as show:
        yield show


@contextlib.contextmanager
def _shown(
    lines: Callable[[Shown], None], render: Callable[[Shown], "RenderableType"]
) -> Iterator[Callable[[Shown], None]]:
    if not sys.stderr.isatty():
        yield lines
        return
    from rich.console import Console
    from rich.live import Live

    with contextlib.ExitStack() as stack:
        screen: Live | None = None

        def show(what: Shown) -> None:
            nonlocal screen
            if screen is None:
                screen = stack.enter_context(
                    Live(
                        console=Console(stderr=True),
                        auto_refresh=False,
                        transient=True,
                        redirect_stdout=False,
                    )
                )
            screen.update(render(what), refresh=True)

        yield show


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class _DemoLines:
    """A demo as plain lines."""

    def __init__(self, title: str) -> None:
        self._title, self._next, self._told = title, 0.0, 0

    def __call__(self, moment: Moment) -> None:
        for news in moment.news[self._told :]:
            _say(f"{self._title}: {news}")
        self._told = len(moment.news)
        if moment.share >= self._next:
            self._next = moment.share + LINE_EVERY
            losses = [
                f"{s.loss:.3f}"
                for c in moment.children
                if (s := c.status()) and s.loss is not None and not c.killed
            ]
            _say(f"{self._title}: {moment.share:4.0%}  loss of each peer {' '.join(losses)}")


class _News:
    """Peers that joined or left between two status reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._members: frozenset[str] = frozenset()

    def of(self, status: Status) -> list[str]:
        """Return what is new since the last status."""
        before, self._members = self._members, frozenset(status.members)
        new = []
        if before:
            new += [
                f"{peer[-8:]} is in from view {status.view} on"
                for peer in sorted(self._members - before)
            ]
            new += [
                f"{peer[-8:]} is out from view {status.view} on"
                for peer in sorted(before - self._members)
            ]
        self.lines = [*self.lines, *new][-NEWS_LINES:]
        return new


class _NodeLines:
    """A node as plain lines: news, one per twentieth of the run, and one now and then."""

    def __init__(self, title: str, news: _News) -> None:
        self._title, self._news = title, news
        self._next, self._silent = 0.0, 0

    def __call__(self, status: Status) -> None:
        for line in self._news.of(status):
            _say(f"{self._title}: {line}")
        self._silent += 1
        share = status.tokens / status.total_tokens
        if share >= self._next or self._silent >= LINE_EVERY_SHOWS:
            self._next, self._silent = share + LINE_EVERY, 0
            _say(f"{self._title}: {node_line(status)}")


def node_line(status: Status) -> str:
    """A node's status as one line."""
    parts = [
        f"{status.tokens / status.total_tokens:4.0%}",
        status.doing,
        *_numbers(status).values(),
    ]
    parts += [f"waits for {wait.said({})}" for wait in status.waits]
    return "  ".join(part for part in parts if part)


def _numbers(status: Status) -> dict[str, str]:
    """Return a node's measurements in words, by heading."""
    roads = sorted({partner.road for partner in status.partners if partner.road != "none"})
    applied = ", ".join(f"{count} {kind}" for kind, count in sorted(status.rounds.items()))
    return {
        "step": f"step {status.step:,}",
        "work": ", ".join(f"{count:,} {name}" for name, count in status.work.items()),
        "loss": "" if status.loss is None else f"loss {status.loss:.3f}",
        "pace": "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f} tokens/s",
        "rounds": "" if status.last_round is None else f"round {status.last_round} ({applied})",
        "members": f"{len(status.members)} members",
        "bytes": f"sent {_mb(status.sent_bytes)}, received {_mb(status.received_bytes)}",
        "roads": "/".join(roads),
    }


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def node_table(title: str, status: Status, news: _News) -> "RenderableType":
    """A node's status for a terminal: the run's bar, the numbers, one row for each other member, waits and news."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    news.of(status)
    share = status.tokens / status.total_tokens
    numbers = Table.grid(padding=(0, 2))
    for heading, said in _numbers(status).items():
        if said:
            numbers.add_row(Text(heading, style="dim"), Text(said))
    members = Table("member", "role", "life", "road", "round trip", title=None, expand=False)
    for partner in status.partners:
        trip = "" if partner.rtt_ms is None else f"{partner.rtt_ms:.0f} ms"
        members.add_row(
            *map(Text, (partner.peer[-8:], partner.role, partner.life, partner.road, trip))
        )  # Text: never markup
    waits = [Text(f"waits for {wait.said({})}", style="cyan") for wait in status.waits]
    return Group(
        Text(f"{title}: run {status.run[:8]}, {status.doing}", style="bold"),
        _bar(share),
        Text(f"{share:4.0%} of {status.total_tokens:,} tokens"),
        numbers,
        *([members] if status.partners else []),
        *waits,
        *(Text(line, style="yellow") for line in news.lines),
    )


def _bar(share: float) -> "RenderableType":
    from rich.progress_bar import ProgressBar

    return ProgressBar(total=1.0, completed=min(share, 1.0), width=BAR_CELLS)


def _demo_table(title: str, moment: Moment) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    headings = (
        "peer",
        "state",
        "step",
        "loss",
        "tokens/s",
        "round",
        "sent",
        "members",
        "road",
        "waits for",
    )
    table = Table(*headings, title=title, expand=False)
    statuses = {child.name: child.status() for child in moment.children}
    names = {status.peer: name for name, status in statuses.items() if status is not None}
    for child in moment.children:
        table.add_row(*map(Text, _row(child, statuses[child.name], names)))
    share = Text(f" {moment.share:4.0%} of the run's tokens")
    news = Text("\n".join(moment.news[-NEWS_LINES:]), style="yellow")
    return Group(table, _bar(moment.share), share, news)


def _row(child: Child, status: Status | None, names: Mapping[str, str]) -> tuple[str, ...]:
    state = (
        "killed"
        if child.killed
        else "stopped"
        if child.stopped
        else "training"
        if child.running
        else "done"
    )
    if status is None:
        return (child.name, "starting" if child.running else state, *[""] * 8)
    return (
        child.name,
        state,
        str(status.step),
        "" if status.loss is None else f"{status.loss:.3f}",
        "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f}",
        "" if status.last_round is None else str(status.last_round),
        _mb(status.sent_bytes),
        str(len(status.members)),
        "/".join(sorted({partner.road for partner in status.partners if partner.road != "none"})),
        ", ".join(wait.said(names) for wait in status.waits),
    )
