"""One node's part in a run, put together: model, batches, method, driver, courier, seat and loop over one peer.

Processes and simulations assemble their nodes here, alike; what differs (links, directory, compute) is handed in.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from farflock.node.loop import Loop, Trainee
from farflock.node.model.data import Batches
from farflock.node.model.llama import Llama, build
from farflock.node.model.replica import PlainReplica
from farflock.node.model.tokenizer import Tokens
from farflock.node.run.terms import Plan
from farflock.node.train.driver import Driver
from farflock.node.train.end_barrier import Together
from farflock.node.train.exchange_client import Courier
from farflock.node.train.state_sync import Seat
from farflock.node.train.task import LanguageModel
from farflock.optimizers.catalog import method
from farflock.swarm.peer.peer import Peer, Wait
from farflock.swarm.peer.snapshots import Progress as Downloaded

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
Report = Callable[[str, dict[str, object]], None]


class TakingPart(Protocol):
    """A node's part in a run, whatever it is (a replica here, a stage or a trainer in node/pipeline/node.py), as its
    process, the status and the live view see it."""

    @property
    def peer(self) -> Peer: ...
    @property
    def role(self) -> str:
        """What it does, as its record says."""
        ...

    @property
    def step(self) -> int:
        """Its own steps, or microbatches."""
        ...

    @property
    def tokens(self) -> int:
        """Where the run is."""
        ...

    @property
    def trained_tokens(self) -> int:
        """What it has trained itself."""
        ...

    @property
    def last_loss(self) -> float | None:
        """In nats a token, where it knows one."""
        ...

    @property
    def work(self) -> dict[str, int]:
        """What else can be counted, by name."""
        ...

    def waits(self) -> list[Wait]:
        """What it waits for."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether it is to end."""
        ...

    def stop(self) -> None:
        """End soon, in good order."""
        ...

    def found(self) -> None:
        """Found the run."""
        ...

    async def join(self, records: list[bytes], timeout_s: float, downloaded: Downloaded) -> None:
        """Join through these members: download the state, and ask to be admitted. `TimeoutError` if that takes too long."""
        ...

    async def run(self, total_tokens: int) -> None:
        """Take part until the run has its tokens, or until `stop`."""
        ...


class NewcomersTrainee(Trainee, Protocol):
    """A trainee that warms up again after it joined: its inner moments are empty then."""

    joined_at: int  # the step at which the peer came in; 0 for a founder


@dataclass(slots=True)
class Participant:
    """A node that is ready to found a run or to join one."""

    peer: Peer
    model: Llama
    seat: Seat
    loop: Loop
    trainee: NewcomersTrainee
    role: str = "replica"
    # How it ends, once it runs, where all are to have one state then.
    together: Together | None = field(default=None, init=False)

    @property
    def step(self) -> int:
        """Its own."""
        return self.loop.step

    @property
    def tokens(self) -> int:
        """The agreed ones, and what everybody has presumably trained since."""
        return self.seat.progress(self.step).tokens

    @property
    def trained_tokens(self) -> int:
        """As many in each step."""
        return self.step * self.trainee.tokens_per_step

    @property
    def last_loss(self) -> float | None:
        """Of the last step."""
        return self.loop.last_loss

    @property
    def work(self) -> dict[str, int]:
        """Nothing but steps."""
        return {}

    def waits(self) -> list[Wait]:
        """Its open rounds, and at the end those who have not ended yet."""
        return self.peer.waits() + (self.together.waits() if self.together is not None else [])

    @property
    def stopping(self) -> bool:
        """Whether the loop is to end."""
        return self.loop.stopping

    def stop(self) -> None:
        """End after the step that is running."""
        self.loop.stop()

    async def run(self, total_tokens: int) -> None:
        """Train; where the method promises one state, until all have ended with it."""
        exact = self.loop.driver.method.equality == "exact"
        self.together = Together(self.peer, self.seat) if exact else None
        await self.loop.run(total_tokens, together=self.together)

    def found(self) -> None:
        """Found the run: my initial weights are everybody's."""
        self.peer.found()
        driver = self.loop.driver
        driver.method.snapshot(driver.replica)  # the round begins here, before anybody can ask for it beside a step
        self.seat.open()

    async def join(
        self, records: list[bytes], timeout_s: float, downloaded: Downloaded = lambda here, total: None
    ) -> None:
        """Join through these members: get to know the views, download the state, and ask to be admitted."""
        await self.peer.meet(records, timeout_s)
        await self.seat.adopt(timeout_s, downloaded)
        self.peer.ask_in()
        self.trainee.joined_at = self.loop.step


def participant(
    plan: Plan,
    peer: Peer,
    tokens: Tokens,
    *,
    compute: Compute,
    train: Callable[[Callable[[], float]], Awaitable[float]],
    report: Report = lambda kind, fields: None,
) -> Participant:
    """Assemble a node on this peer; `tokens` is the run's training text."""
    model = build(plan.model, plan.run_seed)
    replica = PlainReplica(model, plan.inner.build(model), plan.clip_norm)
    batches = Batches(tokens, plan.run_seed, peer.me, plan.batch, plan.seq, recurring=plan.samples)
    trainee = LanguageModel(model, replica, batches, plan.schedule, plan.accumulate, plan.autocast)
    driver = Driver(method(plan.method, **plan.options), replica)
    courier = Courier(peer, plan.run_seed, compute)
    seat = Seat(peer, driver, courier, compute)
    return Participant(peer, model, seat, Loop(driver, seat, trainee, compute, train, report), trainee)
