"""The speed of preparing data, beside that of the tokenizer alone on the same files and cores.

The yardstick reads each file and gives it to `encode_batch` of the package `tokenizers`, 256 at a
time. Preparing reads, checks, hashes, tokenizes, sorts and writes the same. The files are those of
Python's library and of the packages beside it.
"""

import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load, medians, turns
from farflock.node.data.prepare import Preparation, PrepareOptions
from farflock.node.data.sources import find_files
from farflock.node.machine import usable_cores
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

AT_ONCE = 256  # files
ENDINGS = (".py", ".txt", ".md", ".rst", ".pyi", ".h", ".hpp")


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of files to prepare, those of them that the tokenizer is learned from, and its
    tokens."""

    text_bytes: int = 1_000_000_000
    learned_bytes: int = 20_000_000
    vocabulary: int = 32_768


QUICK = Size(300_000, 100_000, 500)


def run(options: Options) -> Iterator[Metric]:
    """Yield `data.prepare`."""
    if options.wants("data.prepare"):
        yield _prepare(QUICK if options.quick else Size(), options.repeats)


def _prepare(size: Size, repeats: int) -> Metric:
    paths = list(_texts(size.text_bytes))
    total = sum(path.stat().st_size for path in paths)
    if not paths:
        raise NotMeasured("there are no texts beside Python's library")
    raw = train_tokenizer(_learned(paths, size.learned_bytes), size.vocabulary)
    pairs = turns(repeats, lambda: _prepared(paths, raw), lambda: _tokenized(paths, raw))
    rates = [(total / ours_s / 1e6, total / theirs_s / 1e6) for ours_s, theirs_s in pairs]
    value, yardstick, ratio = medians(rates)
    note = f"{total / 1e6:,.0f} MB in {len(paths):,} files, a vocabulary of {size.vocabulary:,}"
    return Metric("data.prepare", value, yardstick, ratio, len(pairs), load(), "MB/s", note)


def _prepared(paths: Sequence[Path], raw: bytes) -> None:
    """Prepare the files in a folder of their own."""
    found = find_files([str(path) for path in paths])
    with tempfile.TemporaryDirectory() as folder:
        made = Preparation(found.files, JsonTokenizer(raw), PrepareOptions(), Path(folder) / "data")
        made.run(
            cores=usable_cores(),
            clock=time.monotonic,
            progress=lambda share: None,
            say=lambda text: None,
        )


def _tokenized(paths: Sequence[Path], raw: bytes) -> None:
    """Tokenize the files, and nothing else."""
    tokenizer = Tokenizer.from_str(raw.decode())
    for start in range(0, len(paths), AT_ONCE):
        texts = [path.read_bytes().decode() for path in paths[start : start + AT_ONCE]]
        tokenizer.encode_batch(texts, add_special_tokens=False)


def _texts(limit: int) -> Iterator[Path]:
    """Yield files of UTF-8, up to a number of bytes in all."""
    size = 0
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib"))
    for folder in folders:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix not in ENDINGS or not path.is_file() or not path.stat().st_size:
                continue
            try:
                path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            size += path.stat().st_size
            if size > limit:
                return
            yield path


def _learned(paths: Sequence[Path], limit: int) -> Iterator[str]:
    """Yield texts from everywhere among the files, about as many bytes as are wanted."""
    total = sum(path.stat().st_size for path in paths)
    for path in paths[:: max(1, total // limit)]:
        yield path.read_bytes().decode()
