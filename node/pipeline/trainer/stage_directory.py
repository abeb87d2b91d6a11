"""A trainer's knowledge of the stages: servers, microbatches named by rounds, servers that left.

All of it is read from views and round logs, on which the peers agree; no peer is asked."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from farflock.node.train import microbatch_ids as notes
from farflock.swarm.links import PeerId
from farflock.swarm.paths.policy import StageServers
from farflock.swarm.paths.round_robin import Announced
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol import axes
from farflock.swarm.protocol.gradient_leases import GradientKey
from farflock.swarm.protocol.views import Member, View
from farflock.swarm.roles import EVERY, NOTHING

HOPE_S = 20.0  # wait for notes of a round whose servers are all gone: an onlooker may have them


@dataclass(frozen=True, slots=True)
class ServerLife:
    """One life of a peer that serves a stage; `returns` counts how often views without it came in
    between. What it had before one of them is given up (node/pipeline/lifecycle/left_out.py)."""

    peer: PeerId
    life: int
    returns: int = 0

    @property
    def name(self) -> str:
        """The unique name of this membership."""
        return f"{self.peer}/{self.life}" + (f"+{self.returns}" if self.returns else "")


@dataclass(frozen=True, slots=True)
class StreamName:
    """The stream of a stage whose notes name the microbatches that count.

    `first` is its first round, `stride` the distance between its rounds, and `share` the share of
    all microbatches that visit the stage."""

    name: str
    first: int
    stride: int
    share: Fraction = Fraction(1)


class StageDirectory:
    """The stages as one trainer sees them. `streams` are the streams by stage; `whole` says that
    full replicas serve other trainers' passes."""

    def __init__(
        self, peer: Peer, streams: Mapping[int, StreamName], *, whole: bool = True
    ) -> None:
        self._peer, self.streams, self._whole = peer, dict(streams), whole
        # by stage, the next round to read
        self._heard = {stage: stream.first for stage, stream in streams.items()}
        self._view = -1  # the number of the last view read
        # how often each life that a kept view lists has come back to the views
        self._returns: dict[tuple[PeerId, int], int] = {}
        # the stage, the server, and the first round without it
        self._leaving: list[tuple[int, ServerLife, int]] = []
        self._serving: tuple[tuple[object, ...], StageServers] | None = None
        self._skipped: list[int] = []
        # stages and gradients that rounds named as too late; the reader clears the list
        self.left_out: list[tuple[int, GradientKey]] = []
        self._silent_s: dict[int, tuple[int, float]] = {}  # a round that may be lost; since when
        # By stage and server, the weight of its contribution to the last round that took one. In
        # a count, that is the number of tokens that count and were merged nowhere.
        self._weights: dict[tuple[int, tuple[PeerId, int]], float] = {}
        self.lost_tokens = 0  # at most so many of those were left with the servers that left

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.streams)

    @property
    def epoch(self) -> int:
        """The newest round known to be over at any stage; new microbatches set out in this round.

        A stage that is behind accepts it too, since only microbatches move it forward."""
        newest = (self._peer.rounds.newest(stream.name) for stream in self.streams.values())
        return max(-1, *newest)

    def tokens(self) -> int:
        """Return the run's tokens at the slowest stage: agreed tokens divided by the stage's
        share. They are 0 while the state of a stage is on its way here."""
        rounds = self._peer.rounds
        if any(stream.name not in rounds.streams for stream in self.streams.values()):
            return 0
        return min(int(rounds.tokens(each.name) / each.share) for each in self.streams.values())

    def serving(self) -> StageServers:
        """Return the servers not known to be gone; the same object as long as nothing changes."""
        view = self._peer.context.views.newest
        listed = [self._members(view, stage) for stage in range(self.stages)]
        alive = [
            [member for member in members if self._is_asked(view, member)] for members in listed
        ]
        mark = (view.hash, *(tuple(member.peer for member in members) for members in alive))
        if self._serving is None or self._serving[0] != mark:
            stages = tuple(
                tuple(self._announced(member) for member in members) for members in alive
            )
            seniority = tuple(tuple(member.peer for member in members) for members in listed)
            self._serving = (mark, StageServers(view.number, stages, seniority, _lanes(view)))
        return self._serving[1]

    def _is_asked(self, view: View, member: Member) -> bool:
        serves_others = self._whole or member.stage != EVERY
        return serves_others and not self._peer.context.gone(view, member.peer)

    @property
    def view_number(self) -> int:
        """The number of the newest view, of which what is asked here takes account."""
        return self._peer.context.views.newest.number

    def at(self, stage: int, peer: PeerId) -> ServerLife | None:
        """Return the life of this peer that serves the stage now, or None."""
        self._follow()
        for member in self._members(self._peer.context.views.newest, stage):
            if member.peer == peer:
                return self._server(member)
        return None

    def server(self, name: str) -> ServerLife | None:
        """Return the server life with this name, or None if it is no longer a member."""
        self._follow()
        servers = map(self._server, self._peer.context.views.newest.members)
        return next((server for server in servers if server.name == name), None)

    def named(self) -> Iterator[tuple[int, list[GradientKey]]]:
        """Yield, by stage and in order, the keys of each round that closed since the last call."""
        rounds = self._peer.rounds
        for stage, stream in self.streams.items():
            while True:
                if (oldest := rounds.oldest_kept(stream.name)) > self._heard[stage]:
                    self._heard[stage] = oldest
                    self._skipped.append(stage)
                told = rounds.last_shards(stream.name, self._heard[stage])
                if told is None and not self._is_past_hope(stage, stream.name):
                    break
                self._heard[stage] += stream.stride
                if told is None:
                    self._skipped.append(stage)
                else:
                    ages = notes.joined_ages(told)
                    late = [key for key, age in ages.items() if age == notes.LATE]
                    self.left_out += [(stage, key) for key in late]
                    self._weigh(stage, self._heard[stage] - stream.stride)
                    yield stage, sorted(ages)

    def _weigh(self, stage: int, number: int) -> None:
        view = self._peer.context.views.at(number, stage)
        entry = self._peer.rounds.streams[self.streams[stage].name].entry(number)
        for member in self._members(view, stage) if view is not None else ():
            if entry is not None and member.peer in entry.weights:
                life = member.peer, member.incarnation
                self._weights[stage, life] = entry.weights[member.peer]

    def _is_past_hope(self, stage: int, name: str) -> bool:
        """True if the next round is over and all its members have been gone for `HOPE_S`: its notes
        are probably lost.

        The stage lost all its servers at that moment, and its weights with them, but other peers
        may still have heard of the round."""
        number, context = self._heard[stage], self._peer.context
        view, newest = context.views.at(number, stage), context.views.newest
        stay = view is not None and set(self._members(view, stage)).intersection(newest.members)
        if stay or number > self._peer.rounds.newest(name):
            self._silent_s.pop(stage, None)
            return False
        if self._silent_s.setdefault(stage, (number, context.now()))[0] != number:
            self._silent_s[stage] = number, context.now()
        return context.now() - self._silent_s[stage][1] >= HOPE_S

    def skipped(self) -> int | None:
        """Return a stage whose rounds were lost before this peer heard of them, or None."""
        return self._skipped.pop() if self._skipped else None

    def left(self) -> Iterator[tuple[int, str]]:
        """Yield (stage, server) for servers that left the view, once their rounds are known."""
        self._follow()
        # not before its last round is read: that round may still count what it merged
        over = [entry for entry in self._leaving if self._heard[entry[0]] >= entry[2]]
        self._leaving = [entry for entry in self._leaving if entry not in over]
        for stage, server, _ in over:
            self.lost_tokens += int(self._weights.pop((stage, (server.peer, server.life)), 0.0))
            yield stage, server.name

    def _follow(self) -> None:
        """Read the views since the last one read: who has left them, and who is back."""
        chain = [entry.view for entry in self._peer.context.views.views]
        views = [view for view in chain if view.number >= self._view]
        if views[-1].number == self._view:
            return
        for before, after in itertools.pairwise(views):
            for stage in range(self.stages):
                gone = set(self._members(before, stage)) - set(after.members)
                begins = axes.at(after.begins, stage)
                self._leaving += [
                    (stage, self._server(member), begins)
                    for member in sorted(gone, key=lambda member: member.peer)
                ]
            for life in _lives(after) - _lives(before):
                self._returns[life] = self._returns.get(life, -1) + 1
            for life in _lives(before):
                self._returns.setdefault(life, 0)
        self._view = views[-1].number
        kept = set().union(*map(_lives, chain))
        self._returns = {life: count for life, count in self._returns.items() if life in kept}

    def _server(self, member: Member) -> ServerLife:
        life = member.peer, member.incarnation
        return ServerLife(*life, self._returns.get(life, 0))

    def _members(self, view: View, stage: int) -> list[Member]:
        return [view.members[index] for index in view.serving(stage)]

    def _announced(self, member: Member) -> Announced:
        return Announced(member.peer, member.incarnation)


def _lives(view: View) -> set[tuple[PeerId, int]]:
    return {(member.peer, member.incarnation) for member in view.members}


def _lanes(view: View) -> dict[PeerId, int]:
    """Return a lane for each member, the same for all readers: those that serve nothing first, as
    they train, so that lanes of a run's trainers are numbers in a row."""
    order = sorted(view.members, key=lambda member: member.stage != NOTHING)
    return {member.peer: lane for lane, member in enumerate(order)}
