"""One node's part in a run, put together: model, batches, method, driver, exchange client, state sync and
loop over one peer.

Processes and simulations assemble their nodes here, alike; what differs (links, directory, compute) is handed in.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from farflock.node.assembly.resume import Newcomer
from farflock.node.loop import Loop
from farflock.node.model.data import Batches
from farflock.node.model.llama import Llama, build
from farflock.node.model.replica import PlainReplica
from farflock.node.model.tokenizer import TokenIds
from farflock.node.reporting import Report
from farflock.node.run.terms import RunPlan
from farflock.node.train.driver import Driver
from farflock.node.train.end_barrier import EndBarrier
from farflock.node.train.exchange_client import ExchangeClient
from farflock.node.train.state_sync import StateSync
from farflock.node.train.task import LanguageModelTask
from farflock.optimizers.catalog import method
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import OpenWait, Peer
from farflock.swarm.peer.snapshots import DownloadProgress


@dataclass(slots=True)
class ReplicaNode:
    """A node that is ready to found a run or to join one. Its process, the status and the live view see a stage or a
    trainer by the same attributes (node/pipeline/node.py)."""

    peer: Peer
    model: Llama
    state_sync: StateSync
    loop: Loop
    training_task: Newcomer
    role: str = "replica"
    # How it ends, once it runs, where all are to have one state then.
    together: EndBarrier | None = field(default=None, init=False)

    @property
    def step(self) -> int:
        """Its own."""
        return self.loop.step

    @property
    def tokens(self) -> int:
        """The agreed ones, and what everybody has presumably trained since."""
        return self.loop.driver.tokens

    @property
    def trained_tokens(self) -> int:
        """As many in each step."""
        return self.step * self.loop.training_task.tokens_per_step

    @property
    def last_loss(self) -> float | None:
        """Of the last step."""
        return self.loop.last_loss

    @property
    def work(self) -> dict[str, int]:
        """Nothing but steps."""
        return {}

    def waits(self) -> list[OpenWait]:
        """Its open rounds, and at the end those who have not ended yet."""
        return self.peer.waits() + (self.together.waits() if self.together is not None else [])

    @property
    def stopping(self) -> bool:
        """Whether the loop is to end."""
        return self.loop.stop.requested

    def stop(self) -> None:
        """End after the step that is running."""
        self.loop.stop()

    async def run(self, total_tokens: int) -> None:
        """Train; where the method promises one state, until all have ended with it."""
        exact = self.loop.driver.method.equality == "exact"
        self.together = EndBarrier(self.peer, self.loop.driver, self.state_sync) if exact else None
        await self.loop.run(total_tokens, barrier=self.together)

    def found(self) -> None:
        """Found the run: my initial weights are everybody's."""
        self.peer.found()
        driver = self.loop.driver
        driver.method.snapshot(driver.replica)  # the round begins here, before anybody can ask for it beside a step
        self.state_sync.open()

    async def join(
        self, records: list[bytes], timeout_s: float, downloaded: DownloadProgress = lambda here, total: None
    ) -> None:
        """Join through these members: get to know the views, download the state, and ask to be admitted."""
        await self.peer.meet(records, timeout_s)
        await self.state_sync.adopt(timeout_s, downloaded)
        self.peer.ask_in()
        self.training_task.joined_at = self.loop.step


def replica_node(
    plan: RunPlan,
    peer: Peer,
    tokens: TokenIds,
    *,
    compute: Compute,
    train: Callable[[Callable[[], float]], Awaitable[float]],
    report: Report = lambda kind, fields: None,
) -> ReplicaNode:
    """Assemble a node on this peer; `tokens` is the run's training text."""
    model = build(plan.model, plan.run_seed)
    replica = PlainReplica(model, plan.inner.build(model), plan.clip_norm)
    batches = Batches(tokens, plan.run_seed, peer.me, plan.batch, plan.seq, recurring=plan.samples)
    training_task = LanguageModelTask(model, replica, batches, plan.schedule, plan.accumulate, plan.autocast)
    driver = Driver(method(plan.method, **plan.options), replica)
    client = ExchangeClient(peer, plan.run_seed)
    state_sync = StateSync(peer, driver, client, compute)
    loop = Loop(driver, client, state_sync, training_task, compute, train, report)
    return ReplicaNode(peer, model, state_sync, loop, training_task)
