"""The choice of a newcomer between the chains of views that peers show it.

It follows each peer's views from view 0 on, each for itself. It asks many peers, and any of them
may be a stranger. What a stranger says costs no more than the check of a signature, for it cannot
sign a view; but it can repeat the first views of the run, as everybody knows them. So a chain
counts as it is only if a member of its newest view says so. If a quorum of these members does, on a
chain without a branch, the newcomer follows it at once. Otherwise it waits for other answers, and
takes the chain that the order of lines prefers:

1. one that has the view which the founder anchored last, or is too short to have it and leads to
   one that has it, if there is any that has it,
2. of these, one whose newest view has its quorum among those that answer,
3. of these, or if there is none, the one with fewer branches,
4. then the one for which more members speak, then the longer one, then the lower hash.

Sans I/O: answers and times come in, a choice comes out.
"""

from dataclasses import dataclass

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Views
from farflock.swarm.protocol import backbone, views
from farflock.swarm.protocol.views import BadView, Chain, View
from farflock.swarm.statements import AnchoredView

MEET_S = 3.0  # for further answers, after the first chain for which a member speaks
MAX_VISITS = 64  # peers whose views are followed at a time


@dataclass(slots=True)
class _Visit:
    """One peer's views as far as they are verified; its newest has the number `told`, it says."""

    chain: Chain
    told: int

    @property
    def is_complete(self) -> bool:
        return self.chain.newest.number >= self.told


@dataclass(frozen=True, slots=True)
class SpokenLine:
    """A verified chain, and the members (indices) of its newest view that speak for it."""

    chain: Chain
    voices: frozenset[int]

    @property
    def newest(self) -> View:
        """Its newest view."""
        return self.chain.newest

    @property
    def has_quorum(self) -> bool:
        """True if a quorum of its newest view speaks for it."""
        return self.newest.electorate.is_quorum(self.voices)

    @property
    def rank(self) -> tuple[bool, int, int, int, bytes]:
        """The greatest of these decides; the inverted hash stands for the lower one."""
        newest = self.newest
        inverted = bytes(255 - byte for byte in newest.hash)
        return self.has_quorum, -newest.branches, len(self.voices), newest.number, inverted

    def __str__(self) -> str:
        newest, parts = self.newest, len(self.newest.peers)
        many = "es" if newest.branches > 1 else ""
        branches = f", after {newest.branches} branch{many}" if newest.branches else ""
        return (
            f"view {newest.number} ({newest.hash.hex()[:8]}; {len(self.voices)} of its {parts} "
            f"members answer{'' if self.has_quorum else ', no quorum'}{branches})"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The line that a newcomer follows, the others that it leaves, and the founder's anchor, if
    that decided."""

    line: SpokenLine
    left: tuple[SpokenLine, ...]
    anchor: AnchoredView | None = None

    def __str__(self) -> str:
        left = " and ".join(str(line) for line in self.left)
        said = f"the run has several lines of views: follows {self.line}, and leaves {left}"
        if self.anchor is None:
            return said
        number, digest = self.anchor
        return f"{said}; the founder's anchor decided, view {number} ({digest.hex()[:8]})"


class FirstViews:
    """The views of a newcomer that follows none yet."""

    def __init__(self, run: str, founder: PeerId) -> None:
        self._run, self._founder = run, founder
        self._visits: dict[PeerId, _Visit] = {}
        self._checked: set[bytes] = set()  # links, which many peers send
        self._begun_s: float | None = None  # when the first member spoke for a chain

    def next_number(self, peer: PeerId) -> int:
        """Return the number of the next view to ask a peer for."""
        visit = self._visits.get(peer)
        return 0 if visit is None else visit.chain.newest.number + 1

    def take(self, sender: PeerId, message: Views, now_s: float) -> bool:
        """Follow a peer's views; return False if there is nothing more to ask it for.

        Raise `BadView` if they do not follow from the founder's view 0, and forget the peer's."""
        known = self._visits.pop(sender, None)
        before = -1 if known is None else known.chain.newest.number
        entries = [views.decode_certified(raw) for raw in message.views]
        begins = bool(entries) and entries[0].view.number == 0
        if begins:
            chain = backbone.begun(self._run, self._founder, entries.pop(0))
        elif known is not None:
            chain = backbone.cut(known.chain, before)
        else:
            raise BadView("these views do not begin with view 0")
        for raw in message.links:
            backbone.leap(chain, raw, self._checked)
        for entry in entries:
            chain.extend(entry)
        if known is not None and not begins and chain.newest.number < before:
            self._visits[sender] = known  # links that it has sent before lead back
            return False
        return self._note(sender, _Visit(chain, message.newest), before, now_s)

    def _note(self, peer: PeerId, visit: _Visit, before: int, now_s: float) -> bool:
        """Keep a peer's views if they are of use; return True if more are to be asked for."""
        speaks = visit.chain.newest.lists(peer)
        if visit.is_complete and not speaks:
            return False  # anybody can repeat the views of a run
        if visit.is_complete and self._begun_s is None:
            self._begun_s = now_s
        if len(self._visits) >= MAX_VISITS:
            silent = (each for each, other in self._visits.items() if not other.is_complete)
            del self._visits[next(silent, next(iter(self._visits)))]
        self._visits[peer] = visit
        return not visit.is_complete and visit.chain.newest.number > before

    def choice(self, now_s: float, anchor: AnchoredView | None = None) -> Choice | None:
        """Return the line to follow, once that is clear or the time is up; `anchor` is the
        founder's newest one."""
        if self._begun_s is None:
            return None
        lines = self._lines()
        fit = lines if anchor is None else _with(anchor, lines)
        best = max(fit, key=lambda line: line.rank, default=None)
        if best is None:
            return None
        is_short = anchor is not None and best.newest.number < anchor[0]
        is_beside = anchor is not None and not is_short and not backbone.holds(best.chain, anchor)
        is_clear = best.has_quorum and best.newest.branches == 0 and not is_beside
        if not is_clear and now_s - self._begun_s < MEET_S:
            return None
        left = tuple(line for line in lines if line is not best)
        return Choice(best, left, anchor if len(fit) < len(lines) else None)

    def _lines(self) -> list[SpokenLine]:
        """Return the chains of which no other one is the continuation, and who speaks for them."""
        whole = {peer: each.chain for peer, each in self._visits.items() if each.is_complete}
        tips = {chain.newest.hash: chain for chain in whole.values()}
        lines = []
        for digest, chain in tips.items():
            if any(_leads_to(chain, other) for at, other in tips.items() if at != digest):
                continue  # a view that a quorum of it has replaced
            same = {at for at, other in tips.items() if at == digest or _leads_to(other, chain)}
            newest = chain.newest
            speakers = (peer for peer, other in whole.items() if other.newest.hash in same)
            voices = {newest.peers.index(peer) for peer in speakers if newest.lists(peer)}
            lines.append(SpokenLine(chain, frozenset(voices)))
        return lines


def _with(anchor: AnchoredView, lines: list[SpokenLine]) -> list[SpokenLine]:
    """Return the lines that have the anchored view, and those that end before it on the way to it;
    all if none has it."""
    holding = [line for line in lines if backbone.holds(line.chain, anchor)]
    before = [
        line
        for line in lines
        if line.newest.number < anchor[0]
        and any(other.chain.by_hash(line.newest.hash) for other in holding)
    ]
    return holding + before or lines


def _leads_to(one: Chain, other: Chain) -> bool:
    """True if a chain goes on from another one's newest view without a branch."""
    newest = one.newest
    return newest.branches == other.newest.branches and other.by_hash(newest.hash) is not None
