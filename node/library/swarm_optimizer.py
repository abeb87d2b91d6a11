"""A swarm for any PyTorch loop: a `torch.optim.Optimizer` whose `step` also syncs the model.

The driver is that of node/loop.py. The local step runs in the caller's thread, everything else in
one background thread. `step` returns once the driver has nothing to apply or to wait for.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from farflock.compression.codec import UnencodableTensor
from farflock.node.errors import Failure, Usage
from farflock.node.library.averaged_buffers import (
    AveragedBuffers,
    require_average,
)
from farflock.node.library.evaluated_model import EvaluatedModel
from farflock.node.library.jump_watch import MAX_SAID, Jumps, JumpWatch, OnJump
from farflock.node.library.last_round import OwnSteps, finish, run_steps
from farflock.node.library.loop_measures import LoopMeasures, RoundReport
from farflock.node.library.model_check import refuse_copies, require_trainable
from farflock.node.library.own_defaults import Closure, own_defaults
from farflock.node.library.parameter_watch import ParameterWatch
from farflock.node.library.presence import EntryPoint, ExternalStep, JoinRequest, OptimizerNode
from farflock.node.library.rank_calls import (
    RankFacts,
    RankReport,
    is_grouped,
    rank_calls,
    unwrapped,
)
from farflock.node.library.remembered import recall, remember
from farflock.node.library.run_options import OwnOptions, SwarmOptions, split_options
from farflock.node.library.scheduled import tell_of_late_start
from farflock.node.library.step_gradients import Held, asked_by_a_scaler, kept, take_scale
from farflock.node.library.swarm_status import SwarmStatus, status_of
from farflock.node.library.telling import tell
from farflock.node.model.device import Device, lacks_for_outer
from farflock.node.model.replica import OnDevice, Storage, in_memory
from farflock.node.run.fit import SHARED_MOMENTS, require_inner, require_layers
from farflock.node.run.tensor_list import encode, list_tensors
from farflock.node.run.user_terms import (
    GivenMethod,
    TomlTable,
    fingerprint,
    founded,
    spelt,
    wish,
)
from farflock.node.state.outer_files import OuterFiles
from farflock.node.state.paths import RunFolder
from farflock.node.train.ending import drain
from farflock.optimizers.method import Method, Replica
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.layers import is_numbered, layers_of
from farflock.optimizers.parts.portable_inner import make_portable

if TYPE_CHECKING:
    from transformers import Trainer

InnerSpec = str | torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

MEMBERS_TIMEOUT_S = 600.0
DRAIN_S = 5.0


class SwarmOptimizer(torch.optim.Optimizer, AbstractContextManager["SwarmOptimizer", None]):
    """Trains your own model together with peers far away.

    Without `invite` it starts a run with this model's weights; the property `invite` lets others
    in. With one it joins: the constructor returns once the run's state is in the model. `method`
    is a name with options (`period`, `codec`, `deadline_s`, …) as in a manifest, or an instance,
    such as `farflock.DiLoCo(period=50)`, which says those of its options that differ from their
    defaults. A joiner may leave all of it out, and must not contradict the run's. An instance of
    your own class is known by its dotted name: all peers need the same code.

    `inner` makes the steps between exchanges: "adamw", "sgd", "muon" or "nadam" with `lr`, or any
    torch optimizer of the model's parameters, or a function that makes one from them. You or your
    scheduler set the learning rate in `param_groups`, which are the inner optimizer's. Some methods
    need a certain one: demo and flexdemo "sgd" (or sign=False), desloc "adamw", ddp one whose
    moments it can send. A step adds `tokens_per_step` to the run's progress. `on_jump` says what
    follows if the program changes weights outside of a step, in the first step among others or by
    more than a round: "refuse" (an error, the default), "adopt" (the run's weights come back, the
    default under a trainer that loads checkpoints), or "keep".

    Other keywords say where and how this machine takes part. Links are on `host` (default:
    loopback), at `port` and the next one, and discovery is at `dht_port` (0, the default of both:
    any free one); with `client_mode=True` the peer only dials out. `advertise="203.0.113.7:4002"`,
    or several of these, publishes the address at which a router, a cloud or a container's host
    passes on 4002 and 4003, and lets the links be at every address of the machine, at the same
    ports. `up="5mbit"` and `down="20mbit"` are what the peer may send to members and read of what
    they send (default: what the folder remembers of an earlier start, else "all").

    `folder` keeps what a program needs to go on when it is started again: its identity and, after
    the first step, each `checkpoint_s` (600.0) seconds and at the end, its state (none of several
    processes that are one peer). Without it, a program is a stranger the next time.
    `outer_state="disk"` keeps the method's state in memory-mapped files of the folder, for models
    whose state does not fit into memory (default: "host"); `outer_state="device"` keeps it, and
    encodes and computes with it, on the device of the model.

    A step waits only for an exchange that is due, and at most until its deadline; later results are
    applied in a later step. Frozen parameters stay as they are and must be equal everywhere; with
    `frozen="any"`, or another name on which all peers agree, such as that of a base model, they are
    not compared, and may have other types. Buffers are each peer's own;
    with `buffers="average"` (all peers), those of floats that a state dict has, such as BatchNorm's
    statistics, are averaged with each round of an exact method. Use `with SwarmOptimizer(...) as
    opt:` or call `close`. `step` raises network errors.

    In a program that several processes run (torch.distributed is initialised, the model under FSDP2
    or DDP), they are one peer: rank 0 is in the swarm, and the others make the same calls.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str | GivenMethod | None = None,
        invite: str | EntryPoint | None = None,
        *,
        inner: InnerSpec = "adamw",
        lr: float | None = None,
        run: str | None = None,
        seed: int | None = None,
        tokens_per_step: int = 1,
        on_jump: OnJump | None = None,
        **options: Unpack[SwarmOptions],
    ) -> None:
        own, terms = split_options(options)
        self._ranks = rank_calls(partial(_facts_of, self))
        with self._ranks.together() as leads:
            model = unwrapped(model)
            require_trainable(model)
            self._jumps = Jumps(on_jump)
            self._inner = inner_optimizer(model, inner, lr)
            self._ready = False
            super().__init__(self._inner.param_groups, self._inner.defaults)
            self.param_groups, self.state = self._inner.param_groups, self._inner.state
            buffers = self._ranks.buffers(model, terms.get("buffers"))
            averaged = {} if buffers is None else buffers.agreed
            frozen = terms.get("frozen")  # of frozen shards all ranks take part
            listed = list_tensors(model, with_frozen=frozen is None, buffers=averaged)
            self._replica = self._ranks.replica(model, self._inner)
            self._training_task, self._news = ExternalStep(tokens_per_step), LoopMeasures()
            self._watch, self._own = ParameterWatch(model), OwnSteps()
            self._held = Held(self._replica)
            self._evaluated = EvaluatedModel(model, self._watch.trained, self._ranks)
            self.follows_run = False
            if leads:
                self._replica.storage = _storage(model, own)
                theirs = fingerprint(model, self._inner, listed)
                name, spelt_out = spelt(method, dict(terms))
                wished = wish(theirs, name, {"name": run, "seed": seed}, spelt_out)
                if not isinstance(invite, str):  # a joining peer learns the run's terms later
                    require_founded(wished, self._inner, self._replica, buffers)
                if invite is None or isinstance(invite, str):
                    from farflock.node.library.door import NetworkEntryPoint  # it loads hivemind

                    invite = NetworkEntryPoint.of(invite, own)
                news, task = self._news, self._training_task
                self._life, end = invite.enter(
                    JoinRequest(wished, self._replica, task, news.report, encode(listed), buffers)
                )
                self._here, self._end = self._life.value, weakref.finalize(self, end)
                self._here.loop.counted = self._own.counted
                self._own.begins = self._here.began_at
                made = self._here.terms.build()
                try:
                    require_fit(self.method, made, self._inner, self._replica.names)
                except Usage:
                    self.close(patient=False)
                    raise
            else:
                self._end = weakref.finalize(self, self._ranks.end)
        self._jumps.watch = JumpWatch(self._watch.trained)
        if self.method in SHARED_MOMENTS:
            make_portable(self._inner)
        self._ready = True

    # torch's optimizer

    _step_supports_amp_scaling = property(asked_by_a_scaler)

    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401 - torch's
        """Make a local step with the present gradients (or those of `closure`), and the exchanges
        that are due. The gradients stay. A step that a `GradScaler` skips counts, and changes
        nothing.

        Return the closure's result. After Ctrl-C the exchange continues, and the next call waits
        for it. Raise `Usage`, before anything is sent, if the model's parameters are not those
        that it had when this optimizer was made.
        """
        overflowed = take_scale(self)
        with kept(self, closure) as closure:
            if overflowed:  # the step counts, and changes nothing
                super().zero_grad()
            work, report = partial(self._step, overflowed), partial(_report_of, self)
            returned = self._ranks.step(work, closure, report)
        self._jumps.watch.mark(self.last_round)
        return returned

    def _step(self, overflowed: bool, closure: Closure | None) -> Any:  # noqa: ANN401 - torch's
        life, loop = self._life, self._here.loop
        self._evaluated.require_own()
        self._watch.check()
        self._held.add()
        change = self._ranks.change(self._jumps.watch.change(has_all=not is_grouped()))
        if self._jumps.answer(
            change, self._here, not self._own.made, life.call, self._news.waiting
        ):
            self._ranks.drop_gradients(self._inner)
        with self._news.waiting():
            progress = life.call(loop.begin_step, through=True)
        theirs = closure and self._held.apart_from(self._watch.checked(closure), loop.driver.method)
        try:
            with own_defaults(theirs) as self._training_task.closure:
                loss = loop.train_one(progress)
        finally:
            self._training_task.closure = None
        if not self._own.made and not self.follows_run:
            tell_of_late_start(self._here, self.param_groups, self.run_steps())
        self._own.stepped(loop.step + 1, len(self.members))
        try:
            with self._news.waiting():
                life.call(partial(self._here.end_step, loss), through=True)
        except UnencodableTensor as error:
            self._end()  # or each later step would fail in another way
            raise Failure("this peer leaves its run", str(error), "") from error
        for reason in self._news.adopted():
            tell(f"this peer has dropped its own work and taken over the run's state: {reason}")
        self._own.tell_of_tokens(self.tokens_per_step)
        self._news.stepped(self.tokens_per_step)
        self._held.note(loop.driver.method)
        return self._training_task.returned

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with the method's under "swarm" (None in ranks other
        than 0, whose shards' state it is). Together with the model's own `state_dict`, it is all
        that a lone peer needs to continue as if it had never stopped."""
        with self._ranks.together() as leads:
            swarm = self._life.call(lambda: remember(self._here)) if leads else None
            return {**self._inner.state_dict(), "swarm": swarm}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore all of a state dict, bit for bit, if this peer is alone in a new run (load the
        model's too). Among other peers, restore only the inner optimizer's state, or nothing if
        the method shares the moments."""
        state = dict(state_dict)
        swarm = state.pop("swarm", None)
        with self._ranks.together() as leads:
            said = self._ranks.said
            alone = said.alone if said else _is_alone(self._here)
            if self.method in SHARED_MOMENTS and not alone:
                return
            self._inner.load_state_dict(state)
            self.param_groups, self.state = self._inner.param_groups, self._inner.state
            if leads and alone and swarm is not None:
                self._life.call(lambda: recall(self._here, swarm))
        if alone and (swarm is not None or not leads):  # other ranks hold the rest of the state
            self._jumps.watch.mark()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `Usage` once the run has begun: its terms fix the parameters."""
        if self._ready:
            why = "all peers of a run train the same parameters"
            raise Usage(
                "no parameters can be added", why, "make a new optimizer and start a new run"
            )
        super().add_param_group(param_group)

    __reduce_ex__ = refuse_copies

    # the swarm

    @property
    def invite(self) -> str:
        """The word with which other peers join, valid for a week; any member can make one."""
        return self._ranks.said.invite if self._ranks.said else self._here.invite()

    @property
    def method(self) -> str:
        """The name of the run's method."""
        return self._ranks.said.method if self._ranks.said else self._here.terms.method.name

    @property
    def peer(self) -> str:
        """This peer's base58 libp2p id."""
        return self._ranks.said.peer if self._ranks.said else self._here.peer.me

    @property
    def seed(self) -> int:
        """The seed of all randomness of the run."""
        return self._ranks.said.seed if self._ranks.said else self._here.terms.run.seed

    @property
    def members(self) -> tuple[str, ...]:
        """The peers of the newest view, this one included."""
        if self._ranks.said:
            return self._ranks.said.members
        return self._here.peer.context.views.newest.peers

    @property
    def twin(self) -> str:
        """A member that sends the same updates as this one, as both draw the same data; or ""."""
        return self._ranks.said.twin if self._ranks.said else self._here.twin

    @property
    def last_round(self) -> RoundReport | None:
        """The last round that was applied here, or None."""
        return self._ranks.said.last_round if self._ranks.said else self._news.last_round

    @property
    def tokens(self) -> int:
        """The run's progress: the agreed tokens plus an estimate of what all members have
        trained since."""
        if self._ranks.said:
            return self._ranks.said.tokens

        async def tokens() -> int:
            return self._here.tokens

        return self._life.call(tokens)

    def run_steps(self) -> int:
        """Return the run's progress in steps of a peer that was there from the beginning."""
        return self._ranks.said.run_steps if self._ranks.said else run_steps(self._here, self._own)

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens that a step counts for; you may set it before each step."""
        return self._training_task.tokens_per_step

    @tokens_per_step.setter
    def tokens_per_step(self, tokens: int) -> None:
        self._training_task.tokens_per_step = tokens

    def eval_params(self) -> dict[str, torch.Tensor]:
        """Return the method's outer parameters if it has any, otherwise the model's: in float32
        (complex64) on the CPU, and with equal bits on all peers after a round of an exact one.
        Ranks other than 0 return nothing."""
        with self._ranks.together() as leads:
            found = self._life.call(self._here.eval_params) if leads else {}
            return self._watch.like_model(found)

    def status(self) -> SwarmStatus:
        """Return the members, the last round, the traffic, and whom this peer waits for; printed,
        it is a sentence. Ranks other than 0 return what rank 0 knew at the end of the last call."""
        if self._ranks.said:
            return self._ranks.said.status

        here, members, last = self._here, self.members, self.last_round
        if self._life.ended:
            return status_of(here.peer, members, last, None)

        async def now() -> SwarmStatus:
            return status_of(here.peer, members, last, here.waits())

        return self._life.call(now)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the model hold what `eval_params` returns while the block lasts, and then the
        program's own parameters again, bit for bit. Buffers stay. No step can be made inside."""
        try:
            with self._evaluated.block(lambda work: self._life.call(lambda: work(self._here))):
                yield
        finally:
            self._jumps.watch.mark(self.last_round)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:  # noqa: ANN401 - theirs
        """Save the model with what `eval_params` returns, by its own method of this name (those of
        transformers, peft and diffusers have one), which gets the options; rank 0 alone saves.
        Raise `Usage` if it has none, or is in shards."""
        save = self._evaluated.saving()
        with self.evaluating():
            if not self._ranks.said:
                save(folder, **options)

    def measures(self) -> dict[str, float]:
        """Return what this peer has measured so far, for loggers of your own; nothing once it is
        closed. docs/reference/measures.md says names and units."""
        if self._ranks.said or not self._end.alive:
            return {}

        async def here() -> tuple[int, tuple[int, int], int]:
            traffic = self._here.peer.context.links.total_bytes()
            return self._here.loop.driver.tokens, traffic, len(self.members)

        return self._news.numbers(*self._life.call(here))

    def log_to(self, trainer: "Trainer") -> None:
        """Let a Hugging Face `Trainer` log these measures beside its own, in all its loggers."""
        from farflock.node.library.trainer_callback import add_to  # late: it loads transformers

        add_to(trainer, self.measures)

    def wait_for_members(self, count: int, timeout_s: float = MEMBERS_TIMEOUT_S) -> None:
        """Wait until the run has `count` members; raise `TimeoutError` after `timeout_s`."""
        with self._ranks.together() as leads:
            if not leads:
                return
            here = self._here
            try:
                self._life.call(lambda: here.until(lambda: len(self.members) >= count, timeout_s))
            except TimeoutError:
                raise TimeoutError(
                    f"{len(self.members)} of {count} members are there after {timeout_s:g} s;"
                    " check that the others are running and use this run's invite"
                ) from None

    def finish(self) -> None:
        """Make a last round for the members that are there, so that no step of this program is
        its own alone: if all of them call this, those of an exact method end with equal weights.

        Steps after it are steps as before. Present gradients are dropped."""
        self.zero_grad()
        with self._ranks.together() as leads:
            if leads:
                self._held.add()
                here, own, task = self._here, self._own, self._training_task
                with self._news.waiting():
                    self._life.call(lambda: finish(here, own, task, DRAIN_S))
        self._jumps.watch.mark(self.last_round)

    def close(self, patient: bool = True) -> None:
        """Leave the run, and end the thread and the directory's process. It is safe to call this
        twice.

        If `patient`, first apply what is under way, and stay a few seconds for peers that still
        need this one."""
        try:
            if patient and self._end.alive:
                with self._ranks.together() as leads:
                    try:
                        if leads and not self._life.ended:
                            self._life.call(lambda: drain(self._here.loop, DRAIN_S, last=True))
                            self._life.call(self._here.save)
                            self._here.patient = True
                            self._own.tell()
                    finally:
                        if leads:  # the others serve this peer's state until it has left
                            self._end()
        finally:
            self._ranks.end()
            self._end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the run: patiently after success, at once after an exception."""
        self.close(patient=kind is None)


def _is_alone(here: OptimizerNode) -> bool:
    """Return whether a run is this peer's, and nobody else is in it."""
    return here.founder and len(here.peer.context.views.newest.peers) == 1


