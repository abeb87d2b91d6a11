"""Documents of tables: parquet files, folders of Hugging Face's `datasets`, and streams from its
hub. The packages that read them come with the extra `data`.
"""

import importlib
from collections.abc import Iterator
from typing import Any

from farflock.node.data.documents import (
    BadDocuments,
    Part,
    ReadingOptions,
    refused_document,
    text_parts,
)
from farflock.node.data.sources import HUB_PREFIX, SourceFile
from farflock.node.errors import Failure

BATCH_ROWS = 64  # decoded at a time


def read_columns(file: SourceFile, options: ReadingOptions) -> Iterator[Part]:
    """Yield the texts of a table's column, a document a row; raise `BadDocuments` for a table that
    is damaged or has no such column, and `Failure` if a package is missing."""
    if file.kind == "hub":
        yield from _hub(file, options)
        return
    arrow = _package("pyarrow")
    rows = _parquet if file.kind == "parquet" else _arrow
    try:
        for number, value, at in rows(file, options):
            yield from _row(file.path, number, _plain(value), options, at)
    except (arrow.ArrowException, OSError) as error:
        said = str(error).partition("\n")[0][:200].rstrip(".")
        raise BadDocuments(
            f"{file.path} cannot be read as {file.kind} ({said}); copy it again"
        ) from None


def hub_size(place: str, split: str) -> int:
    """Return the bytes of `hf:NAME` as the hub tells them, 0 if it does not; raise `Failure` if it
    cannot be reached or has no such data."""
    datasets = _package("datasets")
    name, configuration = _hub_name(place)
    try:
        splits = datasets.load_dataset_builder(name, configuration).info.splits or {}
    # The errors of that library, of those below it and of the network have no common class.
    except Exception as error:
        raise _unreachable(place, error) from error
    return int(splits[split].num_bytes or 0) if split in splits else 0


def _row(path: str, number: int, value: object, options: ReadingOptions, at: int) -> Iterator[Part]:
    if isinstance(value, str):
        yield from text_parts(value, at)
        return
    problem = (
        "is not UTF-8" if isinstance(value, UnicodeDecodeError) else f"is {type(value).__name__}"
    )
    yield refused_document(
        f"{path}, row {number:,}: the field {options.field!r} {problem}, no text;"
        " name another one with --field",
        options,
        at,
    )


def _plain(value: Any) -> object:  # noqa: ANN401 - a scalar of pyarrow
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return error


def _parquet(file: SourceFile, options: ReadingOptions) -> Iterator[tuple[int, Any, int]]:
    parquet = _package("pyarrow.parquet")
    names = options.field.split(".")
    with parquet.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False) as table:
        _require_column(file, names, table.schema_arrow)
        rows, number = max(1, table.metadata.num_rows), 0
        for batch in table.iter_batches(BATCH_ROWS, columns=[options.field], use_threads=False):
            for value in _column(batch, names):
                number += 1
                yield number, value, file.size * number // rows


def _arrow(file: SourceFile, options: ReadingOptions) -> Iterator[tuple[int, Any, int]]:
    arrow, ipc = _package("pyarrow"), _package("pyarrow.ipc")
    names, number = options.field.split("."), 0
    with arrow.OSFile(file.path, "rb") as stream:
        schema = ipc.open_stream(stream).schema
        _require_column(file, names, schema)
        stream.seek(0)
        wanted = ipc.IpcReadOptions(included_fields=[schema.get_field_index(names[0])])
        for batch in ipc.open_stream(stream, options=wanted):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for value in _column(batch.slice(start, BATCH_ROWS), names):
                    number += 1
                    yield number, value, min(stream.tell(), file.size)


def _require_column(file: SourceFile, names: list[str], schema: Any) -> None:  # noqa: ANN401
    types = _package("pyarrow.types")
    fields, found = schema, None
    for name in names:
        place = -1 if fields is None else fields.get_field_index(name)
        if place < 0:
            shown = ", ".join(schema.names)[:200]
            raise BadDocuments(
                f"{file.path} has no column {'.'.join(names)!r}; name one with --field: {shown}"
            )
        found = fields.field(place).type
        fields = found if types.is_struct(found) else None


def _column(batch: Any, names: list[str]) -> Any:  # noqa: ANN401 - pyarrow's
    column = batch.column(names[0])
    return _package("pyarrow.compute").struct_field(column, names[1:]) if names[1:] else column


def _hub(file: SourceFile, options: ReadingOptions) -> Iterator[Part]:
    datasets = _package("datasets")
    name, configuration = _hub_name(file.path)
    number = 0
    rows = _hub_rows(datasets, file.path, name, configuration, options)
    for number, row in enumerate(rows, 1):
        value: object = row
        for member in options.field.split("."):
            value = value.get(member) if isinstance(value, dict) else None
        yield from _row(file.path, number, value, options, 0)


def _hub_rows(
    datasets: Any,  # noqa: ANN401 - a module
    place: str,
    name: str,
    configuration: str | None,
    options: ReadingOptions,
) -> Iterator[dict[str, Any]]:
    try:
        yield from datasets.load_dataset(name, configuration, split=options.split, streaming=True)
    except Exception as error:  # as above
        raise _unreachable(place, error) from error


def _hub_name(place: str) -> tuple[str, str | None]:
    name, _, configuration = place.removeprefix(HUB_PREFIX).partition(":")
    return name, configuration or None


def _unreachable(place: str, error: Exception) -> Failure:
    said = " ".join(str(error).split())[:300].rstrip(".")
    return Failure(
        f"{place} cannot be read", said, "check the name, --split and the network, and start again"
    )


def _package(name: str) -> Any:  # noqa: ANN401 - a module without types
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Failure(
            "this source cannot be read",
            f"the package {name.partition('.')[0]} is missing",
            'pip install "farflock[data]"',
        ) from None
