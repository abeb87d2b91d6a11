"""Preparations of data, with a clock that ticks a second at each look, and what is in a folder."""

import itertools

from farflock.node.data.prepare import Preparation, PrepareOptions
from farflock.node.data.sources import find_files
from farflock.node.tokens.tokenizer import ByteTokenizer


def preparation(named, target, *, tokenizer=None, adds=False, **options):
    """The preparation of what a path names."""
    files = find_files([str(named)]).files
    given = tokenizer or ByteTokenizer(), PrepareOptions(**options), target, adds
    return Preparation(files, *given)


def prepared(named, target, *, cores=1, said=None, progress=lambda share: None, **options):
    """The outcome of a preparation."""
    seconds = itertools.count()
    lines = [] if said is None else said
    made = preparation(named, target, **options)
    return made.run(cores=cores, clock=lambda: next(seconds), progress=progress, say=lines.append)


def documents(content, split="train"):
    """The documents of prepared bytes, in order, as they are in the shards."""
    end = content.index.end_of_text
    found = []
    for number in range(content.shards(split)):
        tokens = content.read(split, number).tolist()
        assert tokens[-1] == end, "whole documents"
        found += bytes(tokens).split(b"\xff")[:-1]
    return found
