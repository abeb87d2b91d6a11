"""Invariants of runs whose keys come back (docs/decisions/039-a-return.md), checked from outside.

There may be several chains of views, one after another or at once, so a round has its number and
the *line* to which it belongs: the last branch, return or start of the run before it in its chain.
In each line the invariants of invariants.py hold; where one line follows another, tokens and states
go on from the last round before it, so what a return gave up never counts afterwards. Besides:

- a key acts in no view after one whose return it signs later, nor does a founder start its run
  again while others are in it, unless it has waited for them. What they knew, their folders know:
  only one that a disaster put back to an older state may have forgotten a view;
- no return is made while a quorum of the lives that its parent lists is alive, nor while a key is
  there in two lives;
- a return gives up no round of its chain that one of its signers has on its disk.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from farflock.node.assembly.coming_back import VIEW
from farflock.node.assembly.resume import cursors_of
from farflock.node.simulate.homes import Home
from farflock.node.simulate.invariants import InvariantChecker, LifeId, RoundId
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.driver import Driver
from farflock.optimizers.method import Exchange, Result
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.protocol.views import Chain, View

HEARD_S = 3.0  # within which a life that has begun is heard by the others


class ReturnsChecker(InvariantChecker):
    """A record of all chains of views, and of what lives do in them. `living` yields the homes that
    somebody lives in."""

    def __init__(
        self, arm: str, peers: Sequence[str], living: Callable[[], Iterable[Home]]
    ) -> None:
        super().__init__(arm, peers)
        self.returns: list[View] = []
        self.counted_s: dict[str, float] = {}  # when a key's work was last in a round
        self.damaged: set[str] = set()  # keys with a folder that was put back, or copied
        self.put_back: set[str] = set()  # likewise, but others know the newest view, and say so
        self._living = living
        self._views: dict[bytes, View] = {}  # by hash
        self._parents: dict[bytes, View] = {}  # by hash of the view after it
        self._lines: dict[bytes, bytes] = {}  # hash of a line's first view, by that of any of it
        self._at: dict[LifeId, Peer] = {}
        self._known: dict[LifeId, Collection[bytes]] = {}  # hashes of the views of a life's chain
        self._acted: dict[tuple[str, bytes], None] = {}  # (key, hash of the view of a round)
        self._offered: set[tuple[LifeId, RoundId]] = set()
        self._decided: dict[tuple[LifeId, RoundId], RoundId] = {}  # names of results, once decoded
        self._others: dict[str, set[str]] = {}  # in the newest view of a key, without goodbyes
        self._saved: dict[str, tuple[int, bytes]] = {}  # first round that is not in it, and view
        self._resumed: set[LifeId] = set()  # they started the run again from a checkpoint

    def life(self, home: Home) -> LifeId:
        """Return the life that goes on in a home."""
        return self._peers[home.number], home.birth

    # rounds and lives

    def place(self, life: LifeId, stream: str, number: int) -> RoundId:
        """Return the name of a round as this life knows it, with its line."""
        view = self._view(life, number)
        return (stream if view is None else f"{stream}/{self._line(view).hex()[:6]}"), number

    def is_again(self, life: LifeId, key: RoundId) -> bool:
        """True if a life has offered this round of its line before."""
        peer = self._at.get(life)
        if peer is not None and peer.branching.adrift:
            return False  # of a chain that this life has given up: it is sent to nobody
        offered = life, self.place(life, *key)
        again = offered in self._offered
        self._offered.add(offered)
        return again

    def counted_of(
        self, life: LifeId, key: RoundId, peer: str, sent: Collection[LifeId]
    ) -> LifeId | None:
        """Return the life in which a participant counts: the one that the round's view lists."""
        view = None if self._pairs_only else self._view(life, key[1])
        if view is None or not view.lists(peer):
            return super().counted_of(life, key, peer, sent)
        listed = peer, view.members[view.peers.index(peer)].incarnation
        if listed not in sent:
            self.violate(f"{key} counts {peer}, whose life {listed[1]} has sent nothing to it")
        return listed if listed in sent else None

    def _view(self, life: LifeId, number: int) -> View | None:
        """Return the view of a round, as a life knows it; in pairs, that of the moment."""
        peer = self._at.get(life)
        chain = peer.context.chain if peer is not None else None
        if chain is None or number < 0:
            return None
        view = chain.newest if self._pairs_only else chain.at(number)
        if view is not None and view.hash not in self._views:
            self._note(chain)
        return view

    def _line(self, view: View) -> bytes:
        """Return the hash of the first view of this view's line."""
        if view.hash not in self._lines:
            before = self._parents.get(view.hash)
            begins = before is None or view.parts_from(before)
            self._lines[view.hash] = view.hash if begins or before is None else self._line(before)
        return self._lines[view.hash]

    def _back(self, view: View) -> Iterator[View]:
        """Yield a view and those before it in its chain, newest first."""
        at: View | None = view
        while at is not None:
            yield at
            at = self._parents.get(at.hash)

    # what homes say

    def kept(self, home: Home, chain: Chain) -> None:
        """Note the views that a life has put on its disk. Those that it knew and that are not among
        them are of a chain that it has given up, which binds it no more."""
        life, now = self.life(home), dict.fromkeys(entry.view.hash for entry in chain.views)
        if home.session is not None:
            self._at[life] = home.session.peer
        for digest in self._known.get(life, ()):
            if digest not in now:
                self._acted.pop((life[0], digest), None)
        self._known[life] = now
        self._others[life[0]] = {*chain.newest.peers} - {life[0], *chain.goodbyes}
        self._note(chain)

    def enters(self, home: Home, saved: Checkpoint | None) -> None:
        """Note what a life has on its disk."""
        life = self.life(home)
        self._saved.pop(life[0], None)
        assert home.part is not None
        if saved is not None:
            self._resumed.add(life)  # until it is known that it joins
        under, streams = saved.meta.get(VIEW) if saved else None, home.part.loop.driver.streams
        if saved is None or not isinstance(under, str) or not streams:
            return
        rounds = cursors_of(saved).place.rounds
        first = min(rounds[each.key.stream] + each.stride for each in streams)
        if first > 0:
            self._saved[life[0]] = first, bytes.fromhex(under)

    def founds(self, home: Home) -> None:
        """Check that a founder which starts its run again at once knew of nobody else in it."""
        key = self._peers[home.number]
        if (others := self._others.get(key)) and key not in self.damaged | self.put_back:
            names = sorted(other[-6:] for other in others)
            self.violate(f"{key[-6:]} starts the run again, and does not ask {names}")

    def entered(self, home: Home) -> None:
        """Compare the state with which a life begins with that of all who were there before."""
        assert home.part is not None
        life, driver = self.life(home), home.part.loop.driver
        if home.part.before is not None:
            self._resumed.discard(life)
        self._trained[life] += driver.position.own_tokens  # that it has resumed with
        self.compare_exact(home)

    def compare_exact(self, home: Home) -> None:
        """Require of an exact method that a life's state is that of all which have applied the same
        rounds; between two rounds too, as local steps do not change it."""
        assert home.part is not None
        driver = home.part.loop.driver
        if self._equality == "exact":
            self.compare(home.number, self.life(home), driver, driver.position.rounds)

    # what nodes do

    def reported(
        self,
        index: int,
        birth: int,
        driver: Driver,
        kind: str,
        fields: Mapping[str, object],
        rounds: Mapping[str, int] | None = None,
    ) -> None:
        """Record a node's report, and whose work a round has counted."""
        life = self._peers[index], birth
        if life in self._resumed and kind == "round" and fields["status"] == "failed":
            return  # an exchange that was open at the checkpoint; the round is made again
        if kind == "round" and self._is_of_another_chain(life, fields):
            return  # it waited to be applied; since then, the life has given its chain up
        super().reported(index, birth, driver, kind, fields, rounds)
        if kind in ("round", "adopt"):
            self._saved.pop(self._peers[index], None)
        participants = fields.get("participants")
        if kind == "round" and isinstance(participants, list) and fields["status"] != "failed":
            now_s = asyncio.get_running_loop().time()
            self.counted_s.update(dict.fromkeys(participants, now_s))

    def _is_of_another_chain(self, life: LifeId, fields: Mapping[str, object]) -> bool:
        """Return whether the result of a round is of another line than the one to which the round
        belongs now."""
        stream, number = fields["stream"], fields["round"]
        assert isinstance(stream, str)
        assert isinstance(number, int)
        now = self.place(life, stream, number)
        return self._decided.pop((life, (stream, number)), now) != now

    def _check_result(self, index: int, life: LifeId, key: RoundId, result: Result) -> None:
        super()._check_result(index, life, key, result)
        self._decided[life, key] = self.place(life, *key)
        view = self._view(life, key[1])
        if view is not None and result.status != "failed" and life[0] in result.participants:
            self._acted[life[0], view.hash] = None

    def _check_feedback(self, index: int, life: LifeId, driver: Driver, exchange: Exchange) -> None:
        if life not in self._resumed:  # of which the residual is not known here
            super()._check_feedback(index, life, driver, exchange)

    # views

    def _note(self, chain: Chain) -> None:
        known = [entry.view for entry in chain.views]
        self._views.setdefault(known[0].hash, known[0])
        for before, view in itertools.pairwise(known):
            if view.hash in self._parents:
                continue
            self._views[view.hash], self._parents[view.hash] = view, before
            if view.parts_from(before):
                self._give_up(before, view.first_round)
            if view.previous == before.return_mark:
                self.returns.append(view)
                self._check_return(before, view)

    def _give_up(self, before: View, first: int) -> None:
        """Count no tokens of the line of a view from this round on: it goes on in another line, to
        which whoever lives on brings the same work."""
        line = f"/{self._line(before).hex()[:6]}"
        for stream, number in list(self._counted):
            if stream.endswith(line) and number >= first:
                self._credit.subtract(self._counted.pop((stream, number)))

    def _check_return(self, parent: View, made: View) -> None:
        """Check a return that somebody has just learned of, before anybody acts in it."""
        for key, digest in self._acted:
            later = list(
                itertools.takewhile(lambda v: v is not parent, self._back(self._views[digest]))
            )
            is_after = later and self._parents.get(later[-1].hash) is parent
            if key in made.peers and key not in self.damaged and is_after:
                self.violate(
                    f"{key[-6:]} acted in view {self._views[digest].number}, and signed a return of"
                    f" view {parent.number} after that"
                )
        homes = list(self._living())
        lives = {self.life(home) for home in homes}
        there = {
            place
            for place, member in enumerate(parent.members)
            if (member.peer, member.incarnation) in lives
        }
        if is_quorum(there, len(parent.members)):
            self.violate(f"a return of view {parent.number} was made while {there} of it lived")
        self._check_lives(parent, made, homes)
        self._check_rounds(parent, made)

    def _check_lives(self, parent: View, made: View, homes: Sequence[Home]) -> None:
        """Check that no key of a return was heard in two lives."""
        now_s = asyncio.get_running_loop().time()
        for key in made.peers:
            mine = [home for home in homes if self._peers[home.number] == key]
            heard = [home for home in mine if now_s - home.began_s >= HEARD_S]
            chains = [home.session.peer.context.chain for home in heard if home.session]
            if sum(chain is not None and chain.newest in (parent, made) for chain in chains) > 1:
                self.violate(f"a return lists {key[-6:]}, which was there in two lives")

    def _check_rounds(self, parent: View, made: View) -> None:
        """Check that a return begins after all rounds of its chain that its signers have saved."""
        for key, (first, under) in self._saved.items():
            of_round = (view for view in self._back(parent) if view.first_round < first)
            belongs = (view := next(of_round, None)) is not None and view.hash == under
            if key in made.peers and belongs and made.first_round < first:
                self.violate(
                    f"a return begins with round {made.first_round}, but {key[-6:]} has saved all"
                    f" rounds before {first}"
                )
