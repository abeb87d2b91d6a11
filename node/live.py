"""The live view: what a swarm does, on a terminal as a table that changes, elsewhere as plain lines."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from farflock.node.demo import Child, Moment
from farflock.node.status import Status

if TYPE_CHECKING:
    from rich.console import Group

LINE_EVERY = 0.05  # of the run: without a terminal, a line for each twentieth


@contextlib.contextmanager
def live(title: str) -> Iterator[Callable[[Moment], None]]:
    """A function that shows moments for as long as the block runs."""
    if sys.stderr.isatty():
        with _table(title) as show:
            yield show
    else:
        yield _Lines(title)


class _Lines:
    """Plain lines on standard error."""

    def __init__(self, title: str) -> None:
        self._title, self._next, self._told = title, 0.0, 0

    def __call__(self, moment: Moment) -> None:
        for news in moment.news[self._told :]:
            sys.stderr.write(f"{self._title}: {news}\n")
        self._told = len(moment.news)
        if moment.share >= self._next:
            self._next = moment.share + LINE_EVERY
            losses = [
                f"{s.loss:.3f}" for c in moment.children if (s := c.status()) and s.loss is not None and not c.killed
            ]
            sys.stderr.write(f"{self._title}: {moment.share:4.0%}  loss of each peer {' '.join(losses)}\n")
            sys.stderr.flush()


@contextlib.contextmanager
def _table(title: str) -> Iterator[Callable[[Moment], None]]:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as screen:
        yield lambda moment: screen.update(_render(title, moment))


def _render(title: str, moment: Moment) -> "Group":
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table("peer", "state", "step", "loss", "sent", "members", "road", "waits for", title=title, expand=False)
    for child in moment.children:
        table.add_row(*_row(child, child.status(), moment))
    share = Text(f" {moment.share:4.0%} of the run's tokens")
    news = Text("\n".join(moment.news[-4:]), style="yellow")
    return Group(table, ProgressBar(total=1.0, completed=min(moment.share, 1.0), width=60), share, news)


def _row(child: Child, status: Status | None, moment: Moment) -> tuple[str, ...]:
    state = "killed" if child.killed else "stopped" if child.stopped else "training" if child.running else "done"
    if status is None:
        return (child.name, "starting" if child.running else state, "", "", "", "", "", "")
    names = {s.peer: c.name for c in moment.children if (s := c.status()) is not None}
    waits = ", ".join(f"{names.get(peer, peer[-6:])} ({w.left_s:.0f} s)" for w in status.waits for peer in w.whom)
    roads = "/".join(sorted({partner.road for partner in status.partners if partner.road != "none"}))
    loss = "" if status.loss is None else f"{status.loss:.3f}"
    mb = f"{status.sent_bytes / 1e6:.1f} MB"
    return (child.name, state, str(status.step), loss, mb, str(len(status.members)), roads, waits)
