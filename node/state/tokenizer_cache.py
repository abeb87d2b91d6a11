"""The tokenizers that runs of this machine use: files named by their BLAKE3 hash.

They are in `tokenizers/` in the folder of all of Farflock's files. A file whose content is not what
its name says counts as absent.
"""

from pathlib import Path

from farflock.node.durable import write_durably
from farflock.node.state.paths import home
from farflock.node.tokens.json_tokenizer import read_definition
from farflock.node.tokens.tokenizer import BadTokenizer
from farflock.swarm.chunk_store import digest_of


def keep_tokenizer(raw: bytes) -> None:
    """Keep a tokenizer's file, unless it is here already. Two processes may do so at once."""
    name = digest_of(raw).hex()
    if cached_tokenizer(name) is not None:
        return
    _path(name).parent.mkdir(parents=True, exist_ok=True)
    write_durably(_path(name), raw)


def cached_tokenizer(name: str) -> bytes | None:
    """Return the file with this hash (hex), or None."""
    path = _path(name)
    if not path.is_file():
        return None
    try:
        raw = read_definition(path)
    except BadTokenizer:
        return None
    return raw if digest_of(raw).hex() == name else None


def _path(name: str) -> Path:
    return home() / "tokenizers" / f"{name}.json"
