"""Text sampled from a model: a pure function of weights, prompt and seed.

A prompt is computed once, and then each token costs one position (kv_cache.py). Beyond the model's
context the oldest tokens drop out. What is cached depends on where the window begins, so the window
moves rarely: once it is full, its newer half is computed again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import torch
from torch import Tensor

from farflock.node.model.kv_cache import KeyValueCache
from farflock.node.model.llama import Llama
from farflock.node.tokens.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a character shows as that lacks bytes


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of a draw: the temperature divides the logits, then only the `top_k` likeliest
    tokens stay, and of those the fewest that make up `top_p` of the probability (arXiv:1904.09751).

    Temperature 0 always takes the likeliest token. `top_k` None and `top_p` 1 leave out nothing.
    Raise `ValueError` for values out of range."""

    temperature: float = 0.8
    top_k: int | None = 40
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"the temperature is {self.temperature}; it must be finite and 0 or more"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be 1 or more, or left out")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0, and at most 1")


USUAL = Sampling()
GREEDY = Sampling(temperature=0.0, top_k=None)


def generate(
    model: Llama,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    sampling: Sampling = USUAL,
    seed: int = 0,
    end: int | None = None,
) -> str:
    """Return a continuation without the prompt: the pieces of `stream` as one text."""
    return "".join(stream(model, tokenizer, prompt, tokens, sampling=sampling, seed=seed, end=end))


def stream(
    model: Llama,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    sampling: Sampling = USUAL,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[str]:
    """Return an iterator of a continuation's pieces, each as soon as it is drawn: `tokens` tokens,
    or fewer if `end` is drawn, the tokenizer's end of text, which the text then lacks.

    An empty prompt means a new line. Equal arguments give equal text on one machine. A model's
    vocabulary may be larger than its tokenizer's; the rest of it is never drawn.
    """
    ids = [int(token) for token in tokenizer.encode(prompt or "\n")]
    drawn = sample(model, ids, sampling, seed=seed, vocabulary=tokenizer.vocab_size)
    return pieces(tokenizer, takewhile(lambda token: token != end, islice(drawn, tokens)))


def sample(
    model: Llama,
    ids: Sequence[int],
    sampling: Sampling = USUAL,
    *,
    seed: int,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Return an endless iterator of tokens after `ids`, below `vocabulary` if that is given; raise
    `ValueError` if there are none to start from."""
    if not ids:
        raise ValueError("sampling starts from at least one token; give a prompt")
    generator = torch.Generator().manual_seed(seed)
    return _sample(Window(model, ids), vocabulary, sampling, generator)


def _sample(
    window: "Window", vocabulary: int | None, sampling: Sampling, generator: torch.Generator
) -> Iterator[int]:
    while True:
        token = draw(window.logits()[:vocabulary], sampling, generator)
        window.append(token)
        yield token


class Window:
    """The newest tokens, as many as fit a model's context, and what the model has computed of
    them."""

    def __init__(self, model: Llama, ids: Sequence[int]) -> None:
        self._model = model
        self._ids = list(ids[-model.config.context :])
        self._cache = self._empty()

    def append(self, token: int) -> None:
        """Add a token. A full window keeps its newer half, whose positions begin at 0 again."""
        self._ids.append(token)
        context = self._model.config.context
        if len(self._ids) > context:
            self._ids = self._ids[-max(context // 2, 1) :]
            self._cache = self._empty()

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Return the logits (V) of the token after the newest one, float32 on the CPU."""
        device = next(self._model.parameters()).device
        new = torch.tensor([self._ids[self._cache.length :]], device=device)
        return self._model.next_logits(new, self._cache)[0].float().cpu()

    def _empty(self) -> KeyValueCache:
        return KeyValueCache(self._model.config.layers, self._model.config.context)


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token with probability proportional to exp(logit / temperature), among those that the
    options leave."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    places = None
    if sampling.top_k is not None and sampling.top_k < logits_V.numel():
        logits_V, places = logits_V.topk(sampling.top_k)
    weights = torch.softmax((logits_V - logits_V.max()) / sampling.temperature, dim=-1)
    drawn = int(torch.multinomial(nucleus(weights, sampling.top_p), 1, generator=generator))
    return drawn if places is None else int(places[drawn])


def nucleus(weights_V: Tensor, share: float) -> Tensor:
    """Return probabilities with zeros for the least likely tokens, beyond the fewest that make up
    `share`; the likeliest one always stays."""
    if share == 1:
        return weights_V
    ordered, places = weights_V.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    before[0] = 0
    return torch.zeros_like(weights_V).index_copy(0, places, ordered * (before < share))


def pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens piece by piece, each once its characters are whole.

    The pieces together are what `decode` returns for all tokens at once, with a tokenizer in which
    whole characters do not depend on their neighbours. A piece is decoded with the one in front of
    it, for tokenizers that write a space between two words only."""
    earlier: list[int] = []
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        piece = _behind(tokenizer, earlier, waiting)
        if piece and not piece.endswith(_UNFINISHED):
            yield piece
            earlier, waiting = waiting, []
    if waiting:
        yield _behind(tokenizer, earlier, waiting)


def _behind(tokenizer: Tokenizer, earlier: list[int], waiting: list[int]) -> str:
    return tokenizer.decode([*earlier, *waiting])[len(tokenizer.decode(earlier)) :]
