"""FlexDeMo: each step, the mean of a part of the momentum that all peers choose in the same way, so
no indices are sent (From, Nielsen, Galke Poech and Schneider-Kamp, "DeToNATION", arXiv:2502.06728,
section 3: its replicators).

The model is treated as one row of blocks of 64 values. With q = round(1/rate), round t carries

    striding: the blocks b with (b + t) mod q = 0      slicing: the (t mod q)-th of q equal slices
    random: 1/q of all blocks, drawn by Philox from seed and t            full: everything

Deviations besides those in optimizers/decoupled.py: blocks of the whole model instead of rows of
each tensor, so that every block has its turn (their striding never reaches most rows of a tensor
with a suitable length, their random one draws the same rows in all tensors); one counter, the
round's, instead of one that grows with each tensor; the row of blocks is padded to a multiple of q,
so that all rounds carry the same number; `full` keeps momentum like the rest, and what is taken
leaves it. DeMo's own replicator is optimizers/demo_optimizer.py; several at once, which overwrite
each other there, cannot be chosen.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.decoupled import Decoupled
from farflock.optimizers.method import All, Exchange, ExchangeKey, Tensors
from farflock.optimizers.parts.philox import permutation
from farflock.optimizers.parts.state import Shapes
from farflock.optimizers.trial_options import Disaster, TrialOptions

STREAM = "part"
BLOCK = 64
REPLICATORS = ("striding", "slicing", "random", "full")


@dataclass(slots=True)
class FlexDeMo(Decoupled):
    """DeMo with the part of the momentum that `replicator` chooses.

    `rate` is the share of the momentum that a round carries; only `random` uses `seed`. What
    codecs distort stays in the momentum, so `codec` may be sparse."""

    replicator: Literal["striding", "slicing", "random", "full"] = "striding"
    rate: float = 1 / 16
    seed: int = 42
    codec: str = "bf16"
    return_codec: str = "bf16"

    trial: ClassVar[TrialOptions] = TrialOptions(
        law={"period": 1, "rate": 0.5, "codec": "int8", "return_codec": "bf16", "check_rounds": 3},
        quick={"replicator": "full"},
        biased=True,
        disasters=(Disaster({"period": 3, "rate": 0.5, "check_rounds": 4}, 13),),
    )

    def __post_init__(self) -> None:
        Decoupled.__post_init__(self)
        if self.replicator not in REPLICATORS:
            known = ", ".join(REPLICATORS)
            raise ValueError(
                f"replicator {self.replicator!r} is not known; choose from {known}, or method demo"
            )
        if not 1 / 65536 <= self.rate <= 1:
            raise ValueError(
                f"a rate of {self.rate} is not allowed; choose one in [1/65536, 1], usually 1/16"
            )
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(
                f"a seed of {self.seed} does not fit into 64 bits; choose one in [0, 2^64)"
            )

    @property
    def turns(self) -> int:
        """Return q, the rounds after which striding and slicing have carried everything once."""
        return 1 if self.replicator == "full" else round(1 / self.rate)

    def chosen(self, blocks: int, round_number: int) -> Tensor:
        """Return the places of this round's blocks among `blocks`, a multiple of `turns`."""
        count, turn = blocks // self.turns, round_number % self.turns
        match self.replicator:
            case "random":
                return permutation(self.seed, 0, round_number, blocks)[:count]
            case "slicing":
                return torch.arange(turn * count, (turn + 1) * count)
        return torch.arange(-turn % self.turns, blocks, self.turns)

    def _extract(self, delta: Tensors) -> dict[str, Tensor]:
        """Return this round's blocks, one after the other."""
        row = torch.cat([x.reshape(-1) for x in delta.values()])
        blocks = self._blocks(row.numel())
        row = torch.nn.functional.pad(row, (0, blocks * BLOCK - row.numel()))
        chosen = self.chosen(blocks, self._book.number).to(row.device)
        return {"blocks": row.view(blocks, BLOCK)[chosen].reshape(-1)}

    def _whole(self, extract: Tensors, shapes: Shapes, round_number: int) -> dict[str, Tensor]:
        """Return the tensors with these blocks in their places."""
        counts = [torch.Size(shape).numel() for shape in shapes.values()]
        blocks = self._blocks(sum(counts))
        row = extract["blocks"].new_zeros(blocks, BLOCK)
        row[self.chosen(blocks, round_number).to(row.device)] = extract["blocks"].view(-1, BLOCK)
        cut = torch.split(row.view(-1)[: sum(counts)], counts)
        return {
            name: x.reshape(shape) for (name, shape), x in zip(shapes.items(), cut, strict=True)
        }

    def _exchange(self, tensors: dict[str, Tensor]) -> Exchange:
        key, back = ExchangeKey(STREAM, self._book.number), self.return_codec
        return Exchange(
            key, "mean", All(), tensors, 1.0, self.codec, back, deadline_s=self.deadline_s
        )

    def _blocks(self, values: int) -> int:
        """Return the number of blocks of `values` values, padded to a multiple of `turns`."""
        return -(-values // (BLOCK * self.turns)) * self.turns
