"""A node's account of itself: its status in a file and in the live view."""

import asyncio
import collections
import logging
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from farflock.node.assembly.node import ReplicaNode
from farflock.node.pipeline.node import PipelineNode
from farflock.node.process.peak_flops import peak_flops
from farflock.node.process.status import (
    EvaluationStatus,
    PartnerStatus,
    Status,
    Suspect,
    Waiting,
)
from farflock.node.state.paths import OWNER_ONLY, write_whole
from farflock.swarm.links import Links
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.views import Member
from farflock.swarm.roles import role_of

if TYPE_CHECKING:
    from farflock.node.process.node_process import NodeProcess

STATUS_EVERY_S = 1.0
PACE_SAMPLES = 10  # seconds over which the pace is measured
SAFE_VOTES = 3  # of living members; fewer are said, for one more loss may stop the run

log = logging.getLogger(__name__)


class StatusWriter:
    """Writes a node's status to `status.json` in its folder, atomically, and shows it in the
    live view."""

    def __init__(self, node: "NodeProcess") -> None:
        self._node = node
        self._path = node.machine.folder.path / "status.json"
        # (loop time in s, trained tokens, seconds in steps)
        self._pace: collections.deque[tuple[float, int, float]] = collections.deque(
            maxlen=PACE_SAMPLES
        )
        self._fails = False
        self._written: Status | None = None
        self._newest: Status | None = None
        self._news = asyncio.Event()  # set while the newest one has not been shown

    async def run(self) -> None:
        """Write a status every `STATUS_EVERY_S`, until cancelled."""
        while True:
            part, now_s = self._node.member, asyncio.get_running_loop().time()
            self._pace.append((now_s, part.trained_tokens, _busy_s(part)))
            self._newest = self.write()
            self._news.set()
            await asyncio.sleep(STATUS_EVERY_S)

    async def show(self, show: Callable[[Status], None]) -> None:
        """Call `show` with each status that `run` makes, until cancelled: a view that fails must
        not take the file with it."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._newest is not None:
                show(self._newest)

    def write(self, doing: str | None = None) -> Status:
        """Write one status now, if it has changed; a full disk must not end the node."""
        status = status_of(self._node, doing, *self._paces())
        if status == self._written:
            return status
        try:
            write_whole(self._path, msgspec.json.encode(status), OWNER_ONLY)
            self._fails, self._written = False, status
        except OSError as error:
            if not self._fails:
                log.warning("cannot write %s: %s; the node continues", self._path, error.strerror)
            self._fails = True
        return status

    def write_last(self) -> None:
        """Write that the node has ended; a failure must not keep it from closing its files."""
        try:
            self.write("has ended")
        except Exception:
            log.exception("the node's last status could not be written")

    def _paces(self) -> tuple[float | None, float | None]:
        """Return the tokens per second and the share of time in steps, over the last seconds."""
        if len(self._pace) < 2:
            return None, None
        began, ended = self._pace[0], self._pace[-1]
        passed_s, tokens, busy_s = (last - first for first, last in zip(began, ended, strict=True))
        busy = min(busy_s / passed_s, 1.0) if isinstance(self._node.member, ReplicaNode) else None
        return tokens / passed_s, busy


def _suspects(peer: Peer) -> tuple[Suspect, ...]:
    """Return what this peer accuses others of, oldest first."""
    since_s = time.time() - peer.context.now()  # local seconds to Unix time
    accusations = sorted(peer.context.accusations, key=lambda each: each.first_s)
    return tuple(
        Suspect(
            each.peer,
            each.what,
            each.times,
            int(since_s + each.first_s),
            int(since_s + each.last_s),
        )
        for each in accusations
    )


def status_of(
    node: "NodeProcess",
    doing: str | None = None,
    tokens_per_s: float | None = None,
    busy: float | None = None,
) -> Status:
    """Return the node's current status; `doing` overrides what the node says it is doing."""
    part, links = node.member, node.links
    peer = part.peer
    chain = peer.context.chain  # None before a newcomer has met the members
    members = () if chain is None else chain.newest.members
    sent_bytes, received_bytes = links.total_bytes()
    flops_per_s = None if tokens_per_s is None else tokens_per_s * _flops_per_token(node)
    return Status(
        pid=os.getpid(),
        run=node.run,
        peer=peer.me,
        invite=node.invite(),
        step=part.step,
        tokens=part.tokens,
        total_tokens=node.manifest.run.total_tokens,
        loss=None if part.last_loss is None or math.isnan(part.last_loss) else part.last_loss,
        view=0 if chain is None else chain.newest.number,
        members=tuple(member.peer for member in members),
        is_member=peer.membership.is_member,
        partners=tuple(_partner(links, other) for other in members if other.peer != peer.me),
        waits=tuple(
            Waiting(wait.what.stream, wait.what.round, wait.whom, wait.left_s)
            for wait in part.waits()
        ),
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        unsure_rounds=peer.pairing.unsure_rounds,
        dropped=dict(peer.context.counters) | dict(links.counters),
        doing=doing or _doing(node),
        rounds=dict(node.journal.rounds),
        last_round=node.journal.last_round,
        tokens_per_s=tokens_per_s,
        branch=peer.membership.branch,
        role=part.role,
        work=part.work,
        exchanges=exchanges_of(part),
        evaluation=_evaluation_of(part),
        no_evaluation=why_no_evaluation(part),
        guard=_guard_of(part),
        busy=busy,
        flops_per_s=flops_per_s,
        mfu=_mfu(node, flops_per_s),
        relayed_bytes=links.detours.relayed_bytes,
        suspects=_suspects(peer),
        statements=peer.membership.admission.statements.log.said,
        voters=() if chain is None else chain.newest.electorate.keys_that_vote,
        fragile=_fragile(peer),
        view_hash="" if chain is None else chain.newest.hash.hex(),
    )


