"""The base of a checkpoint's adapters: a file beside them says which weights they belong to.

A run that trains adapters writes nothing else into its checkpoints. Whatever uses the model finds
the base by this file, and takes no other weights for it.
"""

from pathlib import Path

import msgspec

from farflock.node.model.hf_config import BadModelFolder
from farflock.node.model.llama import ModelConfig
from farflock.node.model.lora import LoraTerms
from farflock.node.state.checkpoint import CheckpointCorrupt, CheckpointError
from farflock.node.state.weights_file import WeightsFolder

BASE_NAME = "base.json"


class BaseNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapters' terms, the hash of the base's weights, and the folder in which the machine that
    wrote the checkpoint has them."""

    lora: LoraTerms
    start: str
    folder: str

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return msgspec.json.encode(self)


def read_note(raw: bytes, origin: Path) -> BaseNote:
    """Return what the file of a checkpoint says; raise `CheckpointCorrupt` if it cannot be read."""
    try:
        return msgspec.json.decode(raw, type=BaseNote)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{origin / BASE_NAME} does not describe adapters ({error}); use another checkpoint"
        ) from None


def weights_of(note: BaseNote, config: ModelConfig, given: Path | None) -> WeightsFolder:
    """Return the base, from the `given` folder or from that of the note; raise `CheckpointError` if
    it is not there, or holds other weights. This reads all of it."""
    folder = given or Path(note.folder)
    try:
        found = WeightsFolder(folder, config)
        right = found.hash == note.start
    except (BadModelFolder, OSError) as error:
        raise CheckpointError(
            f"the model that these adapters belong to is not there ({error}); "
            "name its folder with --base"
        ) from None
    if not right:
        raise CheckpointError(
            f"{folder} holds other weights than those beside which the adapters were trained "
            f"({note.start[:16]}…); name the right folder with --base"
        )
    return found
