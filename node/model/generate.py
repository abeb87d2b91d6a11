"""Text sampled from a model: a pure function of weights, prompt and seed.

There is no key-value cache: small models recompute the context for each token, which keeps this
file short. Beyond the context length the oldest tokens drop out.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from farflock.node.model.llama import Llama
from farflock.node.tokens.tokenizer import Tokenizer


def generate(
    model: Llama,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
) -> str:
    """Return `tokens` tokens of continuation, without the prompt; an empty prompt means a new line.

    Temperature 0 always takes the likeliest token. Equal arguments give equal text on one machine.
    A model's vocabulary may be larger than its tokenizer's; the rest of it is never drawn.
    """
    ids = [int(token) for token in tokenizer.encode(prompt or "\n")]
    drawn = sample(
        model,
        ids,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        vocabulary=tokenizer.vocab_size,
    )
    return tokenizer.decode(list(islice(drawn, tokens)))


def sample(
    model: Llama,
    ids: list[int],
    *,
    temperature: float,
    top_k: int | None,
    seed: int,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Return an endless iterator of tokens after `ids`, below `vocabulary` if that is given; raise
    `ValueError` for options out of range."""
    if not ids:
        raise ValueError("sampling starts from at least one token; give a prompt")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"the temperature is {temperature}; it must be finite and 0 or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be 1 or more, or left out")
    generator = torch.Generator().manual_seed(seed)
    return _sample(model, list(ids), vocabulary, temperature, top_k, generator)


def _sample(
    model: Llama,
    ids: list[int],
    vocabulary: int | None,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Iterator[int]:
    device = next(model.parameters()).device
    while True:
        window = torch.tensor([ids[-model.config.context :]], device=device)
        with torch.no_grad():
            logits_V = model(window)[0, -1, :vocabulary].float().cpu()
        ids = [*window[0].tolist(), draw(logits_V, temperature, top_k, generator)]
        yield ids[-1]


def draw(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    """Draw a token with probability proportional to exp(logit / temperature), from the `top_k`
    likeliest if that is given."""
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < logits_V.numel():
        best, places = logits_V.topk(top_k)
        return int(places[draw(best, temperature, None, generator)])
    weights = torch.softmax((logits_V - logits_V.max()) / temperature, dim=-1)
    return int(torch.multinomial(weights, 1, generator=generator))
