"""The processes of one peer under torchrun: their leader announces each call, the others hear it.

Only rank 0, the *leader*, knows the swarm, so it alone decides what is read, written or trained.
Its orders go over a group of their own (gloo, in the CPU's memory), apart from the collectives of
the model. The leader's threads take turns. A leader with nothing to say beats, so that a follower
whose orders stop knows that something is wrong.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from farflock.node.errors import Failure

if TYPE_CHECKING:  # some builds of torch have no such module
    from torch.distributed.distributed_c10d import Store

LEADER = 0
ORDER_TIMEOUT_S = 300.0  # without an order or a beat, and for each piece of one
BEAT_S = 2.0
LOST_EVERY_S = 0.5  # between two looks at the processes
LOST_TIMEOUT_S = 5.0  # for a process that has broken a call to be seen as ended
HEAD_BYTES = 256  # of an order, with its length; longer ones follow in a second message
LENGTH_BYTES = 4
REPORT_BYTES = 4096  # of what a follower says, with its length

Act = Literal[
    "beat",
    "begin",
    "block",
    "closure",
    "drop",
    "end",
    "put",
    "read",
    "read buffers",
    "release",
    "report",
    "set buffers",
    "step",
    "train",
    "write",
]


class FollowerLost(Failure):
    """A process of this peer has ended, and its shard of the model with it."""


class Order(msgspec.Struct, frozen=True, array_like=True):
    """A call that the leader announces. `number` is a mix, a learning rate or a step."""

    act: Act
    names: tuple[int, ...] = ()  # places in the replica's order of parameters
    what: str = ""
    start: int = 0
    stop: int = 0
    number: float | None = None
    text: bytes = b""


class Ranks:
    """This process among those of its peer; made at the same time in each, after the default group.

    `reasons` is where a follower leaves why it ended, if it can (a store of torch.distributed)."""

    def __init__(self, reasons: "Store | None" = None, timeout_s: float = ORDER_TIMEOUT_S) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._timeout_s, self._reasons = timeout_s, reasons
        self._turn = threading.Lock()  # of the leader's threads
        self._over = threading.Event()
        self.broken = False  # an order failed midway: the followers hear no other
        self._places = self._gathered_places()
        if self.leads:
            threading.Thread(target=self._beat, name="beats", daemon=True).start()

    @property
    def leads(self) -> bool:
        """True on the rank that runs the method."""
        return self.rank == LEADER

    # orders

    @contextlib.contextmanager
    def call(self, order: Order) -> Iterator[None]:
        """Announce an order, and let no other thread announce one while the block does its part;
        only the leader calls this."""
        self._take_turn()
        try:
            self._announce(order)
            yield
        except BaseException:
            self.broken = True
            raise
        finally:
            self._turn.release()

    def hear(self) -> Order:
        """Return the leader's next order but beats; only followers call this."""
        while True:
            head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
            dist.broadcast(head, LEADER, self._group)
            size = int.from_bytes(bytes(head[:LENGTH_BYTES].tolist()), "little")
            whole = head[LENGTH_BYTES : LENGTH_BYTES + size]
            if size > HEAD_BYTES - LENGTH_BYTES:
                whole = torch.empty(size, dtype=torch.uint8)
                dist.broadcast(whole, LEADER, self._group)
            order = msgspec.msgpack.decode(whole.numpy().tobytes(), type=Order)
            if order.act != "beat":
                return order

    def end(self, *, heard: bool = True) -> None:
        """Send the followers home, if they hear this; they hear nothing more. It is safe to call
        this twice."""
        if self._over.is_set():
            return
        self._over.set()
        if self.leads and heard and not self.broken:
            with contextlib.suppress(RuntimeError), self.call(Order("end")):
                pass

    def hold(self, last: Order | None = None) -> None:
        """Announce nothing after this order until `resume`, not even beats, because no follower
        listens then."""
        self._take_turn()
        try:
            if last is not None:
                self._announce(last)
        except BaseException:
            self.broken = True
            self._turn.release()
            raise

    def resume(self) -> None:
        """Announce again; any thread may call this after `hold`."""
        if self._turn.locked():  # not after a broken call
            self._turn.release()

    def _take_turn(self) -> None:
        if self.broken:
            raise Failure(
                "the processes of this peer cannot be told anything",
                "an earlier call has failed in one of them",
                "start them again",
            )
        if not self._turn.acquire(timeout=self._timeout_s):
            raise Failure(
                "the processes of this peer cannot be told anything",
                f"what they do now has lasted {self._timeout_s:.0f} s",
                "see whether one of them hangs, and start them again",
            )

    def _announce(self, order: Order) -> None:
        text = msgspec.msgpack.encode(order)
        head = bytearray(HEAD_BYTES)
        head[:LENGTH_BYTES] = len(text).to_bytes(LENGTH_BYTES, "little")
        if len(text) <= HEAD_BYTES - LENGTH_BYTES:
            head[LENGTH_BYTES : LENGTH_BYTES + len(text)] = text
        dist.broadcast(torch.frombuffer(head, dtype=torch.uint8), LEADER, self._group)
        if len(text) > HEAD_BYTES - LENGTH_BYTES:
            whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            dist.broadcast(whole, LEADER, self._group)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S) and not self.broken:
            if self._turn.acquire(blocking=False):  # else an order is under way
                try:
                    self._announce(Order("beat"))
                except RuntimeError:
                    self.broken = True
                finally:
                    self._turn.release()

    # values, as part of an order

    def broadcast(self, values: Tensor) -> None:
        """Copy the leader's values, on the CPU, into those of the others."""
        dist.broadcast(values, LEADER, self._group)

    def send(self, values: Tensor, rank: int) -> None:
        """Send values on the CPU to a rank, which receives them now."""
        dist.send(values, rank, self._group)

    def receive(self, values: Tensor, rank: int) -> None:
        """Fill a tensor on the CPU with what a rank sends now."""
        dist.recv(values, rank, self._group)

    def average(self, values: Tensor) -> None:
        """Set values on the CPU to their mean over all ranks, each of which calls this."""
        dist.all_reduce(values, group=self._group)
        values.div_(self.count)

    def report(self, text: bytes) -> None:
        """Send the leader a text, of `REPORT_BYTES` with its length at most, as it asks for."""
        whole = len(text).to_bytes(LENGTH_BYTES, "little") + text
        self.send(torch.frombuffer(bytearray(whole.ljust(REPORT_BYTES)), dtype=torch.uint8), LEADER)

    def reports(self) -> list[bytes]:
        """Return the texts of all followers, in order."""
        texts = []
        with self.call(Order("report")):
            for rank in range(1, self.count):
                packed = torch.empty(REPORT_BYTES, dtype=torch.uint8)
                self.receive(packed, rank)
                whole = packed.numpy().tobytes()
                size = int.from_bytes(whole[:LENGTH_BYTES], "little")
                texts.append(whole[LENGTH_BYTES : LENGTH_BYTES + size])
        return texts

    def sum(self, value: float) -> float:
        """Return the sum of a number over all ranks."""
        values = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(values, group=self._group)
        return float(values)

    # ends

    def note_end(self, reason: str) -> None:
        """Leave the reason for which this process is about to end, for the leader to read."""
        if self._reasons is not None:
            with contextlib.suppress(RuntimeError):  # then nobody is left to read it
                self._reasons.set(_key(self.rank), reason)

    def gone(self) -> Mapping[int, str]:
        """Return the ranks of this machine whose process has ended, each with the reason."""
        return {
            rank: self._reason_of(rank, pid)
            for rank, pid in self._places.items()
            if rank != self.rank and not _lives(pid)
        }

    def lost(self) -> FollowerLost | None:
        """Return the error that says which follower has ended and why; None if all are there.
        After a broken call, look for a while: what broke it may not have ended yet."""
        gone = self.gone_within(LOST_TIMEOUT_S if self.broken else 0.0)
        if not gone:
            return None
        self.broken = True
        rank, reason = min(gone.items())
        return FollowerLost(
            f"rank {rank} of this peer has ended, and its part of the model with it",
            reason,
            "start the peer again: it resumes from its last checkpoint",
        )

    def gone_within(self, timeout_s: float) -> Mapping[int, str]:
        """Return `gone` once there are some, or after `timeout_s`."""
        ends_s = time.monotonic() + timeout_s
        while not (gone := self.gone()) and time.monotonic() < ends_s:
            time.sleep(LOST_EVERY_S)
        return gone

    def _reason_of(self, rank: int, pid: int) -> str:
        if self._reasons is not None:
            with contextlib.suppress(RuntimeError):
                if self._reasons.check([_key(rank)]):
                    return bytes(self._reasons.get(_key(rank))).decode(errors="replace")
        return f"process {pid} has ended without a word, as after a kill"

    def _gathered_places(self) -> dict[int, int]:
        """Return the processes of the ranks on this machine: rank -> pid."""
        machine = int.from_bytes(os.uname().nodename.encode()[:7], "little")
        mine = torch.tensor([os.getpid(), machine])
        every = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(every, mine, group=self._group)
        here = [(rank, place.tolist()) for rank, place in enumerate(every)]
        return {rank: int(pid) for rank, (pid, there) in here if there == machine}


def _key(rank: int) -> str:
    return f"ended/{rank}"


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
