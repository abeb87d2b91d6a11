"""A node as a process: real links and directory, worker threads, files, signals.

`found` and `join` differ in where the manifest comes from; from then on both are the same `Participant` that simulations
run. Everything lives on one asyncio loop; what computes runs in two worker threads.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from farflock.node.checkpoint import Checkpoint
from farflock.node.corpus import load_corpus
from farflock.node.errors import Refused
from farflock.node.history import History
from farflock.node.invite import MAX_ADDRESSES, Invite, mint
from farflock.node.keeper import Keeper, last_of
from farflock.node.manifest import Head, Manifest, seal_head
from farflock.node.network import LEARN_TIMEOUT_S, Doors, Machine, identity_of, keep_published, learn_run, network
from farflock.node.participant import Participant, participant
from farflock.node.resume import take_up, take_up_moments
from farflock.node.status import StatusWriter
from farflock.node.tokenizer import ByteTokenizer
from farflock.node.worker import Worker
from farflock.swarm.chunks import digest_of
from farflock.swarm.dht import DhtDirectory
from farflock.swarm.dht_greeting import DirectoryUnreachable
from farflock.swarm.identity import Identity
from farflock.swarm.peer import Peer, RunTerms
from farflock.swarm.record import unseal
from farflock.swarm.zmq_links import ZmqLinks

JOIN_TIMEOUT_S = 120.0
REJOIN_TIMEOUT_S = 20.0  # for members to answer a founder that starts again
POLL_S = 0.1
LINGER_S = 5.0  # after the last step: others may still be on their way to the last round
REMEMBER_EVERY_S = 5.0
INVITE_LASTS_S = 7 * 24 * 3600

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Node:
    """A running node: what commands and the live view look at."""

    machine: Machine
    manifest: Manifest
    run: str
    founder: str
    participant: Participant
    directory: DhtDirectory
    links: ZmqLinks
    history: History
    keeper: Keeper
    doors: tuple[str, ...] = ()  # by which I came in

    def invite(self) -> str:
        """An invite to this run, over my own address and those of others: I may have none, or end first."""
        return mint(self._invite((*self.directory.addresses[:1], *self._others())))

    def _others(self) -> tuple[str, ...]:
        """One address of each member that has any, then those that I came in by."""
        records = self.participant.peer.membership.records.values()
        return (*(record.doors[0] for record in records if record.doors and record.peer != self.links.me), *self.doors)

    def _invite(self, addresses: Sequence[str]) -> Invite:
        distinct = tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]
        return Invite(self.run, self.founder, distinct, int(time.time() + INVITE_LASTS_S))

    async def remember(self) -> None:
        """Write down where the others are, for the next start."""
        while True:
            if others := self._others():
                Doors(self.machine.folder).write(self._invite(others))
            await asyncio.sleep(REMEMBER_EVERY_S)


async def found(machine: Machine, manifest: Manifest, on_start: Callable[[Node], None]) -> Path:
    """Found a run, or take it up again, and train it to its end; returns the final checkpoint's folder.

    Taking up means going back into the swarm if its members can still be reached, else going on from the checkpoint."""
    identity = identity_of(machine.folder)
    run = manifest.run_id(identity.peer)
    saved = last_of(machine.folder, run)
    known = Doors(machine.folder).read(run)
    if saved is not None and known is not None and not _ended(saved, manifest):
        try:
            return await join(machine, known, on_start, REJOIN_TIMEOUT_S)
        except (Refused, DirectoryUnreachable) as reason:
            log.info("nobody of the run can be reached, so it goes on from step %d: %s", saved.step, reason)
    async with network(machine, identity, run, ()) as (directory, links):
        node = _node(machine, manifest, run, identity.peer, identity, directory, links)
        text = manifest.canonical()
        head = seal_head(identity, Head(run, identity.peer, digest_of(text), len(text), 0))
        async with node.participant.peer.running():
            if saved is None:
                node.participant.found()
            else:
                node.participant.peer.found()
                take_up(node.participant, saved)
                node.history.event("resumed", step=saved.step, checkpoint=str(saved.folder))
            return await _train(node, head, on_start)


async def join(
    machine: Machine, invite: Invite, on_start: Callable[[Node], None], learn_timeout_s: float = LEARN_TIMEOUT_S
) -> Path:
    """Join the run of an invite and train it to its end; returns the final checkpoint's folder.

    Who has been in this run before keeps its place in its data and its inner moments; the state is the swarm's."""
    identity = identity_of(machine.folder)
    known = Doors(machine.folder).read(invite.run)
    doors = tuple(dict.fromkeys((*invite.addresses, *(known.addresses if known else ()))))[:MAX_ADDRESSES]
    async with network(machine, identity, invite.run, doors) as (directory, links):
        head, manifest, records = await learn_run(directory, links, invite, learn_timeout_s)
        node = _node(machine, manifest, invite.run, invite.founder, identity, directory, links)
        node.doors = doors
        saved = last_of(machine.folder, invite.run)
        async with node.participant.peer.running():
            if saved is not None:
                take_up_moments(node.participant, saved)
            await node.participant.join(records, JOIN_TIMEOUT_S)
            node.history.event("joined", round=node.participant.seat.applied_round, run=invite.run)
            return await _train(node, head, on_start)


