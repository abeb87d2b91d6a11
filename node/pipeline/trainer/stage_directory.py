"""What a trainer knows of the stages: who serves which, what their rounds have named, and who has left for good.

All of it is read off the views and the logs of rounds, which are agreed upon; nobody is asked.
"""

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
from farflock.swarm.roles import EVERY

HOPE_S = 20.0  # for the notes of a round all of whose servers are gone: who looks on may have them


@dataclass(frozen=True, slots=True)
class ServerLife:
    """One life of a peer that serves a stage."""

    peer: PeerId
    life: int

    @property
    def name(self) -> str:
        """Names the life."""
        return f"{self.peer}/{self.life}"


@dataclass(frozen=True, slots=True)
class StreamName:
    """The stream of a stage whose notes tell which microbatches count, its first round, the distance to the next, and the share
    of all microbatches that visit the stage."""

    name: str
    first: int
    stride: int
    share: Fraction = Fraction(1)


class StageDirectory:
    """As one trainer sees them. `streams` are those of the stages, in order; `whole` says whether full replicas serve passes of
    others."""

    def __init__(self, peer: Peer, streams: Mapping[int, StreamName], *, whole: bool = True) -> None:
        self._peer, self._streams, self._whole = peer, dict(streams), whole
        self._heard = {stage: stream.first for stage, stream in streams.items()}  # the next round to hear of
        self._view = -1  # the number of the last view that was looked at
        self._leaving: list[tuple[int, ServerLife, int]] = []  # stage, who, the first round without it
        self._serving: tuple[tuple[object, ...], StageServers] | None = None
        self._skipped: list[int] = []
        self.left_out: list[
            tuple[int, GradientKey]
        ] = []  # by stage, what rounds named as too late; who reads it clears it
        self._silent_s: dict[int, tuple[int, float]] = {}  # by stage, a round that nobody may have, and since when

    @property
    def stages(self) -> int:
        """How many."""
        return len(self._streams)

    @property
    def epoch(self) -> int:
        """The last round that is known to be over at any stage: a microbatch that sets out now is as new as can be. A stage
        that is behind takes it as well, for it gets on only with what passes it."""
        return max(-1, *(self._peer.rounds.newest(stream.name) for stream in self._streams.values()))

    def tokens(self) -> int:
        """The run's, as the slowest stage has agreed upon them: of a stage that a share of the run visits, its own are that
        share."""
        return min(int(self._peer.rounds.tokens(stream.name) / stream.share) for stream in self._streams.values())

    def serving(self) -> StageServers:
        """Who serves which stage and is not known to be gone; the same object as long as nothing changes."""
        view = self._peer.context.views.newest
        listed = [self._members(view, stage) for stage in range(self.stages)]
        alive = [[member for member in members if self._is_asked(view, member)] for members in listed]
        mark = (view.hash, *(tuple(member.peer for member in members) for members in alive))
        if self._serving is None or self._serving[0] != mark:
            stages = tuple(tuple(self._announced(member) for member in members) for members in alive)
            seniority = tuple(tuple(member.peer for member in members) for members in listed)
            self._serving = (mark, StageServers(view.number, stages, seniority))
        return self._serving[1]

    def _is_asked(self, view: View, member: Member) -> bool:
        return not self._peer.context.gone(view, member.peer) and (self._whole or member.stage != EVERY)

    def at(self, stage: int, peer: PeerId) -> ServerLife | None:
        """The life of this peer that serves the stage now."""
        members = self._members(self._peer.context.views.newest, stage)
        return next((ServerLife(peer, member.incarnation) for member in members if member.peer == peer), None)

    def server(self, name: str) -> ServerLife | None:
        """The server of this name, if it is still a member."""
        members = self._peer.context.views.newest.members
        servers = (ServerLife(member.peer, member.incarnation) for member in members)
        return next((server for server in servers if server.name == name), None)

    def named(self) -> Iterator[tuple[int, list[GradientKey]]]:
        """By stage, the keys that the rounds name which were closed since the last call, in their order."""
        rounds = self._peer.rounds
        for stage, stream in self._streams.items():
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
                    self.left_out += [(stage, key) for key, age in ages.items() if age == notes.LATE]
                    yield stage, sorted(ages)

    def _is_past_hope(self, stage: int, name: str) -> bool:
        """Whether the next round is over and all who brought anything to it are gone, so long that nobody seems to have its
        notes: a stage that died out just then. Its weights are gone too, but others may have heard what I have not."""
        number, port = self._heard[stage], self._peer.context
        view, newest = port.views.at(number, stage), port.views.newest
        stay = view is not None and set(self._members(view, stage)).intersection(newest.members)
        if stay or number > self._peer.rounds.newest(name):
            self._silent_s.pop(stage, None)
            return False
        if self._silent_s.setdefault(stage, (number, port.now()))[0] != number:
            self._silent_s[stage] = number, port.now()
        return port.now() - self._silent_s[stage][1] >= HOPE_S

    def skipped(self) -> int | None:
        """A stage of whose rounds some were over, and nobody has them any more, before they were heard of."""
        return self._skipped.pop() if self._skipped else None

    def left(self) -> Iterator[tuple[int, str]]:
        """By stage, the servers that are in no view any more, once all rounds are known that they could take part in."""
        views = [entry.view for entry in self._peer.context.views.views if entry.view.number >= self._view]
        for before, after in itertools.pairwise(views):
            for stage in range(self.stages):
                gone = set(self._members(before, stage)) - set(after.members)
                self._leaving += [
                    (stage, ServerLife(member.peer, member.incarnation), axes.at(after.begins, stage))
                    for member in sorted(gone, key=lambda member: member.peer)
                ]
        self._view = views[-1].number
        over = [entry for entry in self._leaving if self._heard[entry[0]] >= entry[2]]
        self._leaving = [entry for entry in self._leaving if entry not in over]
        yield from ((stage, server.name) for stage, server, _ in over)

    def _members(self, view: View, stage: int) -> list[Member]:
        return [view.members[index] for index in view.serving(stage)]

    def _announced(self, member: Member) -> Announced:
        return Announced(member.peer, member.incarnation)
