"""A whole replica's part in a run, assembled over one peer: the model, the method and its core
(core.py).

Processes and simulations assemble nodes in the same way; the links, directory and compute are
passed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from farflock.node.assembly.coming_back import enter
from farflock.node.assembly.core import Core
from farflock.node.assembly.part import WholePart
from farflock.node.assembly.resume import Newcomer, load_state
from farflock.node.data.samples import Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.loop import Loop
from farflock.node.model.compiled import CompiledLayers
from farflock.node.model.data import Batches, Start
from farflock.node.model.device import Device
from farflock.node.model.llama import Llama
from farflock.node.model.replica import PlainReplica, Storage, in_memory
from farflock.node.model.step_options import StepOptions, logits_on
from farflock.node.model.weights_folder import WeightsFolder, initial
from farflock.node.reporting import Report
from farflock.node.run.terms import RunPlan
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.driver import Driver
from farflock.node.train.end_barrier import EndBarrier
from farflock.node.train.evaluation_watch import EvaluationWatch, go_on
from farflock.node.train.evaluator import Evaluator
from farflock.node.train.state_sync import Spool, StateSync
from farflock.node.train.task import LanguageModelTask, Train
from farflock.optimizers.catalog import method
from farflock.optimizers.parts.spread import Spread, in_turn
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import OpenWait, Peer
from farflock.swarm.peer.snapshots import DownloadProgress

if TYPE_CHECKING:
    from farflock.node.assembly.followers import ShardedReplica


class SampledTask(Newcomer, Protocol):
    """A training task on batches of its own."""

    @property
    def batches(self) -> Batches: ...


@dataclass(slots=True)
class ReplicaNode(WholePart):
    """The `Part` (node/assembly/part.py) of a node with a whole model."""

    peer: Peer
    model: Llama
    state_sync: StateSync
    loop: Loop
    training_task: SampledTask
    evaluator: Evaluator | None = None  # None: the run is not evaluated here
    before: Checkpoint | None = None  # of its last life in this run
    begins_alike: bool = True  # each node's first weights are those with which the run began
    # set by `run` if the method is exact
    together: EndBarrier | None = field(default=None, init=False)

    @property
    def trained_tokens(self) -> int:
        """The tokens that this node has trained."""
        return self.step * self.loop.training_task.tokens_per_step

    @property
    def watch(self) -> EvaluationWatch | None:
        """The evaluations of the run, as far as this node knows."""
        return None if self.evaluator is None else self.evaluator.watch

    @property
    def evaluates(self) -> bool:
        """True if the node may be drawn to evaluate the run."""
        return self.evaluator is not None

    def waits(self) -> list[OpenWait]:
        """Return the open rounds and, at the end, the waits for peers that have not ended yet."""
        return self.peer.waits() + (self.together.waits() if self.together is not None else [])

    async def run(self, total_tokens: int) -> None:
        """Train; if the method is exact, end when all peers have ended with the same state."""
        exact = self.loop.driver.method.equality == "exact"
        self.together = EndBarrier(self.peer, self.loop.driver, self.state_sync) if exact else None
        if self.evaluator is not None:
            await self.evaluator.between_steps()  # before the first step
        await self.loop.run(total_tokens, barrier=self.together)

    async def resume(self, saved: Checkpoint) -> None:
        """Start the run again where this node's checkpoint ends."""
        self.peer.found()
        load_state(self, saved)
        go_on(self.watch, saved.meta)

    async def join(
        self,
        records: Sequence[bytes],
        timeout_s: float,
        downloaded: DownloadProgress = lambda here, total: None,
    ) -> None:
        """Join the run through the members with these records: learn the views within `timeout_s`,
        adopt the state, which takes as long as it comes, and ask to be admitted."""
        await enter(self, records, timeout_s, downloaded)


def task_of(
    plan: RunPlan, model: Llama, batches: Batches, device: Device, options: StepOptions
) -> LanguageModelTask:
    """Return the task that trains a model on this device, with its replica and inner optimizer."""
    model.checkpointing = options.checkpoints
    model.logits_at_once = logits_on(device)
    inner = plan.inner_of(model, fused=device.has_fused_adamw, moments=options.moments)
    replica = PlainReplica(model, inner, plan.clip_norm)
    task = LanguageModelTask(
        model,
        replica,
        batches,
        plan.schedule,
        plan.accumulate,
        plan.autocast,
        device,
        options.micro_batch,
    )
    if options.compiles_on(device):
        task.compiled = CompiledLayers(model)
    return task


def replica_node(
    plan: RunPlan,
    peer: Peer,
    tokens: Text,
    *,
    compute: Compute,
    train: Train,
    report: Report = lambda kind, fields: None,
    storage: Storage = in_memory,
    spool: Spool | None = None,
    spread: Spread = in_turn,
    device: Device | None = None,
    step_options: StepOptions | None = None,
    shared: "ShardedReplica | None" = None,
    weights: WeightsFolder | None = None,
    start: Start = Start(),  # noqa: B008 - it cannot change
) -> ReplicaNode:
    """Assemble a node over this peer; `tokens` is the run's training text, in which it begins at
    `start`, `storage` where the method's state is kept, `spool` where snapshots are, `spread` the
    threads that encode and check payloads, `device` where the model trains (None: the CPU),
    `step_options` how, `shared` this process' part of it if several train it, and `weights` what a
    founder's model begins with (None: what the run's seed gives)."""
    whole = shared or _whole_replica(
        plan, tokens, start, peer.me, device or Device(), step_options or StepOptions(), weights
    )
    model, replica, training_task = whole
    replica.storage = storage
    driver = Driver(method(plan.method, **plan.options), replica)
    core = Core.over(
        peer, driver, training_task, compute, train, report, spool=spool, spread=spread
    )
    return ReplicaNode(peer, model, core.state_sync, core.loop, training_task)


def _whole_replica(
    plan: RunPlan,
    tokens: Text,
    start: Start,
    me: str,
    device: Device,
    options: StepOptions,
    weights: WeightsFolder | None,
) -> tuple[Llama, PlainReplica, LanguageModelTask]:
    model = initial(plan.model, plan.run_seed, weights).to(device.place)
    stream = SampleStream(plan.run_seed, me)
    batches = Batches(tokens, stream, plan.batch, plan.seq, plan.samples, start)
    training_task = task_of(plan, model, batches, device, options)
    return model, training_task.replica, training_task
