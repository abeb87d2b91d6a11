"""A trainer's store of stage inputs for a codec that remembers samples (decision 018).

Inputs are decoded into rows. A row goes to the next server as a difference, as just a tag, or
whole (node/pipeline/contrib/sample_memory.py). This module implements `StageInputs`
(node/pipeline/trainer/in_flight.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from farflock.node.model.data import Batches
from farflock.node.pipeline.contrib.sample_memory import Known, Row, TrainerMemory, refers
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import Forward, Visit
from farflock.node.pipeline.trainer.in_flight import InFlight
from farflock.node.pipeline.trainer.stage_directory import ServerLife
from farflock.swarm.paths.policy import NUMBERS
from farflock.swarm.peer.payloads import Given


@dataclass(frozen=True, slots=True)
class SampleInput:
    """The input of a stage, as rows of a microbatch's samples."""

    memory: TrainerMemory
    stage: int
    samples: tuple[int, ...]
    rows: tuple[Row, ...]

    def payload(self, server: ServerLife) -> bytes:
        """Encode the input relative to the values that the server is known to hold."""
        return self.memory.handed(self.stage, server.name, self.samples, self.rows)

    def taken(self, server: ServerLife, payload: Given, lacking: Sequence[int] = ()) -> bool:
        """As `KeptInput.taken`: only rows that refer to held values can be lacking."""
        assert isinstance(payload, bytes), "it is always encoded here"
        self.memory.taken(self.stage, server.name, self.samples, self.rows, lacking)
        return refers(payload, lacking, len(self.samples))


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The output of the stage before `after`, relative to what the trainer held when it asked."""

    memory: TrainerMemory
    after: int
    known: Known

    @property
    def visit(self) -> Visit:
        """The samples, and the tag of the held output of each."""
        return self.known.visit

    def read(self, payload: Given, request: Forward) -> SampleInput:
        """Decode and remember the output."""
        assert isinstance(payload, bytes), "an output that the trainer must read was left"
        rows = self.memory.received(payload, request, self.known)
        return SampleInput(self.memory, self.after, self.known.samples, rows)


class SampleInputs:
    """The trainer's end of every edge."""

    def __init__(self, edges: Edges, stream: Batches) -> None:
        self.memory, self._stream = TrainerMemory(edges), stream
        # rows that came whole or as differences, and rows that a server lacked
        self.counts = self.memory.counts

    def expect(self, flight: InFlight, stage: int) -> SampleOutput:
        """Expect an output relative to what is held of the stage's outputs now."""
        after = flight.after(stage)
        assert after is not None, "the last stage has no output"
        return SampleOutput(self.memory, after, self.memory.known(stage, self._samples(flight)))

    def backward_visit(self, flight: InFlight) -> Visit:
        """Return the samples, without tags."""
        return Visit(self._samples(flight))

    def _samples(self, flight: InFlight) -> tuple[int, ...]:
        return self._stream.samples(flight.number % NUMBERS)
