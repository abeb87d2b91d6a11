"""A corpus as prepared data: made in this machine's cache when a run first asks for it.

It is in `prepared/` in the folder of all of Farflock's files, under a name that stands for the text
and its tokenizer. Its documents are the text's parts of 1 MiB. What the corpus holds out is no part
of it.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from farflock.node.data.documents import BadDocuments
from farflock.node.data.folder import PreparedFolder
from farflock.node.data.index import BadIndex
from farflock.node.data.prepare import VERSION, Preparation, PrepareOptions
from farflock.node.data.sources import find_files
from farflock.node.durable import sync_folder
from farflock.node.errors import Failure
from farflock.node.machine import usable_cores
from farflock.node.model.corpus import BadCorpus, Corpus
from farflock.node.state.paths import home
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import BYTES, Tokenizer
from farflock.node.turns import TurnNeverCame, in_turn

log = logging.getLogger(__name__)
_OPTIONS = PrepareOptions(held_out=0.0, keep_duplicates=True, strict=True)


def prepared_corpus(corpus: Corpus, tokenizer: Tokenizer) -> PreparedFolder:
    """Return what is trained on of a corpus, whole and intact; raise `BadCorpus` if the tokenizer
    does not go with it, and `Failure` if the disk is in the way. One process prepares at a time."""
    if tokenizer.end_of_text is None:
        raise _without_end("nothing says which token of the run's tokenizer ends a document")
    cache = home() / "prepared"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with in_turn(cache) as getting_on:
            target = cache / _name(corpus, tokenizer)
            found = _intact(target, getting_on)
            if found is None:
                found = _prepared(corpus, tokenizer, target, getting_on)
            return found
    except TurnNeverCame as error:
        what = f"the corpus {corpus.name} cannot be prepared in {cache}"
        raise Failure(what, str(error.strerror), "") from None
    except OSError as error:
        raise Failure(
            f"the corpus {corpus.name} cannot be prepared in {cache}",
            str(error.strerror).lower(),
            "free some space, or name another folder by FARFLOCK_HOME",
        ) from None


def _name(corpus: Corpus, tokenizer: Tokenizer) -> str:
    definition = tokenizer.hash if isinstance(tokenizer, JsonTokenizer) else BYTES
    given = f"{VERSION} {definition} {tokenizer.end_of_text} ".encode()
    return blake3(given + corpus.train.encode()).hexdigest()


def _intact(target: Path, getting_on: Callable[[], None]) -> PreparedFolder | None:
    """Return the folder, all of which is read; None if there is none, or if it is damaged."""
    try:
        found = PreparedFolder(target)
        for number in range(found.shards("train")):
            found.read("train", number)
            getting_on()
    except BadIndex:
        return None
    return found


def _prepared(
    corpus: Corpus, tokenizer: Tokenizer, target: Path, getting_on: Callable[[], None]
) -> PreparedFolder:
    """Make the folder out of the corpus, beside its place."""
    log.info("preparing the corpus %s", corpus.name)
    making = target.parent / "making"
    for left in (making, target):  # of a process that was killed, or damaged
        shutil.rmtree(left, ignore_errors=True)
    making.mkdir()
    text = making / "corpus.txt"
    text.write_bytes(corpus.train.encode())
    work = Preparation(find_files([str(text)]).files, tokenizer, _OPTIONS, making / "done")
    try:
        work.run(
            cores=usable_cores(),
            clock=time.monotonic,
            progress=lambda share: getting_on(),
            say=log.debug,
        )
    except BadDocuments:  # nothing else can be wrong with a corpus
        raise _without_end(f"the corpus {corpus.name} has the token that ends documents") from None
    os.replace(making / "done", target)
    sync_folder(target.parent)
    shutil.rmtree(making)
    return PreparedFolder(target)


def _without_end(why: str) -> BadCorpus:
    return BadCorpus(
        f"{why}; prepare the text with `farflock data prepare --end-of-text`, and train on that "
        "with --data"
    )
