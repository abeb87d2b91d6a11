"""The run's data, divided among its peers.

Every step has one batch, however many peers train on it. So arms with one, four or eight peers see
the same sequences in the same steps, and so do the baselines.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflock.node.model.data import Batches


@dataclass(frozen=True, slots=True)
class Share(Batches):
    """Part `part` of `parts` of each batch of the stream `peer`, with `batch_size` sequences."""

    part: int = 0
    parts: int = 1

    def starts(self, step: int, round: int = 0) -> NDArray[np.int64]:
        """Return the first positions of this part's sequences."""
        whole = Batches(
            self.tokens, self.run_seed, self.peer, self.parts * self.batch_size, self.seq
        )
        return whole.starts(step, round)[self.part * self.batch_size :][: self.batch_size]
