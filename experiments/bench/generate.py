"""The speed of sampling on the CPU, next to transformers and next to a model without a cache.

All take the likeliest of 512 tokens, one after the other, with the same weights in one thread, in
turns, and must say the same text. `generate.cache` is held against the way in which each token
computes its whole context again; `generate` against transformers' own `generate`, whose model is
read from an exported folder.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from farflock.experiments.measure.metric import (
    Metric,
    NotMeasured,
    Options,
    load,
    medians,
    seconds,
)
from farflock.experiments.measure.threads import one_thread
from farflock.node.model.export import export
from farflock.node.model.generate import GREEDY, sample
from farflock.node.model.llama import PRESETS, Llama, ModelConfig, build
from farflock.node.tokens.tokenizer import ByteTokenizer

# With a head of its own, random weights repeat what they said less.
MODEL = msgspec.structs.replace(PRESETS["10m"], context=1024, tied=False)
TOKENS = 512
QUICK, QUICK_TOKENS = msgspec.structs.replace(PRESETS["tiny"], tied=False), 24
PROMPT = b"Once upon a time"
SEED = 1
Way = Callable[[int], list[int]]  # from a number of tokens to those tokens


def run(options: Options) -> Iterator[Metric]:
    """Yield `generate.cache` and `generate`, from `options.repeats` turns; raise `NotMeasured` at
    the second without transformers."""
    config, tokens = (QUICK, QUICK_TOKENS) if options.quick else (MODEL, TOKENS)
    model = build(config, SEED).eval()
    with one_thread():
        for name, yardstick, way in (
            ("generate.cache", "each token computes its context again", _without_cache),
            ("generate", "transformers' generate", _transformers),
        ):
            if options.wants(name):
                pairs = alternating(_ours(model), way(model), tokens, options.repeats)
                yield _metric(name, yardstick, config, tokens, pairs)


def alternating(ours: Way, other: Way, tokens: int, repeats: int) -> list[tuple[float, float]]:
    """Return the tokens a processor second of both ways, turn by turn; raise `NotMeasured` if they
    say different texts."""
    if ours(tokens) != other(tokens):  # which warms up both
        raise NotMeasured("the two ways say different texts")

    def speed(way: Way) -> float:
        return tokens / seconds(lambda: way(tokens), time.process_time)

    return [(speed(ours), speed(other)) for _ in range(repeats)]


def _metric(
    name: str, yardstick: str, config: ModelConfig, tokens: int, pairs: list[tuple[float, float]]
) -> Metric:
    ratios = sorted(ours / other for ours, other in pairs)
    note = (
        f"{config.parameters() / 1e6:.1f}M parameters in fp32, {tokens} tokens after "
        f"{len(PROMPT)}, one thread; beside it {yardstick}; ratios from {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}"
    )
    return Metric(name, *medians(pairs), len(pairs), load(), "tokens a processor second", note)


def _ours(model: Llama) -> Way:
    return lambda tokens: list(islice(sample(model, list(PROMPT), GREEDY, seed=0), tokens))


def _without_cache(model: Llama) -> Way:
    """Return a way that computes the whole text for each token."""

    @torch.no_grad()
    def say(tokens: int) -> list[int]:
        ids = list(PROMPT)
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        return ids[len(PROMPT) :]

    return say


def _transformers(model: Llama) -> Way:
    """Return transformers' way, from an exported folder with the same weights."""
    other = _exported(model)
    other.generation_config.eos_token_id = None  # as many tokens as ours

    def say(tokens: int) -> list[int]:
        prompt = torch.tensor([list(PROMPT)])
        options = {"max_new_tokens": tokens, "do_sample": False, "use_cache": True}
        ids: list[int] = other.generate(prompt, **options)[0].tolist()
        return ids[len(PROMPT) :]

    return say


def _exported(model: Llama) -> Any:  # noqa: ANN401 - of a library that may be absent
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise NotMeasured(
            'transformers is not installed; `pip install "farflock[hf]"` installs it'
        ) from None
    with tempfile.TemporaryDirectory(prefix="farflock-bench-") as name:
        folder = Path(name) / "model"
        export(folder, model.config, dict(model.named_parameters()), ByteTokenizer(), "")
        return AutoModelForCausalLM.from_pretrained(folder).eval()
