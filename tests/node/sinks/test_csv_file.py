"""`measures.csv` is read back as it was written, whatever happened to it meanwhile."""

import csv
import math
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.measured import measured, origin_in

from farflock.node.sinks.csv_file import FILE, CsvFile, head, read_measures, row_of
from farflock.node.sinks.measures import NAMES, Measures
from farflock.node.state import line_file

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = st.integers(0, 2**63 - 1)


def written(folder, *several):
    sink = CsvFile(origin_in(folder))
    for measures in several:
        sink.write(measures)
    sink.close()


def test_rows_are_read_back_in_order(tmp_path):
    several = [measured(step, loss=None if step == 2 else 1 / step) for step in range(1, 5)]
    written(tmp_path, *several[:2])
    written(tmp_path, *several[2:])
    assert read_measures(tmp_path) == several


def test_any_table_reader_reads_it(tmp_path):
    written(tmp_path, measured(5, loss=None))
    with (tmp_path / FILE).open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert tuple(row) == NAMES
    assert (row["step"], row["loss"], row["busy_share"]) == ("5", "", "0.75")


OF_TYPE = {
    int: COUNTS,
    float: FLOATS,
    int | None: st.none() | COUNTS,
    float | None: st.none() | FLOATS,
}


@given(
    st.builds(Measures, **{name: OF_TYPE[kind] for name, kind in get_type_hints(Measures).items()})
)
def test_a_row_has_every_bit(tmp_path_factory, measures):
    folder = tmp_path_factory.mktemp("rows")
    assert read_measures(folder) == []
    written(folder, measures)
    assert read_measures(folder) == [measures]


def test_a_loss_that_is_no_number_is_shown_as_it_is(tmp_path):
    written(tmp_path, measured(1, loss=math.nan), measured(2, loss=math.inf))
    first, second = read_measures(tmp_path)
    assert math.isnan(first.loss)
    assert second.loss == math.inf


def test_a_row_that_a_crash_cut_short_harms_no_other(tmp_path):
    written(tmp_path, measured(1))
    with (tmp_path / FILE).open("a") as file:
        file.write("1795419134.5,2,1.5,61")
    written(tmp_path, measured(3))
    assert [measures.step for measures in read_measures(tmp_path)] == [1, 3]


def test_what_is_no_number_is_left_out(tmp_path):
    written(tmp_path, measured(1))
    with (tmp_path / FILE).open("ab") as file:
        file.write(row_of(measured(2)).replace("61440", "many").encode() + b"\n\xff\xfe\n\n")
    written(tmp_path, measured(3))
    assert [measures.step for measures in read_measures(tmp_path)] == [1, 3]


def test_rows_of_another_version_are_kept_apart_and_read(tmp_path):
    theirs = [*NAMES, "smell"]
    (tmp_path / FILE).write_text(",".join(theirs) + "\n" + row_of(measured(1)) + ",rose\n")
    written(tmp_path, measured(2))
    assert (tmp_path / FILE).read_text().startswith(head() + "\n")
    assert read_measures(tmp_path) == [measured(1), measured(2)]


def test_the_files_stay_bounded_and_each_has_its_head(tmp_path, monkeypatch):
    monkeypatch.setattr(line_file, "FILE_BYTES", 1000)
    written(tmp_path, *map(measured, range(50)))
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["measures.1.csv", FILE]
    assert all(path.read_text().startswith(head() + "\n") for path in files)
    assert all(path.stat().st_size <= 1000 + len(head()) for path in files)
    assert read_measures(tmp_path)[-1] == measured(49)


def test_a_full_disk_leaves_no_half_row(tmp_path):
    (tmp_path / FILE).symlink_to("/dev/full")
    sink = CsvFile(origin_in(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        sink.write(measured())
