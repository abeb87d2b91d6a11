"""The core of whatever takes part in a run: one method's driver, exchange client, state sync and
loop.

A node with a whole model has one core, a pipeline's node one for each stage that it serves. What
differs between processes, simulations and users' own loops is passed in.
"""

from dataclasses import dataclass

from farflock.node.loop import Loop
from farflock.node.reporting import Report
from farflock.node.train.driver import Driver
from farflock.node.train.exchange_client import ExchangeClient
from farflock.node.train.state_sync import Spool, StateSync
from farflock.node.train.task import Train, TrainingTask
from farflock.optimizers.parts.spread import Spread, in_turn
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import Peer


@dataclass(frozen=True, slots=True)
class Core:
    """The four parts over one peer. Nothing is sent before its state is opened or adopted."""

    driver: Driver
    client: ExchangeClient
    state_sync: StateSync
    loop: Loop

    @classmethod
    def over(
        cls,
        peer: Peer,
        driver: Driver,
        training_task: TrainingTask,
        compute: Compute,
        train: Train,
        report: Report = lambda kind, fields: None,
        *,
        stage: int | None = None,
        spool: Spool | None = None,
        spread: Spread = in_turn,
    ) -> "Core":
        """Assemble the core of a driver's method over this peer, for one stage or (None) the whole
        model. `spool` is where snapshots are kept (None: `compute` writes them into memory), and
        `spread` the threads that encode and check payloads."""
        home = driver.replica.allocate((0,)).device  # where methods want a result's tensors
        client = ExchangeClient(peer, peer.terms.seed, stage, spread, home)
        state_sync = StateSync(peer, driver, client, compute, spool)
        loop = Loop(driver, client, state_sync, training_task, compute, train, report)
        state_sync.loop, driver.has_passed = loop, client.has_passed
        if stage is None:  # a stage steps with its group, so it has nothing to go on with
            driver.hopeless = client.is_hopeless
        return cls(driver, client, state_sync, loop)
