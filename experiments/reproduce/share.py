"""The run's data, divided among its peers.

Every step has one batch, however many peers train on it. So arms with one, four or eight peers see
the same sequences in the same steps, and so do the baselines.
"""

from torch import Tensor

from farflock.node.data.samples import Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches


class Share(Batches):
    """Part `rank` of `ranks` of each batch of the stream `peer`, with `batch_size` sequences."""

    def __init__(
        self,
        text: Text,
        run_seed: int,
        peer: str,
        batch_size: int,
        seq: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        stream = SampleStream(run_seed, peer)
        super().__init__(text, stream, batch_size, seq)
        self._whole = Batches(text, stream, ranks * batch_size, seq)
        self._mine = slice(rank * batch_size, (rank + 1) * batch_size)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and the next tokens of this part's sequences."""
        x, y = self._whole.batch(step)
        return x[self._mine], y[self._mine]