def _report_of(optimizer: SwarmOptimizer) -> RankReport:
    """Return what a process sees before a step, if rank 0 asks."""
    try:
        optimizer._watch.check()
    except Usage as error:
        return RankReport(str(error)[:MAX_SAID])
    return RankReport(change=optimizer._jumps.watch.change(has_all=False))


def _facts_of(optimizer: SwarmOptimizer) -> RankFacts:
    """Return what the other ranks know of the swarm after a call."""
    if not optimizer._end.alive:
        return RankFacts()
    try:
        invite = optimizer.invite
    except (Failure, Usage):  # no address that others could reach
        invite = ""
    return RankFacts(
        optimizer.peer,
        optimizer.method,
        invite,
        optimizer.members,
        optimizer.last_round,
        optimizer.tokens,
        optimizer.run_steps(),
        _is_alone(optimizer._here),
        optimizer.seed,
        optimizer.twin,
        optimizer.status(),
    )


def _storage(model: nn.Module, own: OwnOptions) -> Storage:
    """Return where the method's state is kept; raise `Usage` if it cannot be there."""
    kept, folder = own.get("outer_state", "host"), own.get("folder")
    if kept == "device":
        return OnDevice(_device_of(model)).allocate
    if kept == "host":
        return in_memory
    if kept != "disk":
        raise Usage(
            f"outer_state={kept!r}", "no such place is known", 'choose "host", "disk" or "device"'
        )
    if folder is None:  # a system's temporary files may be in its memory
        raise Usage(
            'outer_state="disk"', "no folder is named", "give `folder`, on a disk with room"
        )
    return OuterFiles(RunFolder(folder).outer).allocate


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; raise `Usage` if the method's state cannot be
    there."""
    place, *others = {entry.device for entry in model.parameters()}
    why = lacks_for_outer(Device(place, str(place)), alone=not is_grouped())
    if others:
        why = "the model's parameters are on several devices"
    if why:
        raise Usage('outer_state="device"', why, 'leave outer_state out, or choose "disk"')
    return place


def require_founded(
    wished: TomlTable,
    inner: torch.optim.Optimizer,
    replica: Replica,
    buffers: AveragedBuffers | None,
) -> None:
    """Raise `Usage` unless a founder's terms fit its inner optimizer, its layers and the buffers
    that it wants to be averaged."""
    terms = founded(wished)
    made = terms.build()
    require_fit(terms.method.name, made, inner, replica.names)
    if buffers is not None:
        require_average(terms.method.name, made, replica)


def require_fit(
    name: str, made: Method, inner: torch.optim.Optimizer, parameters: Sequence[str]
) -> None:
    """Raise `Usage` unless the method fits the inner optimizer and this model's layers."""
    layers = layers_of(parameters)
    require_inner(name, made, inner)
    require_layers(made, sum(map(is_numbered, layers)) or len(layers))


