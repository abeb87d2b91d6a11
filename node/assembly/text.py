"""A run's text as tokens: what its nodes train on, and what is held out of that."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from farflock.node.assembly.prepared_corpus import prepared_corpus
from farflock.node.data.documents import cut_passages
from farflock.node.data.folder import PreparedFolder
from farflock.node.data.index import DataIndex
from farflock.node.data.samples import FolderShards, Text
from farflock.node.errors import RefusedByRun
from farflock.node.model.corpus import Corpus, load_corpus
from farflock.node.model.data import Start
from farflock.node.model.evaluation import HeldOut
from farflock.node.run.data_section import DataSection, tokenizer_of
from farflock.node.tokens.tokenizer import TokenIds, Tokenizer

MAX_HELD_OUT_TOKENS = 1 << 24  # of prepared data, that are in memory at once


class RunText(NamedTuple):
    """A run's prepared data, in folders, with the weight of each; a corpus holds out a `rest`."""

    folders: tuple[PreparedFolder, ...]
    weights: tuple[float, ...]
    tokenizer: Tokenizer
    rest: str = ""

    def train(self) -> Text:
        """Return the shards to train on, which are read when they are needed."""
        return Text(tuple(map(FolderShards, self.folders)), self.weights)

    def held_out(self) -> TokenIds:
        """Return tokens that no peer trains on: those of a corpus, or the first ones of each
        folder."""
        if self.rest:
            return tokens_of(self.rest, self.tokenizer)
        some = MAX_HELD_OUT_TOKENS // len(self.folders)
        return np.concatenate([_held_out(content, some) for content in self.folders])


class NodeText(NamedTuple):
    """The tokens that a node trains on, their tokenizer, where this life begins in them, and a
    function that gives what the run is evaluated on, once that is here (None: it is not)."""

    tokenizer: Tokenizer
    tokens: Text
    start: Start = Start()
    held_out: Callable[[], HeldOut | None] | None = None


def text_of(data: DataSection, folders: Sequence[Path] = ()) -> RunText:
    """Return the text of a run, whose prepared data are in these folders; raise `BadCorpus`,
    `BadIndex` or `RefusedByRun` if a part of it is not on this machine."""
    if data.corpus is not None:
        return corpus_text(load_corpus(data.corpus, data.sha256), tokenizer_of(data))
    found = prepared_folders(data, folders)
    weights = tuple(data.weights.values())
    return RunText(found, weights, tokenizer_of(data))


def corpus_text(corpus: Corpus, tokenizer: Tokenizer) -> RunText:
    """Return a corpus as prepared data; raise `BadCorpus` or `Failure` if it cannot be prepared."""
    return RunText((prepared_corpus(corpus, tokenizer),), (1.0,), tokenizer, corpus.held_out)


def tokens_of(text: str, tokenizer: Tokenizer) -> TokenIds:
    """Return a text's tokens, by passages as in prepared data: little is in memory beside them."""
    return np.concatenate(
        [tokenizer.encode(passage.decode()) for passage in cut_passages([text.encode()])]
    )


def prepared_folders(data: DataSection, folders: Sequence[Path]) -> tuple[PreparedFolder, ...]:
    """Return those of the folders that have a run's prepared data, in the manifest's order; raise
    `RefusedByRun` if one is missing, or is not what the manifest says."""
    found = {each.root: each for each in map(PreparedFolder, folders)}
    for root in data.weights:
        if root not in found:
            raise absent_data(root)
        require_vocabulary(data, found[root].index, f"{found[root].folder} has")
    return tuple(found[root] for root in data.weights)


def absent_data(root: str) -> RefusedByRun:
    """Return the error of a machine without the prepared data of this root."""
    return RefusedByRun(
        "the run trains on prepared data that are not on this machine",
        f"no folder here has the root {root[:16]}…",
        "copy that folder from the run's founder, and name it with --data",
    )


def require_vocabulary(data: DataSection, index: DataIndex, having: str = "they have") -> None:
    """Refuse prepared data with another vocabulary than the manifest says."""
    if index.vocabulary != data.tokens:
        raise RefusedByRun(
            "the run's data are not what its manifest says",
            f"{having} {index.vocabulary} tokens instead of {data.tokens}",
            "tell the run's founder",
        )


def _held_out(content: PreparedFolder, tokens: int) -> TokenIds:
    found, left = [np.zeros(0, dtype=content.index.token_type)], tokens
    for number, size in enumerate(content.sizes("held-out")):
        if left <= 0:
            break
        found.append(content.read("held-out", number)[:left])
        left -= size
    return np.concatenate(found)
