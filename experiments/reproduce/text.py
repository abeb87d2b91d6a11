"""The text of the experiments, read once: what is trained on, and what losses are measured on."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.model.data import evaluation
from farflock.node.model.evaluation import losses
from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.tokenizer import ByteTokenizer, TokenIds

Measure = Callable[[Mapping[str, Tensor]], float]


@functools.cache
def texts() -> tuple[TokenIds, TokenIds, str]:
    """Tokens to train on, held-out tokens, and the corpus's hash."""
    corpus, tokenizer = load_corpus(SHIPPED), ByteTokenizer()
    return tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out), corpus.sha256


def measure(model: ModelConfig, seed: int, seq: int, sequences: int, device: str) -> Measure:
    """A function from parameters to the held-out loss in nats a token."""
    x, y = evaluation(texts()[1], seq, sequences)
    judge: nn.Module = build(model, seed).to(device)
    places = dict(judge.named_parameters())

    def loss(parameters: Mapping[str, Tensor]) -> float:
        with torch.no_grad():
            for name, tensor in parameters.items():
                places[name].copy_(tensor)
        return float(losses(judge, x, y, 64).mean())

    return loss