def _ended(saved: Checkpoint, manifest: Manifest) -> bool:
    """Whether the checkpoint is that of the run's end."""
    return int(saved.meta["tokens"]) >= manifest.run.total_tokens


async def _train(node: Node, head: bytes, on_start: Callable[[Node], None]) -> Path:
    """The common part: publish, train, keep the status file, save, say goodbye."""
    peer, loop = node.participant.peer, node.participant.loop
    peer.port.store.put(node.manifest.canonical(), "manifest")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _stop, node)
    status = StatusWriter(node)
    helpers = [
        asyncio.create_task(keep_published(node.directory, node.run, head)),
        asyncio.create_task(status.run()),
        asyncio.create_task(node.remember()),
    ]
    try:
        on_start(node)
        await _until_started(node)
        await loop.run(node.manifest.run.total_tokens)
        await asyncio.sleep(0 if loop.stopping else LINGER_S)
        saved = await node.keeper.save()
        peer.leave()
        node.history.event("stopped" if loop.stopping else "done", checkpoint=str(saved), step=loop.step)
        await asyncio.sleep(0.2)  # the goodbye is on its way
        return saved
    finally:
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        status.write()
        node.history.close()


async def _until_started(node: Node) -> None:
    """The founder trains only once as many members are there as its manifest says; joiners come when they come."""
    wanted, peer, loop = node.manifest.exchange.start_peers, node.participant.peer, node.participant.loop
    if peer.me != node.founder or loop.step:
        return
    while len(peer.port.views.newest.members) < wanted and not loop.stopping:  # noqa: ASYNC110 - two parts' conditions
        await asyncio.sleep(POLL_S)


def _stop(node: Node) -> None:
    """End after the step that is running: what the first Ctrl-C means. The second one ends the process at once."""
    if node.participant.loop.stopping:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    node.participant.loop.stopping = True


def _node(
    machine: Machine,
    manifest: Manifest,
    run: str,
    founder: str,
    identity: Identity,
    directory: DhtDirectory,
    links: ZmqLinks,
) -> Node:
    """Put the node together; its workers end with the process."""
    torch.set_num_threads(machine.threads)
    corpus = load_corpus(manifest.data.corpus, manifest.data.sha256 or None)
    tokens = ByteTokenizer().encode(corpus.train)
    history = History.open(machine.folder.path, time.time)
    terms = RunTerms(run, manifest.run.seed, manifest.exchange.view_s)
    codecs, steps = Worker("codec"), Worker("train")
    incarnation = unseal(links.record(), run).incarnation
    peer = Peer(terms, identity, links, directory, incarnation=incarnation, record=links.record, compute=codecs)

    def report(kind: str, fields: dict[str, object]) -> None:
        if kind == "step":
            history.metrics(int(str(fields["step"])), loss=float(str(fields["loss"])))
        else:
            history.event(kind, **fields)

    part = participant(manifest.plan(), peer, tokens, compute=codecs, train=steps, report=report)
    keeper = Keeper(part, machine.folder, run, manifest.canonical().decode(), machine.checkpoint_s)
    part.loop.pause = keeper.pause
    return Node(machine, manifest, run, founder, part, directory, links, history, keeper)
