"""Weights measured on held-out text by all processes of a peer: each takes its share of the
sequences.

What is measured are the method's weights, and not those of which each rank trains a shard. They go
from the leader to all ranks a piece at a time: the embedding, each layer, the norm with the head. A
rank takes its sequences through a piece, and keeps what comes out in this machine's memory. So
training never sees these weights, no rank holds more than a piece of them, and the ranks compute in
float32, as a peer of one process does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from farflock.node.model.device import Device, is_out_of_memory
from farflock.node.model.evaluation import LossEstimate, sequence_means, summarise
from farflock.node.model.llama import Llama
from farflock.node.model.loss import chunk_tokens, token_losses
from farflock.node.model.ranks import LEADER, Order, Ranks
from farflock.node.state.weights_file import EMBEDDING, HEAD
from farflock.optimizers.method import Tensors
from farflock.optimizers.parts.blocks import blocks

if TYPE_CHECKING:  # it loads FSDP
    from farflock.node.train.shared_task import SharedTask

HIDDEN_BYTES = 1 << 30  # between two pieces, at a rank; what needs more takes several turns
VALUE_BYTES = 4
_NORM = "model.norm.weight"
_BEGIN = "begin"  # a turn, in an order

_Windows = tuple[Tensor, Tensor]


@dataclass(slots=True)
class SharedMeter:
    """One rank's part in measuring weights of a model of this shape, `at_once` sequences at a time.

    Only the leader has `windows`: held-out tokens and next tokens, both int64 (n, seq)."""

    model: Llama
    ranks: Ranks
    device: Device
    at_once: int
    windows: _Windows | None = None
    _skeleton: Llama = field(init=False)
    _pieces: list[tuple[str, ...]] = field(init=False)  # names of tensors
    _rows: _Windows = field(init=False)  # of this rank, in this turn
    _hidden: list[Tensor] = field(default_factory=list, init=False)  # `at_once` rows each
    _found: Tensor = field(init=False)  # (n,): the mean loss of each of the turn's sequences

    def __post_init__(self) -> None:
        with torch.device("meta"):
            self._skeleton = Llama(self.model.config)
        self._pieces = pieces_of(self._skeleton)

    @torch.no_grad()
    def measure(self, weights: Tensors) -> LossEstimate:
        """Return the mean loss of these weights, in nats per token, in float32; only the leader
        calls this. Raise torch's `OutOfMemoryError` if a rank has no room."""
        assert self.windows is not None, "only the leader measures"
        turns = zip(
            *(torch.split(part, self._max_sequences()) for part in self.windows), strict=True
        )
        return summarise(torch.cat([self._turn(weights, turn) for turn in turns]))

    @torch.no_grad()
    def take_part(self, order: Order) -> None:
        """Do a follower's part of an order to measure."""
        if order.what == _BEGIN:
            self._begin(order.start, order.stop, None)
        else:
            self._pass(order.start, None)

    def _max_sequences(self) -> int:
        """Return how many sequences may be under way at once, at all ranks together."""
        assert self.windows is not None, "only the leader has windows"
        row_bytes = self.windows[0].shape[1] * self.model.config.dim * VALUE_BYTES
        return self.ranks.count * max(HIDDEN_BYTES // row_bytes, 1)

    def _turn(self, weights: Tensors, windows: _Windows) -> Tensor:
        """Take sequences through all pieces; return their losses."""
        count, seq = windows[0].shape
        with self.ranks.call(Order("measure", what=_BEGIN, start=count, stop=seq)):
            self._begin(count, seq, windows)
        for number, names in enumerate(self._pieces):
            given = {name: weights[name] for name in names}  # which may be an order of its own
            with self.ranks.call(Order("measure", start=number)):
                is_done = self._pass(number, given)
            if not is_done:
                raise torch.OutOfMemoryError("a process of this peer has no room to evaluate")
        return self._found

    def _begin(self, count: int, seq: int, windows: _Windows | None) -> None:
        """Get this rank's rows, which the leader has and sends to each."""
        self._hidden, self._found = [], torch.zeros(count, dtype=torch.float64)
        mine = self._slice(self.ranks.rank)
        if windows is None:
            self._rows = self._received(mine.stop - mine.start, seq)
            return
        self._rows = windows[0][mine], windows[1][mine]
        for rank in range(LEADER + 1, self.ranks.count):
            theirs = self._slice(rank)
            for part in windows if theirs.stop > theirs.start else ():
                self.ranks.send(part[theirs].contiguous(), rank)

    def _received(self, rows: int, seq: int) -> _Windows:
        x, y = torch.empty(2, rows, seq, dtype=torch.int64)
        for part in (x, y) if rows else ():
            self.ranks.receive(part, LEADER)
        return x, y

    def _slice(self, rank: int) -> slice:
        """Return the rows of a rank."""
        count = len(self._found)
        return slice(rank * count // self.ranks.count, (rank + 1) * count // self.ranks.count)

    def _pass(self, number: int, given: Tensors | None) -> bool:
        """Take this rank's sequences through a piece; return False if a rank has no room for it.
        All ranks must get to the end of this, so what one lacks room for is told there."""
        tensors = {name: self._brought(name, given) for name in self._pieces[number]}
        whole = {name: x for name, x in tensors.items() if x is not None}
        done = len(whole) == len(tensors) and _fits(lambda: self._compute(number, whole))
        if self.ranks.sum(float(not done)):
            self._hidden = []
            return False
        if number == len(self._pieces) - 1:
            self.ranks.add_up(self._found)
        return True

    def _brought(self, name: str, given: Tensors | None) -> Tensor | None:
        """Return the leader's tensor of this name on this rank's device; None without room."""
        shape, room = self._skeleton.get_parameter(name).shape, list[Tensor]()
        _fits(
            lambda: room.append(torch.empty(shape, dtype=torch.float32, device=self.device.place))
        )
        for _, start, stop in blocks(name, shape):
            values = torch.empty(stop - start, dtype=torch.float32)
            if given is not None:
                values = given[name].reshape(-1)[start:stop].to("cpu", torch.float32).contiguous()
            self.ranks.broadcast(values)
            for whole in room:
                whole.view(-1)[start:stop].copy_(values)
        return room[0] if room else None

    def _compute(self, number: int, tensors: Tensors) -> None:
        place, layers = self.device.place, self._skeleton.blocks()
        if number == 0:
            parts = torch.split(self._rows[0], self.at_once) if len(self._rows[0]) else ()
            table = tensors[EMBEDDING]
            self._hidden = [F.embedding(part.to(place), table).cpu() for part in parts]
        elif number <= len(layers):
            bare = {name.split(".", 3)[3]: x for name, x in tensors.items()}
            for at, x in enumerate(self._hidden):
                self._hidden[at] = self._through(layers[number - 1], bare, x.to(place)).cpu()
        else:
            self._lose(tensors)

    def _through(self, layer: torch.nn.Module, tensors: Tensors, x_BLD: Tensor) -> Tensor:
        angles = (self.model.get_buffer(name)[: x_BLD.shape[1]] for name in ("cos", "sin"))
        y = functional_call(layer, dict(tensors), (x_BLD, *angles))
        found: Tensor = y if self.model.config.experts is None else y[0]  # beside their balance
        return found

    def _lose(self, tensors: Tensors) -> None:
        """Turn what has passed all layers into the losses of this rank's sequences."""
        config, place = self.model.config, self.device.place
        head = tensors[EMBEDDING if config.tied else HEAD]
        tokens = chunk_tokens(config.vocab_size, self.model.logits_at_once)
        at = self._slice(self.ranks.rank).start
        for x, y in zip(self._hidden, torch.split(self._rows[1], self.at_once), strict=False):
            normal = F.rms_norm(x.to(place), (config.dim,), tensors[_NORM], config.norm_eps)
            losses = token_losses(normal.flatten(0, 1), head, y.to(place).flatten(), tokens)
            self._found[at : at + len(y)] = sequence_means(losses.view(y.shape).cpu(), y)
            at += len(y)
        self._hidden = []


def shared_meter(model: Llama, task: "SharedTask", windows: _Windows | None = None) -> SharedMeter:
    """Return the part of the rank that has this shard and this part of the training; `windows` at
    the leader."""
    ranks = task.replica.ranks
    at_once = task.micro_batch or max(task.batches.batch_size // ranks.count, 1)
    return SharedMeter(model, ranks, task.device, at_once, windows)


def pieces_of(skeleton: Llama) -> list[tuple[str, ...]]:
    """Return the names of the tensors of each piece of a whole model: the embedding, each layer,
    and the norm with the head."""
    names = [name for name, _ in skeleton.named_parameters()]
    layers = [
        tuple(name for name in names if name.startswith(f"model.layers.{index}."))
        for index in skeleton.span
    ]
    head = EMBEDDING if skeleton.config.tied else HEAD
    return [(EMBEDDING,), *layers, (_NORM, head)]


def _fits(work: Callable[[], object]) -> bool:
    """Do some work; return False if its device has no room for it."""
    try:
        work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
