"""The text of a run for commands that need all of it on this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farflock.node.data.sequences import Text
    from farflock.node.run.manifest import Manifest
    from farflock.node.tokens.tokenizer import TokenIds


def local_text(
    described: "Manifest", path: Path | None, assignments: Sequence[str]
) -> "tuple[Text, TokenIds]":
    """Return what a run trains on, and its held-out tokens. `path` is the founder's file, which
    names the folder of prepared data. Raise `BadIndex` for data that is not on this machine."""
    from farflock.node.assembly.text import held_out_here, text_here
    from farflock.node.data.local_data import LocalData
    from farflock.node.run.manifest import data_folder
    from farflock.node.state.paths import data_cache

    section = described.data
    folder = None if path is None else data_folder(path, assignments)
    folders = [] if folder is None else [folder]
    local = None if section.root is None else LocalData(section.root, folders, data_cache())
    text = text_here(section, local)
    return text, held_out_here(section, text)
