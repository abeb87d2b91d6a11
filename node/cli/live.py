"""The live view: a swarm or one node, as a changing table on a terminal and as plain lines
elsewhere.

It shows nodes' own statuses (node/process/status.py) on standard error: standard output is for
results. It takes over the screen only when there is something to show, so that earlier output,
above all an invite, stays visible.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from farflock.node.cli import words
from farflock.node.demo.demo import Child, Moment
from farflock.node.process.status import Status

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_EVERY = 0.05  # without a terminal: one line per twentieth of the run
LEAVING_SHOWS = 6  # each of them counts for so many while it saves at its end
LINE_EVERY_SHOWS = 30  # of a node: longest silence, in statuses, which come once a second
NEWS_LINES = 4
BAR_CELLS = 40

Shown = TypeVar("Shown")


class ShowStatus(Protocol):
    """A function that shows a node's status; `view_s` is the longest wait to be admitted."""

    def __call__(self, status: Status, view_s: float | None = None) -> None: ...


@contextlib.contextmanager
def live(title: str) -> Iterator[Callable[[Moment], None]]:
    """Yield a function that shows a demo's moments for as long as the block runs."""
    with _shown(_DemoLines(title), lambda moment: _demo_table(title, moment)) as show:
        yield show


@contextlib.contextmanager
def watching(title: str) -> Iterator[ShowStatus]:
    """Yield a function that shows a node's statuses for as long as the block runs."""
    news = _News()
    with _shown(_NodeLines(title, news), lambda seen: node_table(title, seen, news)) as show:
        yield lambda status, view_s=None: show(Seen(status, view_s))


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


@dataclass(frozen=True, slots=True)
class Seen:
    """A node's status, and the longest wait to be admitted, if it is known."""

    status: Status
    view_s: float | None = None


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
                f"{child.name} {status.loss:.3f}"
                for child in moment.children
                if (status := child.status()) and status.loss is not None and not child.killed
            ]
            _say(f"{self._title}: {moment.share:4.0%}  loss: {', '.join(losses) or 'none yet'}")


class _News:
    """Changes between two status reports: peers that joined or left, a round without a partner."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.had_partner = True
        self._members: frozenset[str] = frozenset()
        self._rounds: dict[str, int] = {}

    def of(self, status: Status) -> list[str]:
        """Return the news since the last status."""
        before, self._members = self._members, frozenset(status.members)
        self._note_rounds(status.rounds)
        new = []
        if before:
            new += [f"{peer[-8:]} joined" for peer in sorted(self._members - before)]
            new += [f"{peer[-8:]} left" for peer in sorted(before - self._members)]
        self.lines = [*self.lines, *new][-NEWS_LINES:]
        return new

    def _note_rounds(self, rounds: dict[str, int]) -> None:
        """Note whether the newest rounds had a partner; without a new round nothing changes."""
        risen = {kind for kind, count in rounds.items() if count > self._rounds.get(kind, 0)}
        if risen:
            self.had_partner = risen != {"alone"}
        self._rounds = dict(rounds)


class _NodeLines:
    """A node as plain lines: its news, one line per twentieth of the run, and one line now and
    then."""

    def __init__(self, title: str, news: _News) -> None:
        self._title, self._news = title, news
        self._next, self._silent = 0.0, 0

    def __call__(self, seen: Seen) -> None:
        for line in self._news.of(seen.status):
            _say(f"{self._title}: {line}")
        self._silent += 1 if not seen.status.doing.startswith("is leaving:") else LEAVING_SHOWS
        share = seen.status.tokens / seen.status.total_tokens
        if share >= self._next or self._silent >= LINE_EVERY_SHOWS:
            self._next, self._silent = share + LINE_EVERY, 0
            _say(f"{self._title}: {node_line(seen, self._news.had_partner)}")


def node_line(seen: Seen, had_partner: bool = True) -> str:
    """Return a node's status as one line."""
    status, values = seen.status, _numbers(seen.status)
    labelled = [f"{label} {value}" for label, value in values.items() if value and label != "via"]
    fields = [
        f"{status.tokens / status.total_tokens:4.0%} of {words.short(status.total_tokens)} tokens",
        words.doing(status, seen.view_s, had_partner),
        *labelled,
        values["via"],
        *_waits(status),
    ]
    return "  ".join(field for field in fields if field)