def _fragile(peer: Peer) -> str:
    """Return, in words, that too few votes are alive to decide anything, or whose loss would leave
    too few while hardly any is; nothing otherwise."""
    chain = peer.context.chain
    if chain is None:
        return ""
    view, electorate = chain.newest, chain.newest.electorate
    here = {
        voter
        for voter in electorate.voters
        if view.peers[voter] == peer.me or not peer.context.gone(view, view.peers[voter])
    }
    if not electorate.is_quorum(here):
        total = len(electorate.voters)
        return f"{len(here)} of {total} votes are alive: nothing is decided until more are"
    if len(here) >= SAFE_VOTES:
        return ""
    needed = [voter for voter in sorted(here) if not electorate.is_quorum(here - {voter})]
    names = " or ".join(view.peers[voter][-8:] for voter in needed)
    return f"{len(here)} of {SAFE_VOTES} votes: the run stops if {names} goes; invite more peers"


def why_no_evaluation(part: ReplicaNode | PipelineNode) -> str:
    """Return why a node does not evaluate its run, in words; nothing if it does when it is
    drawn."""
    if part.evaluator is None:
        return "the run's manifest wants no evaluations"
    return part.evaluator.measuring.unable


def _evaluation_of(part: ReplicaNode | PipelineNode) -> EvaluationStatus | None:
    evaluator = part.evaluator
    newest = None if evaluator is None else evaluator.newest
    if evaluator is None or newest is None:
        return None
    by = evaluator.evaluations.signer((newest.round, newest.place))
    return EvaluationStatus.of(newest, by)


def _guard_of(part: ReplicaNode | PipelineNode) -> str:
    evaluator = part.evaluator
    if evaluator is None:
        return ""
    alarm = evaluator.ended_by or evaluator.alarm
    alarmed = alarm is not None and evaluator.guard.on != "off"
    said = [f"{alarm.reason} (round {alarm.round})"] if alarm is not None and alarmed else []
    return "; ".join([*said, *filter(None, [evaluator.difference])])


def _busy_s(part: ReplicaNode | PipelineNode) -> float:
    return part.pace.busy_s if isinstance(part, ReplicaNode) and part.pace is not None else 0.0


def _flops_per_token(node: "NodeProcess") -> float:
    """Return 6 for each weight that computes a token, and 12 · layers · width · length for
    attention (PaLM, arXiv:2204.02311, appendix B); 4 for a weight that is not trained, which needs
    no gradient."""
    model, plan = node.manifest.model, node.manifest.plan()
    unused = 0 if model.experts is None else model.experts - model.used_experts
    weights = model.parameters() - unused * model.layers * 3 * model.dim * model.ffn_dim
    trained = 6 * weights if plan.lora is None else 4 * weights + 6 * plan.trained_values
    return trained + 12 * model.layers * model.dim * plan.seq


def _mfu(node: "NodeProcess", flops_per_s: float | None) -> float | None:
    """Return the share of its devices' highest speed that a replica uses; None where it is not
    known."""
    machine = node.machine
    peak = peak_flops(machine.device)
    if flops_per_s is None or peak is None or not isinstance(node.member, ReplicaNode):
        return None
    return flops_per_s / (peak * (1 if machine.ranks is None else machine.ranks.count))


def exchanges_of(part: ReplicaNode | PipelineNode) -> str:
    """Return where a node's method computes, as status says it; nothing if that is the CPU."""
    if not isinstance(part, ReplicaNode) or part.loop.client.home.type == "cpu":
        return ""
    client = part.loop.client
    codecs = ", ".join(client.codecs_on_cpu)
    return f"{client.home}, {codecs} on the CPU" if codecs else f"{client.home}"


def _doing(node: "NodeProcess") -> str:
    part, chain, wanted = node.member, node.member.peer.context.chain, node.awaited()
    if part.stopping:
        return "is leaving"
    if node.supply is not None and (awaited := node.supply.awaited()):
        return f"waits for {awaited}"
    if chain is None:
        return "joins the run"
    here = len(chain.newest.peers)
    if here < wanted:
        return f"waits for members: {here} of {wanted} are here"
    does = (
        "trains" if part.role in ("replica", "trainer") else f"serves {part.role.replace(':', ' ')}"
    )
    if part.peer.membership.is_member:
        return does
    if part.peer.me in part.peer.context.entrance.orders.banned:
        return "is banned by the run's founder: no member takes its work"
    if (why := part.peer.membership.admission.own_refusal) is not None:
        return f"{does}; is not let in: {why}; ask for a new invite, and join with that"
    if (why := part.peer.membership.admission.own_wait) is not None:
        return f"{does}; waits for a place: {why}"
    view_s = node.manifest.exchange.view_s
    return f"{does}; counts as a member from the next change of members (within {view_s:g} s)"


def _partner(links: Links, member: Member) -> PartnerStatus:
    peer = member.peer
    rtt_s = links.rtt_s(peer)
    rtt_ms = None if rtt_s is None else rtt_s * 1000
    return PartnerStatus(peer, links.life(peer), links.road(peer), rtt_ms, role_of(member.stage))