def inner_optimizer(model: nn.Module, inner: InnerSpec, lr: float | None) -> torch.optim.Optimizer:
    """Return the inner optimizer over a model's trained parameters; raise `Usage` for a bad
    `inner`."""
    if isinstance(inner, str):
        try:
            return InnerConfig(inner, 1e-3 if lr is None else lr).build(model)  # type: ignore[arg-type]  # it checks
        except ValueError as error:
            raise Usage("inner", str(error), "") from None
    if lr is not None:
        raise Usage("lr", "what is given as `inner` sets its own learning rate", "leave lr out")
    trained = [entry for entry in model.parameters() if entry.requires_grad]
    made = inner if isinstance(inner, torch.optim.Optimizer) else inner(trained)
    if not isinstance(made, torch.optim.Optimizer) or isinstance(
        made, torch.optim.LBFGS | SwarmOptimizer
    ):
        raise Usage(
            "inner",
            f"it is a {type(made).__name__}, or makes one",
            "give a first-order torch optimizer, or a function that makes one",
        )
    theirs = {id(entry) for entry in model.parameters()}
    if any(id(entry) not in theirs for group in made.param_groups for entry in group["params"]):
        raise Usage(
            "inner",
            "its optimizer trains parameters that are not the model's",
            "build it from the parameters of the model that SwarmOptimizer gets",
        )
    return made
