"""Changes on the host of what is on a device: each block once, in order, whatever their number."""

import pytest
import torch
from worlds.card import CARD

from farflock.node.model.copied_ahead import CopiedAhead
from farflock.optimizers.parts.blocks import BLOCK_VALUES, blocks


@pytest.mark.parametrize("count", [0, 1, BLOCK_VALUES, 2 * BLOCK_VALUES + 3, 5 * BLOCK_VALUES])
def test_every_block_becomes_what_is_made_of_it(elsewhere, count):
    first, second = (torch.arange(count, dtype=torch.float32) * k for k in (1.0, -2.0))
    flat = [x.to(elsewhere) for x in (first.clone(), second.clone())]
    seen = []

    def change(block, one, other):
        assert one.is_cpu
        seen.append(tuple(block[1:]))
        return one + other, None if block.start else one.neg_()  # may change what it was given

    CARD.reset_counters()
    CopiedAhead(flat).change(list(blocks("x", (count,))), change)
    if CARD.plugged:  # which counts
        assert CARD.largest_from_card_bytes == 4 * min(count, BLOCK_VALUES)
    assert seen == [(block.start, block.stop) for block in blocks("x", (count,))]
    head = min(count, BLOCK_VALUES)
    assert torch.equal(flat[0].cpu(), first + second)
    assert torch.equal(flat[1].cpu(), torch.cat((-first[:head], second[head:])))
