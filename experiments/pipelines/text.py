"""The text that experiments train on, read once."""

import functools

from farflock.node.data.samples import Text, text_in_memory
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.tokens.tokenizer import ByteTokenizer, TokenIds


@functools.cache
def texts() -> tuple[Text, TokenIds, str]:
    """Return the training text, held-out tokens, and the corpus's hash."""
    corpus, tokenizer = load_corpus(SHIPPED), ByteTokenizer()
    train = text_in_memory(tokenizer.encode(corpus.train))
    return train, tokenizer.encode(corpus.held_out), corpus.sha256
