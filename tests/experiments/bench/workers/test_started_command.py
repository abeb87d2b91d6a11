"""The command that is measured is the real one, and its first word is noted once."""

import io
import json

from farflock.experiments.bench.workers.started_command import Watched, note


def test_the_first_word_on_either_stream_is_noted_and_no_other(tmp_path):
    notes, inner = tmp_path / "notes.json", io.StringIO()
    out, err = Watched(inner, notes), Watched(inner, notes)
    assert not notes.exists()
    assert err.write("warning\n") == 8
    out.write("a line\n")
    out.flush()
    assert inner.getvalue() == "warning\na line\n"
    ((cpu_s, modules, torch),) = [json.loads(line) for line in notes.read_text().splitlines()]
    assert cpu_s > 0
    assert modules > 10
    assert isinstance(torch, bool)
    note(notes)  # as at the end
    assert len(notes.read_text().splitlines()) == 2
