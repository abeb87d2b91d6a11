"""TensorBoard's own loader reads what we write, under the names that are everywhere."""

from pathlib import Path

import pytest
from worlds.measured import RUN, measured, origin_in

pytest.importorskip("tensorboard", reason="pip install -c constraints.txt -e '.[tensorboard]'")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter

from farflock.node.sinks import tensorboard_events
from farflock.node.sinks.measures import numbers
from farflock.node.sinks.tensorboard_events import TensorBoardEvents, folder_of


def written(folder, *several):
    sink = TensorBoardEvents(origin_in(folder))
    for measures in several:
        sink.write(measures)
    sink.close()


def scalars(folder):
    """All scalars of the files, as TensorBoard shows them: {name: [(step, time, value)]}."""
    seen = EventAccumulator(str(folder_of(origin_in(folder))))
    seen.Reload()
    return {
        tag: [(entry.step, entry.wall_time, entry.value) for entry in seen.Scalars(tag)]
        for tag in seen.Tags()["scalars"]
    }


def test_all_numbers_are_scalars_at_the_step_of_the_node(tmp_path):
    several = [measured(step, loss=None if step == 2 else 1 / step) for step in range(1, 5)]
    written(tmp_path, *several)
    found = scalars(tmp_path)
    assert found.keys() == numbers(measured()).keys()
    for name in found:
        expected = [
            (measures.step, measures.time_s, pytest.approx(numbers(measures)[name]))
            for measures in several
            if name in numbers(measures)
        ]
        assert found[name] == expected


def test_each_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    sink = TensorBoardEvents(origin_in(tmp_path))
    sink.write(measured(1))
    (path,) = folder_of(origin_in(tmp_path)).iterdir()
    assert [event.step for event in EventFileLoader(str(path)).Load()] == [0, 1, 1]


def test_the_files_of_a_run_are_one_run_and_steps_that_are_made_again_replace_the_first(tmp_path):
    written(tmp_path, measured(1, loss=3.0), measured(2, loss=2.0), measured(3, loss=1.5))
    written(tmp_path, measured(2, time_s=1_795_419_999.0, loss=2.5))
    assert folder_of(origin_in(tmp_path)).name == RUN[:8]
    assert [(step, loss) for step, _, loss in scalars(tmp_path)["loss"]] == [(1, 3.0), (2, 2.5)]


def test_a_full_disk_is_an_error_and_not_half_an_event(tmp_path, monkeypatch):
    full = Path("/dev/full").open("wb")  # noqa: SIM115 - the sink closes it
    monkeypatch.setattr(tensorboard_events, "_new_file", lambda *_: RecordWriter(full))
    sink = TensorBoardEvents(origin_in(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        sink.write(measured())
