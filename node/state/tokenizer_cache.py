"""The tokenizers that runs of this machine use: files named by their BLAKE3 hash.

They are in `tokenizers/` in the folder of all of Farflock's files. A file whose content is not what
its name says counts as absent.
"""

import os
import tempfile
from pathlib import Path

from farflock.node.state.paths import home
from farflock.node.tokens.json_tokenizer import read_definition
from farflock.node.tokens.tokenizer import BadTokenizer
from farflock.swarm.chunk_store import digest_of


def keep_tokenizer(raw: bytes) -> None:
    """Keep a tokenizer's file, unless it is here already. Two processes may do so at once."""
    name = digest_of(raw).hex()
    if cached_tokenizer(name) is not None:
        return
    folder = _path(name).parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as partial:
        try:
            partial.write(raw)
            partial.flush()
            os.fsync(partial.fileno())
            os.replace(partial.name, _path(name))
        except OSError:
            Path(partial.name).unlink(missing_ok=True)
            raise


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
