"""Measures as event files for TensorBoard, below `tensorboard/` in the node's folder.

The files of a run are in one folder, which TensorBoard shows as one run; each start of a node adds
a file.
"""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from farflock.node.sinks.feed import OpenSink, Origin
from farflock.node.sinks.measures import Measures, numbers

FOLDER = "tensorboard"
SHOWN = 8  # characters of a run's id


def folder_of(origin: Origin) -> Path:
    """Return the folder of a run's files."""
    return origin.folder / FOLDER / origin.run[:SHOWN]


def chosen() -> OpenSink:
    """Return the sink's opener."""
    return TensorBoardEvents


class TensorBoardEvents:
    """The sink. The step of a scalar is the node's own. From the first step of a file on, it
    replaces the files before it: after a crash, steps are made again."""

    def __init__(self, origin: Origin) -> None:
        self._folder = folder_of(origin)
        self._records: RecordWriter | None = None

    def write(self, measures: Measures) -> None:
        """Append one event with all scalars; it is in the file when this returns."""
        step, time_s = measures.step, measures.time_s
        if self._records is None:
            self._records = _new_file(self._folder, time_s)
            self._append(Event(wall_time=time_s, file_version="brain.Event:2"))
            begins = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=time_s, step=step, session_log=begins))
        scalars = [
            Summary.Value(tag=name, simple_value=value) for name, value in numbers(measures).items()
        ]
        self._append(Event(wall_time=time_s, step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Close the file."""
        if self._records is not None:
            self._records.close()

    def _append(self, event: Event) -> None:
        assert self._records is not None
        self._records.write(event.SerializeToString())
        self._records.flush()


def _new_file(folder: Path, time_s: float) -> RecordWriter:
    folder.mkdir(parents=True, exist_ok=True)
    return RecordWriter((folder / f"events.out.tfevents.{time_s:.3f}.farflock").open("xb"))
