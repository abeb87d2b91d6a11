"""The text that experiments train on, read once."""

import functools

from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.tokens.tokenizer import ByteTokenizer, TokenIds


@functools.cache
def texts() -> tuple[TokenIds, TokenIds, str]:
    """Return training tokens, held-out tokens, and the corpus's hash."""
    corpus, tokenizer = load_corpus(SHIPPED), ByteTokenizer()
    return tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out), corpus.sha256
