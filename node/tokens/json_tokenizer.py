"""Tokenizers from files: any tokenizer.json that Hugging Face's `tokenizers` reads.

The file's bytes determine every id, so their BLAKE3 hash is the tokenizer's identity. A text is
only text: what is spelled like a special token is tokenized as its characters, and nothing is added
in front or behind.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from farflock.node.tokens.tokenizer import (
    BYTES,
    MAX_VOCABULARY,
    BadTokenizer,
    ByteTokenizer,
    TokenIds,
    Tokenizer,
    token_array,
)
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.messages import MAX_CHUNK_BYTES

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as FastTokenizer

MAX_FILE_BYTES = 128 * 1024 * 1024
JSON_NAME = "tokenizer.json"
# Names of the token that ends a document, the first that a file has. Those of a turn in a chat come
# last: where a file has both, documents end with the other.
END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<\N{FULLWIDTH VERTICAL LINE}end▁of▁sentence\N{FULLWIDTH VERTICAL LINE}>",
    "[EOS]",
    "<|im_end|>",
    "<|eot_id|>",
)
_NAME_IT = "name the token that ends a document with --end-of-text"


class JsonTokenizer:
    """The tokenizer that a tokenizer.json describes.

    `end_of_text` is the id or the name of the token that ends a document; without it, the first of
    `END_NAMES` among the special tokens, if any. Raise `BadTokenizer` for bytes that are no such
    file.
    """

    def __init__(
        self, raw: bytes, end_of_text: int | str | None = None, origin: str = JSON_NAME
    ) -> None:
        self.raw = raw
        self.hash = digest_of(raw).hex()
        self._fast = _parsed(raw, origin)
        names = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(names.values(), default=-1) + 1
        if not 2 <= self.vocab_size <= MAX_VOCABULARY:
            raise BadTokenizer(
                f"{origin} has {self.vocab_size} tokens, and a tokenizer 2 to 2^32; "
                "use another tokenizer"
            )
        self.end_of_text = _end(self._fast, names, end_of_text, origin)

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text; raise `BadTokenizer` if the tokenizer has none for a part of
        it."""
        with _in_words("cannot tokenize this text"):
            return self._ids(self._fast.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the ids of each text. `tokenizers` computes them outside of Python's lock, in a
        thread per core unless the environment says TOKENIZERS_PARALLELISM=false."""
        with _in_words("cannot tokenize these texts"):
            found = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._ids(each) for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, with the names of special tokens, but without the end of
        text."""
        kept = [int(i) for i in ids if i != self.end_of_text]
        with _in_words("cannot show these tokens"):
            text: str = self._fast.decode(kept, skip_special_tokens=False)
        return text

    @property
    def end_name(self) -> str | None:
        """The name of the token that ends a document."""
        return None if self.end_of_text is None else self._fast.id_to_token(self.end_of_text)

    def _ids(self, found: "Encoding") -> TokenIds:
        return token_array(found.ids, self.vocab_size)


def read_tokenizer(path: str | Path, end_of_text: str | None = None) -> Tokenizer:
    """Return the tokenizer that `path` names: `bytes`, a tokenizer.json, or a folder that holds
    one. Raise `BadTokenizer` for anything else."""
    if str(path) == BYTES:
        if end_of_text is not None:
            raise BadTokenizer(
                "bytes end a document with the byte 255; leave --end-of-text out, or name a "
                "tokenizer's file"
            )
        return ByteTokenizer()
    return JsonTokenizer(read_definition(Path(path)), end_of_text, str(path))


def read_definition(path: Path) -> bytes:
    """Return the bytes of the tokenizer.json that `path` is or holds."""
    path = path / JSON_NAME if (path / JSON_NAME).is_file() else path
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadTokenizer(
            f"{path} cannot be read ({error.strerror}); name a tokenizer.json, a folder that holds "
            "one, or bytes"
        ) from None
    _require_size(raw, str(path))
    return raw


def chunk_names(raw: bytes) -> tuple[str, ...]:
    """Return the hashes (hex) of the chunks as which a tokenizer's file travels."""
    return tuple(digest_of(chunk).hex() for chunk in file_chunks(raw))


def file_chunks(raw: bytes) -> list[memoryview]:
    """Return a file's bytes in chunks, all as large as chunks may be but the last."""
    whole = memoryview(raw)
    return [whole[at : at + MAX_CHUNK_BYTES] for at in range(0, len(raw), MAX_CHUNK_BYTES)]


def _require_size(raw: bytes, origin: str) -> None:
    if len(raw) > MAX_FILE_BYTES:
        raise BadTokenizer(
            f"{origin} has more than {MAX_FILE_BYTES:,} bytes; name a tokenizer's file"
        )


def _parsed(raw: bytes, origin: str) -> "FastTokenizer":
    """Return the library's tokenizer; what it would cut off, pad or match is switched off."""
    from tokenizers import Tokenizer as FastTokenizer  # late: it takes a while, and bytes need none

    _require_size(raw, origin)
    with _in_words(f"{origin} is not a tokenizer.json", "name the file of a fast tokenizer"):
        fast = FastTokenizer.from_str(raw.decode())
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True
    return fast


@contextmanager
def _in_words(
    what: str, remedy: str = "use another tokenizer, or a text without what it lacks"
) -> Iterator[None]:
    """Raise `BadTokenizer` for what the library raises: plain exceptions, and for files that it
    does not check, panics, which are no exceptions to Python."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise BadTokenizer(f"{what} ({str(error)[:200]}); {remedy}") from None
        raise


def _end(
    fast: "FastTokenizer", names: dict[str, int], wanted: int | str | None, origin: str
) -> int | None:
    """Return the id of the token that ends a document; None if nothing says which one does."""
    if isinstance(wanted, int):
        if not 0 <= wanted < MAX_VOCABULARY or fast.id_to_token(wanted) is None:
            raise BadTokenizer(f"{origin} has no token {wanted}; {_NAME_IT}")
        return wanted
    if wanted is not None:
        if wanted not in names:
            raise BadTokenizer(f"{origin} has no token {wanted[:100]!r}; {_NAME_IT}")
        return names[wanted]
    special = {
        token.content: place
        for place, token in fast.get_added_tokens_decoder().items()
        if token.special
    }
    return next((special[name] for name in END_NAMES if name in special), None)
