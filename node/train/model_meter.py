"""The measuring of a language model's weights on held-out text, and a sample of what they write."""

from collections.abc import Callable
from dataclasses import dataclass

from farflock.node.model.evaluation import HeldOut, copy_of, losses, summarise
from farflock.node.model.generate import generate
from farflock.node.model.llama import Llama
from farflock.node.tokens.tokenizer import Tokenizer
from farflock.node.train.evaluator import Measured
from farflock.optimizers.method import Tensors

AT_ONCE = 4096  # tokens
SAMPLE_TOKENS = 48


@dataclass(slots=True)
class ModelMeter:
    """A meter of the weights of `model`, which is not changed."""

    model: Llama
    held_out: HeldOut
    tokenizer: Tokenizer

    def copy(self, weights: Tensors) -> Callable[[Callable[[], bool]], Measured | None]:
        """Return a function that measures a copy of these weights, on the device of the model."""
        copy = copy_of(self.model, weights)
        return lambda halted: self._measured(copy, halted)

    def _measured(self, model: Llama, halted: Callable[[], bool]) -> Measured | None:
        x, y = self.held_out.x, self.held_out.y
        each = losses(model, x, y, max(AT_ONCE // x.shape[1], 1), halted)
        if len(each) < len(x):
            return None
        found = summarise(each)
        sample = generate(model, self.tokenizer, "", SAMPLE_TOKENS)
        return Measured(found, self.held_out.bits_per_byte(found.mean), sample)
