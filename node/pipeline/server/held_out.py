"""Passes of one stage on held-out text, for whoever evaluates the run: forward only, and nothing of
them stays here. They are computed with the weights that the method evaluates, which are not always
those that it trains.

Shapes: B sequences, L positions."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.node.pipeline.passes.coming import coming
from farflock.node.pipeline.passes.graphs import within_memory
from farflock.node.pipeline.passes.requests import NotFinite, Refused, Stale
from farflock.node.pipeline.server.passes import PassRequest, StagePasses, Unread
from farflock.optimizers.method import Tensors

MeasureReplies = tuple[tuple[bytes | Unread | Stale | NotFinite], None]


@dataclass(slots=True)
class HeldOutPasses:
    """One server's passes on held-out text, beside its `passes` for training. `evaluated` returns
    the weights to use; None: the stage's own. Only the compute thread uses this."""

    passes: StagePasses
    evaluated: Callable[[], Tensors] | None = None

    def measure(self, asked: PassRequest) -> MeasureReplies:
        """Return one pass's payload, or why there is none; the answer names no version."""
        return self.begin(asked)()

    def begin(self, asked: PassRequest) -> Callable[[], MeasureReplies]:
        """Let the device compute a pass; return what waits for it, and then does what `measure`
        does."""
        read = self.passes.read_or_stale(asked)
        if not isinstance(read, tuple):
            return lambda: ((read,), None)
        stage, (tokens_BL, x) = self.passes.stage, read
        try:
            targets_BL = self._targets(asked)
        except CorruptPayload as error:
            refusal = Refused(str(error)[:200])
            return lambda: ((refusal,), None)
        weights = None if self.evaluated is None else self.evaluated()
        y = within_memory([self.passes.graphs], lambda _: stage.measured(x, targets_BL, weights))
        arriving = coming(y, ahead=stage.runs_ahead)
        return lambda: ((self._packed(asked, arriving.wait(), tokens_BL),), None)

    def _targets(self, asked: PassRequest) -> Tensor | None:
        """Read the targets (B, L) at the last stage; may raise `CorruptPayload`."""
        is_last = self.passes.stage.is_last
        return self.passes.ends.edges.unpack(asked.payloads[-1]) if is_last else None

    def _packed(self, asked: PassRequest, y: Tensor, tokens_BL: Tensor) -> bytes | NotFinite:
        if self.passes.stage.is_last:
            return self.passes.ends.edges.pack_losses(y)
        try:
            return self.passes.output(asked, y, tokens_BL)
        except UnencodableTensor:
            return NotFinite()
