"""The format of prepared data, read by a second reader that shares no code with the first."""

import json
import struct

from blake3 import blake3
from worlds.prepared import documents, prepared

WIDTH, LIMIT, FILE = 2, 1000, 4000


def read(folder, root, split):
    """The documents of prepared bytes: from the root to the tokens, each hash checked."""
    raw = (folder / "index.json").read_bytes()
    assert blake3(raw).hexdigest() == root
    index, found = json.loads(raw), []
    for number, part in enumerate(index["parts"]):
        file = offset = 0
        for name in part[split.replace("-", "_")]["pages"]:
            page = (folder / "pages" / name).read_bytes()
            assert blake3(page).hexdigest() == name
            for digest, tokens, count in struct.iter_unpack("<32sII", page):
                size = tokens * WIDTH
                if offset + size > FILE:
                    file, offset = file + 1, 0
                path = folder / "tokens" / f"{number:03}-{split}-{file:05}.bin"
                shard = path.read_bytes()[offset : offset + size]
                assert size <= LIMIT
                assert blake3(shard).digest() == digest
                ids = struct.unpack(f"<{tokens}H", shard)
                assert ids.count(index["end_of_text"]) == count
                assert ids[-1] == index["end_of_text"]
                found += bytes(ids).split(b"\xff")[:-1]
                offset += size
    return found


def test_a_second_reader_finds_the_same_documents(small, texts, tmp_path):
    content = prepared(texts, tmp_path / "out", held_out=0.1).content
    (texts / "more.txt").write_text("a new text")
    content = prepared(texts, tmp_path / "out", held_out=0.1, adds=True).content
    for split in ("train", "held-out"):
        assert read(content.folder, content.root, split) == documents(content, split) != []