def _numbers(status: Status) -> dict[str, str]:
    """Return a node's measurements by label, empty where there is none yet."""
    roads = sorted({words.road(each) for each in status.partners if each.road != "none"})
    pace = "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f} tokens/s"
    applied = words.rounds(status)
    return {
        "step": f"{status.step:,}",
        "work": ", ".join(f"{count:,} {name}" for name, count in status.work.items()),
        "loss": "" if status.loss is None else f"{status.loss:.3f}",
        "held out": "" if status.evaluation is None else status.evaluation.said(),
        "pace": pace,
        "round": "" if status.last_round is None else f"{status.last_round} ({applied})",
        "data": words.data(status.data),
        "run": words.several(len(status.members), "member"),
        "sent": words.size(status.sent_bytes),
        "received": words.size(status.received_bytes),
        "via": ", ".join(roads),
    }


def _waits(status: Status) -> list[str]:
    data = status.data.waits_for if status.data is not None else ""
    return [f"waiting for {wait.said({})}" for wait in status.waits] + [
        f"waiting for {each}" for each in (data,) if each
    ]


def node_table(title: str, seen: Seen, news: _News) -> "RenderableType":
    """Return a node's status for a terminal: the run's progress bar, the numbers, one row for
    each other member, the waits and the news."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    status = seen.status
    news.of(status)
    numbers = Table.grid(padding=(0, 2))
    for label, value in _numbers(status).items():
        if value:
            numbers.add_row(Text(label, style="dim"), Text(value))
    members = Table("member", "role", "state", "via", "latency", title=None, expand=False)
    for partner in status.partners:
        latency = "" if partner.rtt_ms is None else f"{partner.rtt_ms:.0f} ms"
        state, via = words.life(partner), words.road(partner)
        members.add_row(
            *map(Text, (partner.peer[-8:], partner.role, state, via, latency))
        )  # `Text`, so that it is never read as markup
    does = words.doing(status, seen.view_s, news.had_partner)
    return Group(
        Text(f"{title}: run {status.run[:8]}"),
        Text(does, style="bold"),
        _bar(status.tokens / status.total_tokens, status.total_tokens),
        numbers,
        *([members] if status.partners else []),
        *map(Text, [] if status.evaluation is None else status.evaluation.remarks()),
        *(Text(line, style="cyan") for line in _waits(status)),
        *(Text(line, style="yellow") for line in news.lines),
    )


def _bar(share: float, total_tokens: int | None = None) -> "RenderableType":
    """Return the run's bar with its share of the tokens, on one line."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    of = "the run's tokens" if total_tokens is None else f"{words.short(total_tokens)} tokens"
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1.0, completed=min(share, 1.0), width=BAR_CELLS)
    row.add_row(bar, Text(f"{share:.0%} of {of}", no_wrap=True))
    return row


def _demo_table(title: str, moment: Moment) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=None, pad_edge=False, padding=(0, 2), title_justify="left")
    table.add_column("peer", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("step", "loss", "tokens/s", "round", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    statuses = {child.name: child.status() for child in moment.children}
    names = {status.peer: name for name, status in statuses.items() if status is not None}
    for child in moment.children:
        table.add_row(*map(Text, _row(child, statuses[child.name])))
    waits = [
        Text(f"{name} is waiting for {wait.said(names)}", style="cyan")
        for name, status in statuses.items()
        if status is not None
        for wait in status.waits
    ]
    news = Text("\n".join(moment.news[-NEWS_LINES:]), style="yellow")
    members = Text(_membership([status for status in statuses.values() if status is not None]))
    return Group(table, _bar(moment.share), members, *waits, news)


def _membership(statuses: Sequence[Status]) -> str:
    """Say how many members the run has, as the node that knows the newest membership sees it."""
    newest = max(statuses, key=lambda status: status.view, default=None)
    return "" if newest is None else words.several(len(newest.members), "member")


def _row(child: Child, status: Status | None) -> tuple[str, ...]:
    state = words.peer_state(child, status)
    if status is None:
        return (child.name, state, *[""] * 5)
    return (
        child.name,
        state,
        f"{status.step:,}",
        "" if status.loss is None else f"{status.loss:.3f}",
        "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f}",
        "" if status.last_round is None else str(status.last_round),
        words.size(status.sent_bytes),
    )
