"""`[evaluation]`: how often drawn members measure the run on its held-out text, and on how much."""

from typing import Annotated

import msgspec

from farflock.node.run.sections import Section

EVERY_ROUNDS = 10  # unless the manifest says otherwise
SEQUENCES = 256
MAX_SEQUENCES = 65_536


class EvaluationSection(Section, frozen=True):
    """[evaluation]: before the first round of the method's first stream and every `every` rounds, a
    drawn member measures the loss on `sequences` held-out sequences, the same ones each time, or on
    all that there are. 0 rounds is never."""

    every: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = EVERY_ROUNDS
    sequences: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = SEQUENCES
