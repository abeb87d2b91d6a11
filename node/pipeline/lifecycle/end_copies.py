"""Exact copies of an end stage's tensors outside its layers, kept at the neighbouring stage.

No other stage has an embedding or a head, so a lost one could not be rebuilt from the stage's
neighbours (CheckFree+, Blagoev et al., arXiv:2506.15461, section 3.2).

At a fixed interval of an end stage's rounds, `KEEPERS` servers of the neighbouring stage
download its embedding, or its norm and head, as its members would evaluate them. They serve
these to a peer that takes over the stage when all its servers are lost. The copy is exact as of
the round that it names. The paper copies after each step to all nodes of the neighbour; here
that would be many."""

import asyncio
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflock.node.model.llama import ModelConfig
from farflock.node.pipeline.recovery.rebuild import EndCopy, Unrecoverable, end_shapes
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.train.driver import Driver
from farflock.node.train.state_sync import CorruptSnapshot, StateSync, decode_state, encode_state
from farflock.swarm.links import PeerId
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import Snapshot, SnapshotUnavailable

OWN, KEPT = "end", "kept end"  # snapshot names: at an end's servers, and at the keepers
KEEPERS = 2  # enough to survive the loss of one; each download costs the end stage's uplink
LOOK_EVERY_S = 0.5
FETCH_TIMEOUT_S = 60.0
FIND_TIMEOUT_S = 5.0  # short: a copy that no peer has must not hold up the start of the stage
HEAD_BYTES = 1 << 16  # bound on the names and shapes before the values


def ends_beside(index: int, stages: int) -> tuple[int, ...]:
    """Return the first and last stages that are next to this one."""
    return tuple(end for end in sorted({0, stages - 1}) if abs(end - index) == 1)


class EndCopies:
    """One stage server's part in the copies: it serves its own end, if it has one, and keeps
    copies of the neighbouring ends. `streams` has the name of each stage's stream."""

    def __init__(
        self,
        peer: Peer,
        index: int,
        driver: Driver,
        state_sync: StateSync,
        plan: RunPlan,
        pipeline: PipelinePlan,
        streams: Mapping[int, str],
    ) -> None:
        self._peer, self._index, self._driver, self._state_sync = peer, index, driver, state_sync
        self._streams, self._every = dict(streams), pipeline.end_copies
        self._config, self._spans = plan.model, pipeline.stages
        self._beside = ends_beside(index, len(streams))
        self._copies: dict[int, EndCopy] = {}
        self._next = dict.fromkeys(self._beside, 0)  # the first round to copy next

    async def run(self) -> None:
        """Serve and keep copies forever."""
        index = self._index
        if index in (0, len(self._streams) - 1):
            self._peer.snapshots.serve(
                f"{OWN}/{index}", self._own, lambda: self._state_sync.applied_round
            )
        while True:
            for end in self._beside:
                is_due = self._peer.rounds.newest(self._streams[end]) >= self._next[end]
                if is_due and self._is_keeper():
                    await self.keep(end)
            await asyncio.sleep(LOOK_EVERY_S)

    async def keep(self, end: int) -> None:
        """Fetch a newer copy of this end, and serve it; if no server answers, keep the old one."""
        newest = self._peer.rounds.newest(self._streams[end])
        try:
            wanted = _Wanted(self._config, self._spans[end])
            snapshot = await wanted.fetch(self._peer, f"{OWN}/{end}", FETCH_TIMEOUT_S, newest, end)
            tensors = wanted.tensors(snapshot)
        except (SnapshotUnavailable, CorruptSnapshot):
            return  # its servers are leaving or busy: ask again later
        self._next[end] = snapshot.round + self._every
        if end not in self._copies:
            self._peer.snapshots.serve(
                f"{KEPT}/{end}", lambda: self._offered(end), lambda: self._copies[end].round
            )
        self._copies[end] = EndCopy.of(snapshot.round, tensors)

    async def _own(self) -> Snapshot:
        driver, state_sync = self._driver, self._state_sync

        def now() -> Snapshot:
            copy = EndCopy.of(state_sync.applied_round, driver.method.eval_params(driver.replica))
            return encode_state(dict(copy.tensors), copy.round, 0)

        return await state_sync.leaving(now)

    async def _offered(self, end: int) -> Snapshot:
        copy = self._copies[end]
        return encode_state(copy.restored(), copy.round, 0)

    def _is_keeper(self) -> bool:
        """True if this peer has one of the stage's `KEEPERS` lowest ranks, which seldom change."""
        view, context = self._peer.context.views.newest, self._peer.context
        mates = [view.peers[index] for index in view.serving(self._index)]
        living = [mate for mate in mates if mate == context.me or not context.gone(view, mate)]
        return context.me in sorted(living, key=_rank)[:KEEPERS]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The tensors expected from an end stage: nothing larger is downloaded, and nothing else is
    kept."""

    config: ModelConfig
    span: range

    async def fetch(
        self, peer: Peer, name: str, timeout_s: float, min_round: int, stage: int
    ) -> Snapshot:
        shapes = end_shapes(self.config, self.span).values()
        most = HEAD_BYTES + 4 * sum(math.prod(shape) for shape in shapes)
        return await peer.snapshots.fetch(
            name, timeout_s, min_round=min_round, stage=stage, max_bytes=most
        )

    def tensors(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """Decode the tensors; raise `CorruptSnapshot` unless they are exactly these, in float32."""
        found = decode_state(snapshot)
        shapes = {name: tuple(x.shape) for name, x in found.items()}
        is_float32 = all(x.dtype == torch.float32 for x in found.values())
        if not is_float32 or shapes != end_shapes(self.config, self.span):
            raise CorruptSnapshot(
                f"the copy of round {snapshot.round} holds other tensors than its stage has"
            )
        return found


def _rank(peer: PeerId) -> bytes:
    return hashlib.sha256(f"farflock-keeper-v1 {peer}".encode()).digest()


async def find_copy(
    peer: Peer, config: ModelConfig, stages: Sequence[range], index: int
) -> dict[str, Tensor] | None:
    """Download an end stage's own tensors from a neighbouring stage; return None if there is no
    copy. Raise `Unrecoverable` if the download is corrupt."""
    wanted = _Wanted(config, stages[index])
    for beside in (index - 1, index + 1):
        if not 0 <= beside < len(stages):
            continue
        try:
            snapshot = await wanted.fetch(peer, f"{KEPT}/{index}", FIND_TIMEOUT_S, -1, beside)
            return wanted.tensors(snapshot)
        except SnapshotUnavailable:
            continue
        except CorruptSnapshot as error:
            raise Unrecoverable(f"exact copy of an end: {error}") from None
    return None
