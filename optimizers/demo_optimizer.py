"""DeMo: each step exchanges the few largest cosine coefficients of every peer's momentum (Peng,
Quesnel and Kingma, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870, algorithm 1; its
released code).

    delta <- decay·delta + g;   c = top-k of DCT(delta);   delta <- delta - IDCT(c)
    theta <- theta - lr·sign(IDCT(mean c))

An exchange holds all coefficients, chunk after chunk; the codec keeps the k largest of each
`chunk`² of them. `sent`, and therefore what leaves the momentum, is what others decode, quantiser
included. The mean at a coefficient is over the peers that sent it. Deviations besides those in
optimizers/decoupled.py: where chunks are smaller than `chunk`² (vectors, narrow matrices), the k
largest are chosen among several neighbours, or parts of them, together; so all granules of the
codec have one density, and a tensor that is smaller than a granule sends up to k values, while the
released code sends vectors half or whole. Tensors of more than two dimensions are treated as
matrices, and lengths without a fitting divisor are padded with zeros (optimizers/parts/dct.py).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from farflock.compression.catalog import codec
from farflock.optimizers.decoupled import Decoupled
from farflock.optimizers.method import All, Exchange, ExchangeKey, Tensors
from farflock.optimizers.parts.dct import Grid
from farflock.optimizers.parts.state import Shapes
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "dct"


@dataclass(slots=True)
class DeMo(Decoupled):
    """Chunks of at most `chunk` × `chunk`. A sparse `codec` needs granules of `chunk`² values."""

    chunk: int = 64
    codec: str = "topk:32/4096"

    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"period": 1, "chunk": 4, "codec": "topk:2/16", "check_rounds": 3},
        quick={"chunk": 2},
        biased=True,
        disasters=(
            Disaster({"period": 3, "chunk": 4, "codec": "topk:2/16", "check_rounds": 4}, 10),
        ),
    )

    def __post_init__(self) -> None:
        Decoupled.__post_init__(self)
        if not 2 <= self.chunk <= 256:
            raise ValueError(
                f"chunks of {self.chunk} × {self.chunk} are not allowed; "
                "choose 2 to 256, usually 64"
            )
        chosen, values = codec(self.codec), self.chunk**2
        if chosen.biased and chosen.granule((values,)) != values:
            raise ValueError(
                f"codec {self.codec} chooses among {chosen.granule((values,))} values, "
                f"a chunk of {self.chunk} × {self.chunk} has {values}; "
                f"choose topk:{min(32, values // 2)}/{values}"
            )

    def _extract(self, delta: Tensors) -> dict[str, Tensor]:
        """Return the coefficients of all tensors, flattened."""
        return {name: self._grid(x.shape).forward(x) for name, x in delta.items()}

    def _whole(self, extract: Tensors, shapes: Shapes, round_number: int) -> dict[str, Tensor]:
        """Return the tensors with these coefficients."""
        return {name: self._grid(shape).inverse(extract[name]) for name, shape in shapes.items()}

    def _exchange(self, tensors: dict[str, Tensor]) -> Exchange:
        key = ExchangeKey(STREAM, self._book.number)
        return Exchange(key, "gather", All(), tensors, codec=self.codec, deadline_s=self.deadline_s)

    def _grid(self, shape: tuple[int, ...]) -> Grid:
        return Grid(tuple(shape), self.chunk)
