"""The texts in a column of a table: Parquet, or the Arrow files in a folder of `datasets`.

`Dataset.save_to_disk` writes streams of Arrow, and Feather is a file of Arrow; both end in .arrow.
They are read a batch of rows at a time by pyarrow, which the extra `data` brings. A page of Parquet
and a compressed batch of Arrow are in memory as a whole, however large their writer made them.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from farflock.node.data.sources import SourceFile
from farflock.node.extras import require

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

MAX_CELL_BYTES = 64 << 20
BATCH_ROWS, BATCH_BYTES = 64, 64 << 20  # at most; a batch with longer texts has fewer rows
_FILE_MARK = b"ARROW1"


class BadTable(ValueError):
    """A file whose next rows cannot be read; the message says why, and the remedy."""


class TableRow(NamedTuple):
    """A row's text, and how far the file is read; or, without a text, what is wrong."""

    text: bytes | None
    read_bytes: int
    fault: str = ""


def require_reader(path: str) -> None:
    """Raise `Usage` if nothing here reads tables."""
    require(path, "pyarrow")


def read_rows(file: SourceFile, field: str) -> Iterator[TableRow]:
    """Yield the rows of a table; raise `BadTable` where that ends before its end. Dots are between
    the names of a nested `field`."""
    import pyarrow

    rows = 0
    try:
        for array, read_bytes in _batches(file, field):
            for scalar in array:
                yield _row(scalar, read_bytes)
            rows += len(array)
    except (pyarrow.ArrowException, OSError) as error:
        why = str(error).partition("\n")[0]
        raise BadTable(f"it is cut or damaged after row {rows:,} ({why}); copy it") from None


def _batches(file: SourceFile, field: str) -> "Iterator[tuple[pyarrow.Array, int]]":
    """Yield the column of each batch as bytes, and how far the file is read after it."""
    with contextlib.ExitStack() as stack:
        if file.path.lower().endswith(".parquet"):
            from pyarrow.parquet import ParquetFile

            table = stack.enter_context(ParquetFile(file.path))
            _require_column(table.schema_arrow, field)
            rows, done = max(1, table.metadata.num_rows), 0
            for batch in table.iter_batches(rows_at_once(table, field), columns=[field]):
                done += len(batch)
                yield _column(batch, field), done * file.size // rows
            return
        from pyarrow import ipc, memory_map

        raw = stack.enter_context(memory_map(file.path))
        if raw.read(len(_FILE_MARK)) == _FILE_MARK:
            saved = ipc.open_file(raw)
            batches = (saved.get_batch(place) for place in range(saved.num_record_batches))
        else:
            raw.seek(0)
            saved = batches = ipc.open_stream(raw)
        _require_column(saved.schema, field)
        for batch in batches:
            yield _column(batch, field), min(raw.tell(), file.size)


def rows_at_once(table: "ParquetFile", field: str) -> int:
    """Return how many rows of average length are a batch."""
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    column_bytes: int = sum(
        column.total_uncompressed_size for column in columns if column.path_in_schema == field
    )
    rows: int = table.metadata.num_rows
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(1, column_bytes)))


def _require_column(schema: "pyarrow.Schema", field: str) -> None:
    from pyarrow import types

    kind, names = schema, schema.names
    for name in field.split("."):
        if name not in names:
            there = ", ".join(names[:10])
            raise BadTable(f"it has no column {field!r} (it has {there}); name one with --field")
        kind = kind.field(name).type
        names = [kind.field(n).name for n in range(kind.num_fields)] if _nests(kind) else []
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise BadTable(f"its column {field!r} is {kind}, no text; name another with --field")


def _nests(kind: "pyarrow.DataType") -> bool:
    from pyarrow import types

    return bool(types.is_struct(kind))


def _column(batch: "pyarrow.RecordBatch", field: str) -> "pyarrow.Array":
    import pyarrow

    first, *nested = field.split(".")
    array = batch.column(batch.schema.names.index(first))
    for name in nested:
        array = pyarrow.compute.struct_field(array, name)
    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(
        pyarrow.large_binary()
    )  # what is no UTF-8 is no error, but a row without text


def _row(scalar: "pyarrow.LargeBinaryScalar", read_bytes: int) -> TableRow:
    raw = scalar.as_buffer()
    if raw is None:
        return TableRow(None, read_bytes, "it has no text; correct the row")
    if raw.size > MAX_CELL_BYTES:
        fault = f"its text is longer than {MAX_CELL_BYTES >> 20} MiB; cut the document"
        return TableRow(None, read_bytes, fault)
    text = raw.to_pybytes()
    try:
        text.decode()
    except UnicodeDecodeError:
        return TableRow(None, read_bytes, "its text is no UTF-8; correct the row")
    return TableRow(text, read_bytes)
