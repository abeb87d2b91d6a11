"""A node as a process: real links and directory, worker threads, files, signals.

`found` and `join` differ in where the manifest comes from; from then on both are the same `Participant` that simulations
run. Everything lives on one asyncio loop; what computes runs in two worker threads.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from farflock.node import checkpoint
from farflock.node.corpus import load_corpus
from farflock.node.history import History
from farflock.node.invite import MAX_ADDRESSES, Invite, mint
from farflock.node.manifest import Head, Manifest, seal_head
from farflock.node.network import Machine, identity_of, learn_run, network
from farflock.node.participant import Participant, participant
from farflock.node.status import StatusWriter
from farflock.node.tokenizer import ByteTokenizer
from farflock.node.worker import Worker
from farflock.swarm.chunks import digest_of
from farflock.swarm.dht import DhtDirectory
from farflock.swarm.identity import Identity
from farflock.swarm.peer import Peer, RunTerms
from farflock.swarm.record import unseal
from farflock.swarm.zmq_links import ZmqLinks

JOIN_TIMEOUT_S = 120.0
POLL_S = 0.1
LINGER_S = 5.0  # after the last step: others may still be on their way to the last round
HEAD_EVERY_S = 60.0
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
    doors: tuple[str, ...] = ()

    def invite(self) -> str:
        """An invite to this run, over my own addresses and those that I came in by: I may have none, or end first."""
        addresses = tuple(dict.fromkeys((*self.directory.addresses, *self.doors)))[:MAX_ADDRESSES]
        return mint(Invite(self.run, self.founder, addresses, int(time.time() + INVITE_LASTS_S)))


async def found(machine: Machine, manifest: Manifest, on_start: Callable[[Node], None]) -> Path:
    """Found a run and train it to its end; returns the final checkpoint's folder."""
    identity = identity_of(machine.folder)
    run = manifest.run_id(identity.peer)
    async with network(machine, identity, run, ()) as (directory, links):
        node = _node(machine, manifest, run, identity.peer, identity, directory, links)
        head = seal_head(
            identity, Head(run, identity.peer, digest_of(manifest.canonical()), len(manifest.canonical()), 0)
        )
        async with node.participant.peer.running():
            node.participant.found()
            return await _train(node, head, on_start)


async def join(machine: Machine, invite: Invite, on_start: Callable[[Node], None]) -> Path:
    """Join the run of an invite and train it to its end; returns the final checkpoint's folder."""
    identity = identity_of(machine.folder)
    async with network(machine, identity, invite.run, invite.addresses) as (directory, links):
        head, manifest, records = await learn_run(directory, links, invite)
        node = _node(machine, manifest, invite.run, invite.founder, identity, directory, links)
        node.doors = invite.addresses
        async with node.participant.peer.running():
            await node.participant.join(records, JOIN_TIMEOUT_S)
            node.history.event("joined", round=node.participant.seat.applied_round, run=invite.run)
            return await _train(node, head, on_start)


async def _train(node: Node, head: bytes, on_start: Callable[[Node], None]) -> Path:
    """The common part: publish, train, keep the status file, save, say goodbye."""
    peer, loop = node.participant.peer, node.participant.loop
    peer.port.store.put(node.manifest.canonical(), "manifest")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _stop, node)
    status = StatusWriter(node)
    helpers = [asyncio.create_task(_publish(node, head)), asyncio.create_task(status.run())]
    try:
        on_start(node)
        await _until_started(node)
        await loop.run(node.manifest.run.total_tokens)
        await asyncio.sleep(0 if loop.stopping else LINGER_S)
        saved = await asyncio.to_thread(_save, node, node.participant.seat.progress(loop.step).tokens)
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
    wanted, peer = node.manifest.exchange.start_peers, node.participant.peer
    while (  # noqa: ASYNC110 - three conditions of three parts, once, at the start
        len(peer.port.views.newest.members) < wanted and peer.me == node.founder and not node.participant.loop.stopping
    ):
        await asyncio.sleep(POLL_S)


def _stop(node: Node) -> None:
    """End after the step that is running: what the first Ctrl-C means. The second one ends the process at once."""
    if node.participant.loop.stopping:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    node.participant.loop.stopping = True


async def _publish(node: Node, head: bytes) -> None:
    """Every member re-publishes the manifest's head, so that the run can be found without its founder."""
    while True:
        await node.directory.publish_head(node.run, head)
        await asyncio.sleep(HEAD_EVERY_S)


def _save(node: Node, tokens: int) -> Path:
    """Write the final checkpoint: what to evaluate and export, and the method's and the inner optimizer's state."""
    loop = node.participant.loop
    replica, method = loop.driver.replica, loop.driver.method
    inner = {
        f"{moment}.{name}": tensor
        for moment in ("exp_avg", "exp_avg_sq", "step")
        for name, tensor in replica.read(replica.names, moment).items()
    }
    config = msgspec.json.encode(node.manifest.plan().model)
    parts = {"model": dict(method.eval_params(replica)), "method": method.snapshot(replica), "inner": inner}
    meta = {
        "run": node.run,
        "step": loop.step,
        "tokens": tokens,
        "manifest": node.manifest.canonical().decode(),
    }
    return checkpoint.save(node.machine.folder.checkpoints, loop.step, parts, meta, {"config.json": config})


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
    return Node(machine, manifest, run, founder, part, directory, links, history)
