"""Invariants of a pipeline, watched between each server's method and its loop.

No microbatch is named by two rounds of one stage; each one that a trainer counts is named at every
stage of its path; servers of a stage that have applied the same rounds of an exact method are
equal; and where microbatches are counted apart, no message holds any that no count has named.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from farflock.node.pipeline.lifecycle.assembly import StageNode
from farflock.node.pipeline.node import PipelineNode
from farflock.node.pipeline.server.accounts import Taken
from farflock.node.pipeline.server.counting import NO_WEIGHT, STREAM
from farflock.node.simulate.invariants import RoundIds
from farflock.node.train import microbatch_ids as notes
from farflock.node.train.driver import Apply
from farflock.optimizers.method import Exchange, Progress
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.protocol.gradient_leases import GradientKey

MAX_VIOLATIONS = 20


class PipelineChecker:
    """A record of what all rounds of all stages have named, and of the violations."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.named: defaultdict[int, dict[int, list[GradientKey]]] = defaultdict(dict)
        self.nodes: list[PipelineNode] = []  # in all their lives
        self._round_of: defaultdict[int, dict[GradientKey, int]] = defaultdict(dict)
        self._hashes: dict[tuple[int, RoundIds], tuple[bytes, int]] = {}

    def violate(self, what: str) -> None:
        """Record a violation, at most `MAX_VIOLATIONS` in all."""
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(what)

    @property
    def rounds(self) -> int:
        """The number of rounds that named microbatches."""
        return sum(map(len, self.named.values()))

    def digest(self, *more: object) -> str:
        """Return a hash of all that was named, of all states, and of `more`."""
        hashes = [(where, held.hex()) for where, (held, _) in self._hashes.items()]
        text = repr((sorted(self.named.items()), hashes, more))
        return hashlib.sha256(text.encode()).hexdigest()

    def watch(self, number: int, node: PipelineNode) -> None:
        """Watch one life of peer `number`, which has not begun yet."""
        self.nodes.append(node)
        for serving in node.servings:
            ServerWatch(self, number, serving)

    # what servers do

    def heard(self, stage: int, number: int, keys: list[GradientKey]) -> None:
        """Note the microbatches that a server has heard a round name."""
        known = self.named[stage].setdefault(number, keys)
        if known != keys:
            self.violate(f"two servers of stage {stage} heard round {number} name other work")
        for key in keys:
            before = self._round_of[stage].setdefault(key, number)
            if before != number:
                self.violate(f"rounds {before} and {number} of stage {stage} both name {key}")

    def left(self, stage: int, number: int, keys: Iterable[GradientKey]) -> None:
        """Require that each of these microbatches, which are in a message, has been named."""
        early = sorted(set(keys) - self._round_of[stage].keys())
        if early:
            self.violate(f"server {number} of stage {stage} sent {early[:2]} before they counted")

    def compare(self, stage: int, number: int, serving: StageNode) -> None:
        """Require of an exact method that this server's state is that of all which have applied the
        same rounds."""
        driver = serving.loop.driver
        if driver.method.equality != "exact":
            return
        rounds = tuple(sorted(driver.position.rounds.items()))
        held = state_hash(driver.method.snapshot(driver.replica))
        known, other = self._hashes.setdefault((stage, rounds), (held, number))
        if known != held:
            self.violate(f"servers {other} and {number} of stage {stage} differ after {rounds}")

    # what trainers say

    def check_counted(
        self, counted: Iterable[GradientKey], order: Callable[[GradientKey], Sequence[int]]
    ) -> None:
        """Require that microbatches which trainers count are named at each stage of their path."""
        for key in counted:
            lacking = [stage for stage in order(key) if key not in self._round_of[stage]]
            if lacking:
                self.violate(f"{key} counts for its trainer, but not at stages {lacking}")

    def check_work(self) -> None:
        """Require that no trainer found one of its microbatches doubled or in doubt."""
        for node in self.nodes:
            for what in ("doubled", "in doubt"):
                if found := node.work.get(what):
                    name = f"{node.peer.me[-6:]}/{node.peer.context.incarnation}"
                    self.violate(f"trainer {name} has {found} microbatches {what}")


class ServerWatch:
    """A server's driver and accounts, changed to tell a checker what they do."""

    def __init__(self, checker: PipelineChecker, number: int, serving: StageNode) -> None:
        driver, accounts = serving.loop.driver, serving.server.accounts
        self._checker, self._number, self._serving = checker, number, serving
        self._work: set[GradientKey] = set()  # in the weights, since they were last adopted
        self._asked: set[GradientKey] = set()  # of it, what the last messages were made of
        self._take, self._forget = accounts.take, driver.forget
        self._apply, self._after_step = driver.apply, driver.after_step
        accounts.take = self.take  # type: ignore[method-assign]
        driver.forget = self.forget  # type: ignore[method-assign]
        driver.apply = self.apply  # type: ignore[method-assign]
        driver.after_step = self.after_step  # type: ignore[method-assign]

    def take(self) -> Taken:
        """Note the microbatches of a step."""
        accounts = self._serving.server.accounts
        waiting = list(accounts.sums.rounds)
        taken = self._take()
        self._work.update(key for key in waiting if key not in accounts.late)
        return taken

    def forget(self) -> None:
        """Note that a snapshot has replaced all that was only here."""
        self._work.clear()
        self._forget()

    def after_step(self, progress: Progress) -> list[Exchange]:
        """Note what the messages are made of, which may be held back until they are counted."""
        messages = self._after_step(progress)
        if messages:
            self._asked = set(self._work)
        return self._sent(messages)

    def apply(
        self,
        action: Apply,
        progress: Progress,
        set_rate: Callable[[int], None] = lambda tokens: None,
    ) -> list[Exchange]:
        """Note what a round names, before what waited for it goes out, and compare the states."""
        key, serving = action.exchange.key, self._serving
        if key.stream == serving.loop.driver.streams[0].key.stream:
            keys = notes.joined([action.result.notes] if action.result.notes else [])
            self._checker.heard(serving.index, key.round, keys)
        more = self._apply(action, progress, set_rate)
        self._checker.compare(serving.index, self._number, serving)
        return self._sent(more)

    def _sent(self, messages: list[Exchange]) -> list[Exchange]:
        merges = [each for each in messages if each.key.stream != STREAM]
        if self._serving.counting and any(each.weight > NO_WEIGHT for each in merges):
            self._checker.left(self._serving.index, self._number, self._asked)
        return messages
