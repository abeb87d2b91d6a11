"""The parts of a node process, assembled over its session's peer."""

import time

import torch

from farflock.node.assembly.part import Part
from farflock.node.assembly.session import Session
from farflock.node.process.busy import TimedWorker
from farflock.node.process.freed import trimmed
from farflock.node.process.node_process import NodeProcess
from farflock.node.process.pipeline_role import part_of
from farflock.node.process.replica_role import replica_of
from farflock.node.process.run_text import NodeInputs, lend_tokenizer
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.state.history import History
from farflock.node.state.run_log import RunRecorder
from farflock.swarm.compute import Worker
from farflock.swarm.zmq.links import ZmqLinks


def assembled(
    inputs: NodeInputs,
    session: Session,
    links: ZmqLinks,
    stage: int,
    trains: bool,
    before: Checkpoint | None = None,
) -> NodeProcess:
    """Return the node of a session; its worker threads end with the process. `before` is the last
    checkpoint of a whole replica that returns to a run."""
    machine, peer = inputs.machine, session.peer
    torch.set_num_threads(machine.place.shares.threads_of(machine.threads))
    journal = RunRecorder(History.open(machine.folder.path, time.time), links.total_bytes)
    files, worker = Worker("files"), TimedWorker("train")
    report = trimmed(journal.report, files, peer.context.spawn)
    lend_tokenizer(peer.context.store, inputs.text.tokenizer)
    part: Part[Checkpoint]
    if inputs.known.manifest.pipeline is not None:
        part, keepers = part_of(inputs, peer, report, stage, trains, worker)
    else:
        part, keeper = replica_of(inputs, peer, report, files, worker, before)
        keepers = [keeper]
    return NodeProcess(machine, session, links, part, journal, keepers, worker, data=inputs.data)
