"""A run's text as tokens: what its nodes train on, and what is held out of that."""

from typing import NamedTuple

from farflock.node.model.corpus import Corpus, load_corpus
from farflock.node.run.data_section import DataSection, tokenizer_of
from farflock.node.tokens.tokenizer import TokenIds, Tokenizer, long_text_ids


class RunText(NamedTuple):
    """A run's corpus, and the tokenizer that makes it tokens."""

    corpus: Corpus
    tokenizer: Tokenizer

    def train(self) -> TokenIds:
        """Return the tokens to train on."""
        return long_text_ids(self.tokenizer, self.corpus.train)

    def held_out(self) -> TokenIds:
        """Return the tokens that no peer trains on."""
        return long_text_ids(self.tokenizer, self.corpus.held_out)

    def loaded(self) -> "NodeText":
        """Return what a node trains on, tokenized."""
        return NodeText(self.tokenizer, self.train())


class NodeText(NamedTuple):
    """The tokens that a node trains on, and their tokenizer."""

    tokenizer: Tokenizer
    tokens: TokenIds


def text_of(data: DataSection) -> RunText:
    """Return the text of a run; raise `BadCorpus` or `RefusedByRun` if a part of it is not on this
    machine."""
    return RunText(load_corpus(data.corpus, data.sha256 or None), tokenizer_of(data))
