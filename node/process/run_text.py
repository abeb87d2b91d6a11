"""The inputs of a node before its peer runs: room, the run's text, and trained weights.

A joiner fetches what it lacks of the text and its tokenizer, which every node lends to others.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from farflock.node.assembly.known_run import KnownRun
from farflock.node.assembly.text import NodeText, RunText, text_of
from farflock.node.errors import Failure, FarflockError, RefusedByRun
from farflock.node.model.corpus import SHIPPED
from farflock.node.model.data import BadData, Start, evaluation_rows
from farflock.node.model.evaluation import HeldOut
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.process.network import MachineOptions
from farflock.node.process.room import fitted
from farflock.node.process.run_data import RunData, fetch_data
from farflock.node.run.data_section import DataSection, tokenizer_of
from farflock.node.run.manifest import Manifest
from farflock.node.run.model_section import first_weights
from farflock.node.state.tokenizer_cache import cached_tokenizer, keep_tokenizer
from farflock.node.tokens.json_tokenizer import JsonTokenizer, file_chunks
from farflock.node.tokens.token_bytes import bytes_of_tokens
from farflock.node.tokens.tokenizer import BYTES, Tokenizer
from farflock.swarm.chunk_store import Store, digest_of
from farflock.swarm.compute import Worker
from farflock.swarm.links import Links, PeerId
from farflock.swarm.peer.bootstrap import fetch_chunk

CHUNK_TIMEOUT_S = 120.0  # for each chunk of a tokenizer's file

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeInputs:
    """The inputs of a node's assembling: a machine with room for the known run, the run's text with
    its prepared data, and the weights that a founder's model begins with."""

    machine: MachineOptions
    known: KnownRun
    data: RunData | None  # None: the text is a corpus
    text: NodeText
    weights: WeightsFolder | None  # None: the run's seed or the swarm gives them


async def inputs_of(
    machine: MachineOptions,
    known: KnownRun,
    data: RunData | None,
    start: Start,
    error: type[FarflockError],
    *,
    begins: bool,
) -> NodeInputs:
    """Return what this machine has for a run that it `begins` or takes up, from this place in its
    data on; raise `error` if it has no room for a step, and `Failure` if a founder lacks the run's
    weights.

    Founders hand weights out to servers of stages in a later life too."""
    manifest = known.manifest
    hands_out = manifest.pipeline is not None and machine.model is not None
    weights = first_weights(manifest.plan(), machine.model) if begins or hands_out else None
    machine = await fitted(machine, manifest, error)
    text = await load_text(manifest, data, start)
    return NodeInputs(machine, known, data, text, weights)


def require_corpus(data: DataSection) -> None:
    """Refuse a run whose corpus is not on this machine."""
    name, digest = data.corpus, data.sha256
    if name is None or name == SHIPPED or Path(name).is_file():
        return
    why = f"it has SHA-256 {str(digest)[:16]}…, and there is no file {Path(name).absolute()}"
    remedy = "get that file from the run's founder, and put it there"
    raise RefusedByRun(f"the run trains on {name!r}, which is not on this machine", why, remedy)


async def fetch_text(
    links: Links,
    run: str,
    data: DataSection,
    members: Sequence[PeerId],
    machine: MachineOptions,
) -> RunData | None:
    """Get what this machine lacks of a run's text, before the run's members count this node: its
    tokenizer, and the index of its prepared data, which are returned. A corpus has to be here;
    raise `RefusedByRun` if it is not."""
    require_corpus(data)
    await fetch_tokenizer(links, run, data, members)
    return await fetch_data(links, run, data, members, machine)


async def fetch_tokenizer(
    links: Links, run: str, data: DataSection, members: Sequence[PeerId]
) -> None:
    """Fetch the run's tokenizer from its members and keep it, unless it is here already; raise
    `Failure` if none delivers it, and `RefusedByRun` if the manifest does not describe it."""
    if data.tokenizer == BYTES or cached_tokenizer(data.tokenizer) is not None:
        return
    raw = bytearray()
    for digest, size in data.chunks():
        chunk = await fetch_chunk(links, run, digest, size, members, CHUNK_TIMEOUT_S)
        if chunk is None:
            raise Failure(
                "the run's tokenizer could not be downloaded",
                f"no member sent {size:,} bytes of it within {CHUNK_TIMEOUT_S:.0f} s",
                "check the network connection, and try again",
            )
        raw += chunk
    if digest_of(raw).hex() != data.tokenizer:
        raise RefusedByRun(
            "the run's tokenizer is not what its manifest says",
            "its chunks do not make up the file with that hash",
            "tell the run's founder",
        )
    keep_tokenizer(bytes(raw))


async def load_text(manifest: Manifest, data: RunData | None, start: Start) -> NodeText:
    """Return the run's text as tokens, which a thread reads: it may be long."""

    def loaded() -> NodeText:
        if data is None:
            text = text_of(manifest.data)
            held_out = _held_out(manifest, text.tokenizer, text)
            return NodeText(text.tokenizer, text.train(), start, held_out)
        tokenizer = tokenizer_of(manifest.data)
        return NodeText(tokenizer, data.text(), start, _held_out(manifest, tokenizer, data))

    reader = Worker("text")
    try:
        return await reader(loaded)
    finally:
        reader.close()


def _held_out(
    manifest: Manifest, tokenizer: Tokenizer, text: RunText | RunData
) -> Callable[[], HeldOut | None] | None:
    """Return a function that gives the sequences that a run is evaluated on, once all are here;
    None if it is not evaluated, or if there is too little text."""
    terms, seq = manifest.evaluation, manifest.train.seq
    if not terms.every:
        return None
    lengths = bytes_of_tokens(tokenizer)
    try:
        if isinstance(text, RunText):
            found = HeldOut(evaluation_rows(text.held_out(), seq, terms.sequences), lengths)
            return lambda: found
        coming = text.hold_out(seq, terms.sequences)
    except BadData as error:
        log.warning("this node cannot evaluate the run: %s", error)
        return None
    return lambda: None if coming.rows is None else HeldOut(coming.rows, lengths)


def lend_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    """Hold a tokenizer's file ready for newcomers."""
    if isinstance(tokenizer, JsonTokenizer):
        for chunk in file_chunks(tokenizer.raw):
            store.put(chunk, "tokenizer")
