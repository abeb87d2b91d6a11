"""Upload of an exported folder to the Hugging Face hub.

The token is the one of the environment (HF_TOKEN) or of `hf auth login`: a command line is seen by
other users of the machine, so none is taken from there.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farflock.node.model.export import CHAT_NAME, GGUF_NAME, WEIGHTS_INDEX_NAME, WHOLE_NAME
from farflock.node.model.hf_config import CONFIG_NAME
from farflock.node.tokens.json_tokenizer import JSON_NAME

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_PART = "[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_REPOSITORY = re.compile(f"{_PART}/{_PART}")
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_FILES = (
    "README.md",
    CHAT_NAME,
    CONFIG_NAME,
    "generation_config.json",
    GGUF_NAME,
    WHOLE_NAME,
    WEIGHTS_INDEX_NAME,
    JSON_NAME,
    "tokenizer_config.json",
)
MAX_WEIGHTS_INDEX_BYTES = 64 << 20


class PushRefused(ValueError):
    """An upload that was refused or failed; the message says why and what to do."""


class _WeightsIndex(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file of an export, to be uploaded under its name."""

    path: Path
    size_bytes: int


def exported_files(folder: Path) -> list[ExportedFile]:
    """Return the files of an export, in the order of their names; others in the folder are not
    uploaded. Raise `PushRefused` unless it is a whole one."""
    try:
        found = [
            ExportedFile(path, path.stat().st_size)
            for path in sorted(folder.iterdir())
            if (path.name in _FILES or _SHARD.fullmatch(path.name)) and path.is_file()
        ]
    except OSError as error:
        raise PushRefused(
            f"{folder} cannot be read ({error.strerror}); make it with `farflock export`"
        ) from None
    names = {each.path.name for each in found}
    lacking = ({CONFIG_NAME, JSON_NAME} | _weights_of(folder, names)) - names
    if lacking:
        raise PushRefused(
            f"{folder} lacks {', '.join(sorted(lacking)[:5])}, so it is no whole export; make it "
            "with `farflock export`"
        )
    return found


def _weights_of(folder: Path, names: set[str]) -> set[str]:
    """Return the files that hold the weights, by the index if there is one."""
    if WHOLE_NAME in names or WEIGHTS_INDEX_NAME not in names:
        return {WHOLE_NAME}
    with (folder / WEIGHTS_INDEX_NAME).open("rb") as file:
        raw = file.read(MAX_WEIGHTS_INDEX_BYTES + 1)
    try:
        return set(msgspec.json.decode(raw, type=_WeightsIndex).weight_map.values())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PushRefused(
            f"{folder / WEIGHTS_INDEX_NAME} cannot be read ({str(error)[:200]}); make the folder "
            "anew with `farflock export`"
        ) from None


def require_repository(name: str) -> None:
    """Raise `PushRefused` unless this can be the name of a repository on the hub."""
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name:
        raise PushRefused(
            f"{name[:200]!r} is not the name of a repository; write it as organisation/model"
        )


def push(
    files: list[ExportedFile],
    repository: str,
    *,
    public: bool = False,
    message: str = "Upload a model trained with Farflock",
    api: "HfApi | None" = None,
) -> str:
    """Upload files in one commit, and return its web address.

    A repository that does not exist is made, and private unless `public`; one that exists stays as
    visible as it is. Raise `PushRefused` if the hub refuses, or cannot be reached."""
    require_repository(repository)
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    except ImportError:
        raise PushRefused(
            'the hub is reached by the package `huggingface_hub`; pip install "farflock[hf]"'
        ) from None
    hub = HfApi(library_name="farflock") if api is None else api
    try:
        hub.create_repo(repository, private=not public, exist_ok=True, token=True)
        commit = hub.create_commit(
            repository,
            [CommitOperationAdd(each.path.name, str(each.path)) for each in files],
            commit_message=message,
            token=True,
        )
    except LocalTokenNotFoundError:
        raise PushRefused(
            "there is no token for the hub; run `hf auth login`, or set HF_TOKEN to one that may "
            "write"
        ) from None
    except HfHubHTTPError as error:
        raise PushRefused(_refusal(repository, error)) from None
    except _failures(HfHubHTTPError) as error:
        raise PushRefused(
            f"the upload to {repository} failed ({_short(error)}); check the network, and try "
            "again: what was uploaded is not sent twice"
        ) from None
    return str(commit.commit_url)


def _failures(kind: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors of the network and of files that changed. The hub's client lets those of
    its client of HTTP through, whose package differs between versions: an error of a refusal is
    one of them."""
    return (OSError, ValueError, *(base for base in kind.__bases__ if issubclass(base, Exception)))


def _refusal(repository: str, error: "Exception") -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"the hub does not let this token write to {repository}; use one that may write there "
            "(`hf auth login`, or HF_TOKEN)"
        )
    return f"the hub refused the upload to {repository} ({_short(error)}); try again later"


def _short(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
