"""The content of a node's checkpoint, and how a node resumes from it as if it had never stopped.

A checkpoint holds the replica with its gradients and inner moments, the method's shared state (the
one a joiner receives) and its personal state, every pending exchange with its result if known, and
the cursors: step, round, tokens. On resuming, an exchange without a result is reported `failed`
once: the method keeps the work and sends it again. That is correct only if the whole swarm stopped.
If the swarm went on, a node restores only its cursors and moments (`load_moments`) and adopts the
swarm's state.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from torch import Tensor

from farflock.node.loop import Loop
from farflock.node.model.replica import drop_spoiled
from farflock.node.state.checkpoint import Checkpoint, CheckpointCorrupt
from farflock.node.train.driver import Pending, RunPosition
from farflock.node.train.state_sync import StateSync
from farflock.optimizers.method import Exchange, ExchangeKey, RandomGroups, Replica, Result, State
from farflock.optimizers.parts.blocks import LazyTensors, is_zero, shapes_of, stored
from farflock.optimizers.parts.corrections import TREND
from farflock.optimizers.parts.state import WrongState, unnamed
from farflock.optimizers.parts.stateful import live_state

STEPPED = ("inner", "replica", "personal")  # the parts of a checkpoint that a local step changes
MOMENTS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer", "mu_product", TREND)

StateGroups = dict[str, dict[str, Tensor]]


class Newcomer(Protocol):
    """A training task that warms up after its node joined with empty inner moments."""

    joined_at: int  # step at which the node joined; 0 for a founder


class Resumable(Protocol):
    """A whole replica or one stage, as a checkpoint stores it."""

    @property
    def loop(self) -> Loop: ...
    @property
    def state_sync(self) -> StateSync: ...
    @property
    def training_task(self) -> Newcomer: ...


class _Answer(msgspec.Struct, frozen=True):
    """A result without its tensors."""

    status: str
    next_round: int
    participants: tuple[str, ...]
    weights: tuple[float, ...]
    taken: dict[str, list[tuple[int, int]]]
    tokens: int


class _Open(msgspec.Struct, frozen=True):
    """A pending exchange without its tensors; `age_steps` counts local steps since the request, and
    `tokens` are those that it brings."""

    stream: str
    round: int
    attempt: int
    weight: float
    apply_after: int
    slack: int
    deadline_s: float
    age_steps: int
    answer: _Answer | None
    tokens: int = 0


class Cursors(msgspec.Struct, frozen=True):
    """The counters in a checkpoint."""

    step: int
    joined_at: int
    place: RunPosition
    pending: list[_Open]


def checkpoint_state(node: Resumable) -> tuple[StateGroups, dict[str, Any]]:
    """Return all that `load_state` needs, as tensors and numbers; call this between two steps.

    Large tensors are the stored ones themselves, which the next step changes (`Cut`). Those of
    `STEPPED` parts come first."""
    method, replica = node.loop.driver.method, node.loop.driver.replica
    shared, own, model = live_state(method, replica)
    groups: StateGroups = {
        "inner": _nonzero(_read(replica, MOMENTS)),
        "replica": _read(replica, ("param",)),
        "personal": own,
        "reducer": node.state_sync.feedback,
        "pending": {},
        "method": shared,
        "model": dict(model),
    }
    if method.keeps_gradients:  # the next step's backward pass adds to them
        gradients = _nonzero(_read(replica, ("grad",)))
        groups["replica"] |= {name: x.clone() for name, x in gradients.items()}
    table = node.loop.driver.table
    opened = []
    for number, pending in enumerate(table):
        groups["pending"] |= _tensors_of(number, pending)
        opened.append(_open(pending, node.loop.step))
    cursors = Cursors(
        node.loop.step, node.training_task.joined_at, node.loop.driver.position, opened
    )
    return groups, msgspec.to_builtins(cursors)


def load_state(node: Resumable, saved: Checkpoint) -> None:
    """Restore a fresh node from a checkpoint and open its streams; raise `CheckpointCorrupt` if
    the checkpoint does not fit the node."""
    cursors = cursors_of(saved)
    driver = node.loop.driver
    try:
        replica, held = driver.replica, saved.groups["replica"]
        replica.write(unnamed("param", held, replica.shapes), "param")
        grown = {name: x for name, x in replica.shapes.items() if f"grad.{name}" in held}
        replica.write(unnamed("grad", held, grown), "grad")
        _write_moments(driver.replica, saved.groups["inner"])
        driver.method.resume(driver.replica, {**saved.groups["method"], **saved.groups["personal"]})
        home = replica.allocate((0,)).device  # where methods want a result's tensors
        pending = {name: x.to(home) for name, x in saved.groups["pending"].items()}
        driver.load_state(_pending(node, cursors, pending))
        node.state_sync.load_state(cursors.place, saved.groups.get("reducer", {}))
    except (KeyError, WrongState, ValueError) as error:
        raise _misfit(saved, error) from error
    node.loop.step, node.training_task.joined_at = cursors.step, cursors.joined_at


def load_moments(node: Resumable, saved: Checkpoint) -> None:
    """Restore the data cursor and inner moments of a node that rejoins a live swarm; its state
    comes from the swarm. Raise `CheckpointCorrupt` if they do not fit."""
    try:
        _write_moments(node.loop.driver.replica, saved.groups["inner"])
    except (KeyError, ValueError) as error:
        raise _misfit(saved, error) from error
    node.loop.step = cursors_of(saved).step


def load_shared(node: Resumable, saved: Checkpoint) -> None:
    """Restore the method's shared state, as if adopted from another peer; in the worker that
    applies results. Raise `CheckpointCorrupt` if it does not fit."""
    driver = node.loop.driver
    try:
        with driver.cuts.changing():
            driver.method.restore(driver.replica, dict(saved.groups["method"]), "adopt")
            drop_spoiled(driver.replica)
    except (KeyError, WrongState, ValueError) as error:
        raise _misfit(saved, error) from error


def load_stage_state(node: Resumable, saved: Checkpoint) -> None:
    """Restore the state and inner moments of a stage without other peers, as if adopted from one.

    Pending exchanges are left out, because their rounds are over. Raise `CheckpointCorrupt` if the
    checkpoint does not fit.
    """
    driver = node.loop.driver
    try:
        driver.method.restore(driver.replica, dict(saved.groups["method"]), "adopt")
        _write_moments(driver.replica, saved.groups["inner"])
    except (KeyError, WrongState, ValueError) as error:
        raise _misfit(saved, error) from error


def cursors_of(saved: Checkpoint) -> Cursors:
    """Return the counters in a checkpoint; raise `CheckpointCorrupt` if there are none."""
    try:
        return msgspec.convert(saved.meta["node"], Cursors)
    except (KeyError, msgspec.ValidationError) as error:
        raise CheckpointCorrupt(
            f"{saved.folder} does not say where its node stopped ({error}); use another checkpoint"
        ) from None


def _misfit(saved: Checkpoint, error: Exception) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{saved.folder} does not fit this run ({error}); move it away to start without it"
    )


def _read(replica: Replica, whats: tuple[str, ...]) -> dict[str, Tensor]:
    return {
        f"{what}.{name}": stored(replica, name, what) for what in whats for name in replica.names
    }


def _nonzero(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if not is_zero(x)}


def _write_moments(replica: Replica, tensors: Mapping[str, Tensor]) -> None:
    """Write the stored moments; a moment that is all zero is left absent, as in a fresh inner
    optimizer."""
    for what in MOMENTS:
        stored = {
            name: tensors[f"{what}.{name}"] for name in replica.names if f"{what}.{name}" in tensors
        }
        replica.write(stored, what)


def _open(pending: Pending, step: int) -> _Open:
    exchange, result = pending.exchange, pending.result
    answer = None
    if result is not None:
        taken = {name: list(ranges) for name, ranges in result.taken.items()}
        answer = _Answer(
            result.status,
            result.next_round,
            result.participants,
            result.weights,
            taken,
            result.tokens,
        )
    key = exchange.key
    age = step - pending.since_step
    return _Open(
        key.stream,
        key.round,
        key.attempt,
        exchange.weight,
        exchange.apply_after,
        exchange.slack,
        exchange.deadline_s,
        age,
        answer,
        pending.tokens,
    )


def _tensors_of(number: int, pending: Pending) -> dict[str, Tensor]:
    result = pending.result
    out = pending.exchange.tensors
    spent = isinstance(out, LazyTensors) and out.dropped
    groups: dict[str, Mapping[str, Tensor] | None] = {"out": None if spent else out}
    if result is not None:
        groups |= {"mean": result.mean, "sent": result.sent}
        for index, peer in enumerate(result.participants):
            groups[f"from{index}"] = (result.gathered or {}).get(peer)
    return {
        f"{number}.{group}.{name}": x
        for group, tensors in groups.items()
        for name, x in (tensors or {}).items()
    }


def _pending(node: Resumable, cursors: Cursors, tensors: State) -> list[Pending]:
    driver = node.loop.driver
    templates = {
        template.key.stream: template for template in driver.method.streams(driver.replica)
    }
    table = []
    for number, opened in enumerate(cursors.pending):
        exchange = replace(
            templates[opened.stream],
            key=ExchangeKey(opened.stream, opened.round, opened.attempt),
            tensors=_group(f"{number}.out.", tensors)
            or LazyTensors.spent(shapes_of(templates[opened.stream].tensors)),
            weight=opened.weight,
            apply_after=opened.apply_after,
            slack=opened.slack,
            deadline_s=opened.deadline_s,
        )
        result = _result(number, opened, exchange, cursors, tensors)
        since_step = cursors.step - opened.age_steps
        table.append(Pending(exchange, since_step, 0.0, result, opened.tokens))
    return table


def _result(
    number: int, opened: _Open, exchange: Exchange, cursors: Cursors, tensors: State
) -> Result:
    answer = opened.answer
    if answer is None:  # its outcome can no longer be learned
        in_pairs = isinstance(exchange.group, RandomGroups)  # which count their own rounds
        last = opened.round if in_pairs else cursors.place.rounds[opened.stream]
        return Result("failed", last + exchange.stride)
    gathered = {}
    for index, peer in enumerate(answer.participants):
        if (theirs := _group(f"{number}.from{index}.", tensors)) is not None:
            gathered[peer] = theirs
    return Result(
        status=msgspec.convert(answer.status, Result.__annotations__["status"]),
        next_round=answer.next_round,
        participants=answer.participants,
        weights=answer.weights,
        mean=_group(f"{number}.mean.", tensors),
        gathered=gathered or None,
        sent=_group(f"{number}.sent.", tensors),
        taken=answer.taken,
        tokens=answer.tokens,
    )


def _group(prefix: str, tensors: State) -> dict[str, Tensor] | None:
    found = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    return found or None
