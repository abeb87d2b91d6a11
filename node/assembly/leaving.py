"""The end of a node: it says goodbye first, and then saves for as long as the disk takes something.

A node that is asked to stop tells the others at once, so that no round waits for it. The step that
is under way has a few seconds to end. A longer one is left out: until it has its gradients, the
state is that of the step before, and can be saved meanwhile. Only a save that stands still is given
up, or one for which the time that the user named is too short.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from farflock.node.assembly.checkpoints import CheckpointManager, save_all
from farflock.node.errors import Failure
from farflock.node.reporting import Report
from farflock.node.state.checkpoint import CheckpointError
from farflock.node.state.paths import RunFolder
from farflock.swarm.peer.peer import Peer
from farflock.swarm.tasks import cancel

MERGE_S = 5.0  # for a merge that takes in what would be lost with the node, before the goodbye
STEP_S = 5.0  # for the step under way, before the state ahead of it is saved
STALL_S = 20.0  # without a byte on the disk, before a save is given up
CHANGE_S = 60.0  # for a change of the state, in whose middle it cannot be saved
TEARDOWN_S = 3.0  # from the save to the end of the process
LOOK_EVERY_S = 0.1


class Unsaved(Failure):
    """A node has ended, and its last step is not on the disk."""


class RunMember(Protocol):
    """A node's membership of its run (node/assembly/session.py)."""

    @property
    def peer(self) -> Peer:
        """The peer of the node."""
        ...

    async def leave(self) -> None:
        """Say goodbye, once."""
        ...


