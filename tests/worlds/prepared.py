"""Small folders of prepared data, written without the command that users have for it."""

import io

import msgspec
import numpy as np

from farflock.node.data.index import (
    DataIndex,
    DataPage,
    DataShard,
    DataSource,
    PageContent,
    listed_stream,
    root_of,
    token_bytes,
)

END = 255  # of a text of bytes


def documents_of(count, words=12, seed=0):
    """Different short texts."""
    return [
        f"{n} squared is {n * n}, " * (1 + (n * 7 + seed) % words)
        for n in range(seed, seed + count)
    ]


def encoded(documents, end=END, dtype="<u2"):
    """The documents as one array of bytes, each with its end."""
    parts = [np.frombuffer(text.encode(), np.uint8).astype(dtype) for text in documents]
    return np.concatenate([np.append(part, np.array(end, dtype)) for part in parts])


def write_shards(folder, arrays):
    """Write arrays of tokens as shards; return their entries."""
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    shards = []
    for tokens in arrays:
        raw = np.ascontiguousarray(tokens).tobytes()
        entry = msgspec.structs.asdict(listed_stream(io.BytesIO(raw)))
        shard = DataShard(**entry, tokens=len(tokens), documents=int((tokens == END).sum()))
        (folder / shard.name).write_bytes(raw)
        shards.append(shard)
    return tuple(shards)


def write_page(folder, shards):
    """Write the page of these shards; return its entry."""
    (folder / "pages").mkdir(parents=True, exist_ok=True)
    raw = msgspec.json.encode(PageContent(shards))
    entry = msgspec.structs.asdict(listed_stream(io.BytesIO(raw)))
    page = DataPage(**entry, shards=len(shards), tokens=sum(shard.tokens for shard in shards))
    (folder / page.name).write_bytes(raw)
    return page


def prepared(folder, sources=None, *, shards=4, vocabulary=256, held_out=None):
    """Write a folder of prepared data from {source: documents}; return its root."""
    sources = sources or {"text": documents_of(400)}
    dtype = f"<u{token_bytes(vocabulary)}"
    made = {}
    for name, documents in sources.items():
        arrays = [encoded(documents[at::shards], dtype=dtype) for at in range(shards)]
        entries = write_shards(folder, arrays)
        rest = held_out if held_out is not None else documents_of(40, seed=10_000)
        made[name] = DataSource(
            documents=len(documents),
            tokens=sum(shard.tokens for shard in entries),
            pages=(write_page(folder, entries),),
            held_out=write_shards(folder, [encoded(rest, dtype=dtype)]) if rest else (),
        )
    index = DataIndex(
        vocabulary=vocabulary,
        token_bytes=token_bytes(vocabulary),
        end_of_text=END,
        sources=made,
    )
    raw = index.encode()
    (folder / "index.json").write_bytes(raw)
    return root_of(raw)
