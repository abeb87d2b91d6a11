"""Text sampled from a model: a pure function of weights, prompt and seed.

A prompt is computed once, and then each token costs one position (kv_cache.py). Beyond the model's
context the oldest tokens drop out. Rotary positions make what is cached depend on where the window
begins, so the window moves rarely: once it is full, its newer half is computed again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import torch
from torch import Tensor, multinomial

from farflock.node.model.hf_model import AnyModel, HfCache
from farflock.node.model.kv_cache import KeyValueCache
from farflock.node.tokens.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a character shows as that lacks bytes


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of a draw: the repetition penalty (arXiv:1909.05858) divides the positive logits
    of tokens that occurred, and multiplies the negative ones; the temperature divides all logits;
    then only the `top_k` likeliest tokens stay, of those the fewest that make up `top_p` of the
    probability (arXiv:1904.09751), and of those the ones with `min_p` of the likeliest one's
    (arXiv:2407.01082).

    Temperature 0 always takes the likeliest token. `top_k` None, `top_p` 1, `min_p` 0 and a penalty
    of 1 change nothing. Raise `ValueError` for values out of range."""

    temperature: float = 0.8
    top_k: int | None = 40
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"the temperature is {self.temperature}; it must be finite and 0 or more"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be 1 or more, or left out")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0, and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must lie between 0 and 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"the repetition penalty is {self.repetition_penalty}; it must be finite and "
                "above 0, commonly 1 to 1.3"
            )


USUAL = Sampling()
GREEDY = Sampling(temperature=0.0, top_k=None)


def generate(
    model: AnyModel,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    tokens: int,
    *,
    sampling: Sampling = USUAL,
    seed: int = 0,
    stops: Sequence[str] = (),
) -> str:
    """Return a continuation without the prompt: `tokens` tokens, or fewer if the end of text is
    drawn, or one of `stops` appears, which the text then lacks. An empty prompt means a new line.

    Equal arguments give equal text on one machine. A model's vocabulary may be larger than its
    tokenizer's; the rest of it is never drawn.
    """
    ends = (tokenizer.end_of_text,)
    drawn = continued(model, tokenizer, prompt, tokens, sampling=sampling, seed=seed, ends=ends)
    return "".join(until(pieces(tokenizer, drawn), stops))


def continued(
    model: AnyModel,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    tokens: int,
    *,
    sampling: Sampling = USUAL,
    seed: int = 0,
    ends: Sequence[int],
) -> Iterator[int]:
    """Return an iterator of at most `tokens` tokens after a text, or tokens, up to the first of
    `ends`."""
    ids = tokenizer.encode(prompt or "\n") if isinstance(prompt, str) else prompt
    drawn = sample(
        model,
        [int(token) for token in ids],
        sampling,
        seed=seed,
        vocabulary=tokenizer.vocab_size,
    )
    return takewhile(lambda token: token not in ends, islice(drawn, tokens))


def sample(
    model: AnyModel,
    ids: list[int],
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
    return _sample(model, list(ids), vocabulary, sampling, generator)


def _sample(
    model: AnyModel,
    ids: list[int],
    vocabulary: int | None,
    sampling: Sampling,
    generator: torch.Generator,
) -> Iterator[int]:
    window, seen = Window(model, ids), set(ids)
    while True:
        logits_V = penalised(window.logits()[:vocabulary], seen, sampling.repetition_penalty)
        token = draw(logits_V, sampling, generator)
        window.append(token)
        seen.add(token)
        yield token


class Window:
    """The newest tokens, as many as fit a model's context, and what the model has computed of
    them."""

    def __init__(self, model: AnyModel, ids: Sequence[int]) -> None:
        self._model, self._context = model, model.config.context
        self.ids = list(ids[-self._context :])
        self._cache = self._empty()

    def append(self, token: int) -> None:
        """Add a token. A full window keeps its newer half, whose positions begin at 0 again."""
        self.ids.append(token)
        if len(self.ids) > self._context:
            self.ids = self.ids[-max(self._context // 2, 1) :]
            self._cache = self._empty()

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the logits (V) of the token after the newest one, float32 on the CPU."""
        device = next(self._model.parameters()).device
        new = torch.tensor([self.ids[self._cache.length :]], device=device)
        logits: Tensor = self._model(new, cache=self._cache)
        return logits[0, -1].float().cpu()

    def _empty(self) -> KeyValueCache | HfCache:
        return self._model.empty_cache()


def penalised(logits_V: Tensor, seen: Iterable[int], penalty: float) -> Tensor:
    """Return logits in which tokens that occurred are less likely, for a penalty above 1."""
    if penalty == 1:
        return logits_V
    places = torch.tensor([token for token in seen if token < logits_V.numel()], dtype=torch.int64)
    those = logits_V[places]
    return logits_V.index_copy(0, places, torch.where(those > 0, those / penalty, those * penalty))


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token: with probability proportional to exp(logit / temperature), if nothing else is
    asked for."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    places = None
    if sampling.top_k is not None and sampling.top_k < logits_V.numel():
        logits_V, places = logits_V.topk(sampling.top_k)
    weights = torch.softmax((logits_V - logits_V.max()) / sampling.temperature, dim=-1)
    kept = _min_p(_top_p(weights, sampling.top_p), sampling.min_p)
    drawn = int(multinomial(kept, 1, generator=generator))
    return drawn if places is None else int(places[drawn])


def _top_p(weights: Tensor, share: float) -> Tensor:
    """Return weights without the least likely tokens beyond this share of the probability; the
    likeliest one always stays."""
    if share == 1:
        return weights
    ordered, places = weights.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    before[0] = 0
    return torch.zeros_like(weights).index_copy(0, places, ordered * (before < share))


def _min_p(weights: Tensor, share: float) -> Tensor:
    return weights * (weights >= share * weights.max())


def pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens piece by piece, as soon as no later token can change it.

    The pieces together are what `decode` returns for all tokens at once, with a tokenizer in which
    whole characters do not depend on their neighbours. A piece is decoded with the one in front of
    it, for those that write a space between two words only."""
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


def until(texts: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield texts up to the first place at which one of `stops` begins, wherever texts were cut;
    what may be the beginning of one waits for the next text."""
    stops = [stop for stop in stops if stop]
    waiting = ""
    for text in texts:
        waiting += text
        found = [place for stop in stops if (place := waiting.find(stop)) >= 0]
        if found:
            yield waiting[: min(found)]
            return
        ready = len(waiting) - max((_begun(waiting, stop) for stop in stops), default=0)
        yield waiting[:ready]
        waiting = waiting[ready:]
    yield waiting


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