class Leaving:
    """The end of one node. `grace_s` are the seconds from the request to stop to the end of the
    process, if the user named them; what cannot be saved in that time is not begun."""

    def __init__(
        self,
        member: RunMember,
        keepers: Sequence[CheckpointManager],
        folder: RunFolder,
        report: Report,
    ) -> None:
        self._member, self._keepers, self._folder = member, keepers, folder
        self._report = report
        self.grace_s: float | None = None
        self._asked_s = 0.0
        self._asked = asyncio.Event()
        self._training: asyncio.Task[None] | None = None
        self._goodbye: asyncio.Task[None] | None = None
        self._cut_short = False
        self.saved: Path | None = None
        self.said = ""  # what the end has come to, as a clause
        self.then: Callable[[], None] = lambda: None  # called once all of it is done
        # whether work that counts would be lost with the node, and a merge will take it in
        self.unmerged: Callable[[], bool] = lambda: False
        self.stop: Callable[[], None] = lambda: None  # asks the training to end

    def ask(self) -> None:
        """Begin to leave."""
        if not self._asked.is_set():
            self._asked_s = _now()
            self._asked.set()

    @property
    def asked(self) -> bool:
        """True if the node was asked to stop."""
        return self._asked.is_set()

    @property
    def doing(self) -> str:
        """The work of the node on its way out, for its status."""
        for progress in (keeper.progress for keeper in self._keepers):
            if progress.is_open:
                whole = f"{progress.share:.0%} of {progress.total / 1e6:,.1f} MB"
                return f"is leaving: saves step {progress.step}, {whole}"
        return "is leaving"

    async def train(self, work: Coroutine[Any, Any, None]) -> None:
        """Train to the end, or until the node is asked to stop: once its work is merged, or after
        `MERGE_S`, it says goodbye, and returns with the step that is under way, or before that if
        it is long."""
        training = self._training = asyncio.create_task(work)
        asked = asyncio.create_task(self._wait_asked())
        try:
            await asyncio.wait((training, asked), return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                await self._merged(training)
                self.stop()
                self._goodbye = asyncio.create_task(self._member.leave())
                await asyncio.wait((training,), timeout=self._step_s)
            if training.done():
                training.result()
            self._cut_short = not training.done()
        finally:
            await cancel(asked)

    async def end(self) -> Path:
        """Save and say goodbye; return the checkpoint's folder, or raise `Unsaved`."""
        try:
            saved = await self.save()
        except Unsaved:
            self._report("unsaved", {"step": self._step, "why": self.said})
            raise
        finally:
            await self.close()
            self.then()
        self._report(
            "stopped" if self.asked else "done", {"checkpoint": str(saved), "step": self._step}
        )
        return saved

    async def save(self) -> Path:
        """Save the last finished step; raise `Unsaved`, with what is lost, if that cannot be."""
        for keeper in self._keepers:
            keeper.trust()
        why = self._too_long()
        saving = None if why else asyncio.create_task(save_all(self._keepers, self._folder))
        try:
            if saving is not None and not (why := await self._stalled(saving)):
                self.saved = await saving
        except (CheckpointError, OSError) as error:
            why = str(error)
        finally:
            for keeper in self._keepers:
                keeper.progress.give_up()
            if saving is not None:
                await cancel(saving)
        if self.saved is None:
            unsaved = Unsaved(f"step {self._step} is not saved", why, self._left_behind())
            self.said = str(unsaved)
            raise unsaved
        self.said = "; ".join(filter(None, (self._on_disk(self.saved), self._shared())))
        return self.saved

    async def close(self) -> None:
        """Say goodbye if that is not said, and end what still runs."""
        await (self._member.leave() if self._goodbye is None else self._goodbye)
        if self._training is not None:
            await cancel(self._training)

    async def until(self, there: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Return once a condition holds, the time is over, or the node is asked to stop."""
        until_s = None if timeout_s is None else _now() + timeout_s
        while not (there() or self.asked):
            if until_s is not None and _now() >= until_s:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _merged(self, training: asyncio.Task[None]) -> None:
        """Train on until the work that is only here is merged, for a few seconds at most."""
        until_s = _now() + self._part_of_grace(MERGE_S)
        while self.unmerged() and not training.done() and _now() < until_s:
            await asyncio.wait((training,), timeout=LOOK_EVERY_S)

    async def _wait_asked(self) -> None:
        await self._asked.wait()

    @property
    def _step_s(self) -> float:
        return self._part_of_grace(CHANGE_S if self._whole_steps else STEP_S)

    def _part_of_grace(self, longest_s: float) -> float:
        return longest_s if self.grace_s is None else min(longest_s, self.grace_s / 4)

    @property
    def _whole_steps(self) -> bool:
        return any(keeper.whole_steps for keeper in self._keepers)

    def _left_s(self) -> float | None:
        """Return the seconds that are left to save; None if the user named no time."""
        if self.grace_s is None or not self.asked:
            return None
        return self._asked_s + self.grace_s - min(TEARDOWN_S, self.grace_s / 2) - _now()

    def _too_long(self) -> str:
        """Return why the save is not even begun; nothing if it is."""
        if self._cut_short and self._whole_steps:
            return f"its step has not ended after {self._step_s:.0f} s, and cannot be left out here"
        left_s = self._left_s()
        needed_s = sum(keeper.progress.expected_s for keeper in self._keepers)
        if left_s is None or needed_s <= left_s:
            return ""
        left_s = max(left_s, 0.0)
        return f"it takes {needed_s:.0f} s by the last one, and --grace leaves {left_s:.0f} s"

    async def _stalled(self, saving: asyncio.Task[Path]) -> str:
        """Wait for a save for as long as it progresses; return why no longer, or nothing."""
        seen, since_s = -1, _now()
        while not saving.done():
            await asyncio.wait((saving,), timeout=LOOK_EVERY_S)
            progress = [keeper.progress for keeper in self._keepers]
            if (passed := sum(each.passed for each in progress)) != seen:
                seen, since_s = passed, _now()
            left_s, still_s = self._left_s(), _now() - since_s
            if not any(each.is_open for each in progress):
                if still_s >= CHANGE_S:
                    return f"a step or a round was changing the state for {CHANGE_S:.0f} s"
            elif still_s >= STALL_S:
                return f"the disk has taken nothing for {STALL_S:.0f} s"
            if left_s is not None and left_s <= 0:
                return f"the {self.grace_s:g} s of --grace are over"
        return ""

    @property
    def _step(self) -> int:
        return min((keeper.node.loop.step for keeper in self._keepers), default=0)

    def _on_disk(self, saved: Path) -> str:
        if len(self._keepers) != 1:
            return f"the checkpoint is in {saved}"
        late = ", without the step that was under way" if self._cut_short else ""
        return f"the checkpoint is in {saved}{late}"

    def _left_behind(self) -> str:
        """Return what there is in place of the step that is not saved, as a clause."""
        found = [newest for keeper in self._keepers if (newest := keeper.newest()) is not None]
        older = min(found, default=None)
        here = f"the newest checkpoint is {older[1]}" if older else "there is no earlier checkpoint"
        return "; ".join(filter(None, (here, self._shared() or "no other member has this work")))

    def _shared(self) -> str:
        """Return how much of this node's work the others have, as a clause; nothing if there are
        none, or if that is not known, as of stages."""
        replicas = [keeper for keeper in self._keepers if keeper.role == "replica"]
        peer = self._member.peer
        members = () if peer.context.chain is None else peer.context.chain.newest.peers
        if not replicas or not {*members} - {peer.me}:
            return ""
        rest = replicas[0].node.loop.driver.position.own_tokens
        return "the other members have all of this node's work" + (
            f" but its last {rest:,} tokens" if rest else ""
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
