"""The seam between a stage server and its ends of edges: how outputs are written and inputs read.

Most codecs keep nothing. A codec that sends what changed since a sample's last visit keeps values
at both ends (node/pipeline/contrib/sample_memory.py); node/pipeline/lifecycle/features.py makes
them.

Shapes: B sequences, L positions, D model width."""

from dataclasses import dataclass

from torch import Tensor

from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import Forward, HeldOutForward, StagePass


class NotHeld(Exception):
    """A message refers to values that are not held here; its `rows` must be sent whole."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(f"rows {rows[:8]} refer to values that are not held here; send them whole")
        self.rows = rows


@dataclass(slots=True)
class EdgeEnds:
    """A stage server's ends of its edges, for all trainers together. This class keeps nothing: it
    can read every payload without an earlier one.

    Law:

    1. A request is admitted only if `misfit` returns None; the other functions see only admitted
       requests.
    2. `input` returns the trainer's values, bit for bit, or raises and changes nothing: `NotHeld`
       if the payload refers to values that are not here, `CorruptPayload` or `Incompatible` if it
       cannot be read. Whatever was lost, repeated or forgotten on either side, it never returns
       other values.
    3. The trainer that `caller` names can read what `output` returns, whatever this end has
       forgotten since. `output` raises `UnencodableTensor` for values that are not finite.
    4. What `output` and `input` do for a request on held-out text changes nothing.
    5. `misfit` changes nothing and may be called on the event loop; `output` and `input` are called
       only by the compute thread."""

    edges: Edges  # the codecs of the run, and the shape of its microbatches

    def misfit(self, request: StagePass) -> str | None:
        """Return why the samples that a request names are impossible, or None if they are
        possible. A request on held-out text names none."""
        if isinstance(request, HeldOutForward) or request.visit is None:
            return None
        return "samples are named, and the run's codec remembers none"

    def output(
        self,
        caller: str,
        y_BLD: Tensor,
        request: Forward | HeldOutForward,
        tokens_BL: Tensor,
        came: bytes | None,
    ) -> bytes:
        """Encode a stage's output (B, L, D); `came` is the payload of its input, None for
        tokens."""
        return self.edges.output(y_BLD, request, tokens_BL, came)

    def input(self, caller: str, payload: bytes, request: StagePass, tokens_BL: Tensor) -> Tensor:
        """Decode a stage's input (B, L, D)."""
        return self.edges.input(payload, request, tokens_BL)
