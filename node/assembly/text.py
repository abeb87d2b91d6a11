"""The text that a run trains on, from what is on this machine: the shipped corpus as bytes, or
prepared data."""

import hashlib
from collections.abc import Mapping
from functools import partial

from farflock.node.data.index import BadIndex, DataIndex, DataShard, read_index, read_page
from farflock.node.data.index import require_sizes as require_shards
from farflock.node.data.local_data import LocalData
from farflock.node.data.sequences import ShardedText, Text, held_out_tokens
from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import BadData
from farflock.node.run.data_section import DataSection
from farflock.node.tokens.tokenizer import ByteTokenizer, TokenIds


def text_here(section: DataSection, local: LocalData | None) -> Text:
    """Return the run's text; raise `BadCorpus` or `BadIndex` if it is not on this machine.

    Shards of prepared data need not be here yet. `local` is None for the shipped corpus."""
    if local is None:
        return shipped_tokens(section)
    raw = local.index_bytes()
    if raw is None:
        raise BadIndex(
            f"the run's data ({section.root}) is not on this machine; "
            "name its prepared folder with --data"
        )
    index = read_index(raw, "the index", section.root)
    require_described(section, index)
    return listed_text(index, local, section.mix or None)


def shipped_tokens(section: DataSection) -> TokenIds:
    """Return the training tokens of the shipped corpus."""
    return ByteTokenizer().encode(load_corpus(section.corpus or "", section.sha256).train)


def text_hash(text: Text) -> str:
    """Return the SHA-256 of a text, or of the index that names all of it."""
    raw = text.index.encode() if isinstance(text, ShardedText) else text.tobytes()
    return hashlib.sha256(raw).hexdigest()


def held_out_here(section: DataSection, text: Text) -> TokenIds:
    """Return the run's held-out tokens; raise `BadIndex` if they are not on this machine."""
    if isinstance(text, ShardedText):
        return held_out_tokens(text)
    return ByteTokenizer().encode(load_corpus(section.corpus or "", section.sha256).held_out)


def listed_text(index: DataIndex, local: LocalData, mix: Mapping[str, float] | None) -> ShardedText:
    """Return the text that an index and its pages describe, whose shards are opened from
    `local`; raise `BadIndex` if a page is not here, or for contradictions."""
    shards = {}
    for name, source in index.sources.items():
        pages = (read_page(local.read(page), page, index) for page in source.pages)
        shards[name] = tuple(shard for page in pages for shard in page)
        require_shards(source.held_out, index)
        local.note((*shards[name], *source.held_out))
    return ShardedText(index, shards, mix, partial(_opened, local, index))


def require_described(section: DataSection, index: DataIndex) -> None:
    """Raise `BadIndex` unless the manifest says of the data what its index says."""
    tokenizer = "bytes" if index.tokenizer is None else index.tokenizer.sha256
    said, found = (section.tokenizer, section.vocabulary), (tokenizer, index.vocabulary)
    if said != found:
        raise BadIndex(
            f"the run says that its data has {said[1]} tokens of tokenizer {said[0][:16]}, and its"
            f" index {found[1]} of {found[0][:16]}; tell the run's founder"
        )


def require_all_counted(text: Text) -> None:
    """Raise `BadData` if the loss leaves out some of the tokens: servers of stages count all."""
    if isinstance(text, ShardedText) and text.index.counts_answers:
        raise BadData(
            "of the run's data only answers count, and the stages of a pipeline count every token;"
            " train whole models (no [pipeline]), or prepare the data without --chat"
        )


def _opened(local: LocalData, index: DataIndex, shard: DataShard) -> TokenIds:
    return local.opened(shard, index)
