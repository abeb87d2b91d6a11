"""The measuring of a language model's weights on held-out text, and a sample of what they write."""

from collections.abc import Callable
from dataclasses import dataclass

from farflock.node.model.data import inputs_and_targets
from farflock.node.model.evaluation import AT_ONCE, HeldOut, copy_of, held_out_loss, losses
from farflock.node.model.generate import generate
from farflock.node.model.llama import Llama
from farflock.node.tokens.tokenizer import Tokenizer
from farflock.node.train.evaluator import Measured, Measurement
from farflock.optimizers.method import Tensors

SAMPLE_TOKENS = 48


@dataclass(slots=True)
class ModelMeter:
    """A meter of the weights of `model`, which is not changed. `held_out` gives the text, or None
    as long as not all of it is here."""

    model: Llama
    held_out: Callable[[], HeldOut | None]
    tokenizer: Tokenizer

    def copy(self, weights: Tensors) -> Measurement | None:
        """Return a function that measures a copy of these weights, on the device of the model."""
        held_out = self.held_out()
        if held_out is None:
            return None
        copy = copy_of(self.model, weights)
        return lambda halted: self._measured(copy, held_out, halted)

    def _measured(
        self, model: Llama, held_out: HeldOut, halted: Callable[[], bool]
    ) -> Measured | None:
        rows = held_out.rows
        x, y = inputs_and_targets(rows)
        each = losses(model, x, y, max(AT_ONCE // x.shape[1], 1), halted)
        if len(each) < len(rows):
            return None
        found = held_out_loss(each, rows, held_out.lengths)
        sample = generate(model, self.tokenizer, "", SAMPLE_TOKENS)
        return Measured(found.estimate, found.bits_per_byte, sample)
