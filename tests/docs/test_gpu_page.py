"""The page of measurements on a GPU is made from the benchmark's lines alone."""

import json
import sys
from pathlib import Path

import pytest
from worlds.waiting import completed

pytestmark = pytest.mark.net

SCRIPT = Path(__file__).parents[2] / "docs" / "make_gpu_page.py"
LINE = {
    **{"metric": "gpu.mfu", "value": 0.5, "yardstick": 0.51234, "ratio": 0.98, "n": 5},
    **{"load": 0.1, "unit": "of the products", "note": "a | b"},
}


@pytest.fixture
def made(nursery, tmp_path):
    """A function that makes the page of these lines, in a fork."""

    def make(*lines, before=()):
        script = tmp_path / SCRIPT.name
        script.write_text(SCRIPT.read_text())
        files = []
        for number, some in enumerate([before, lines] if before else [lines]):
            files.append(tmp_path / f"{number}.jsonl")
            files[-1].write_text("".join(json.dumps(line) + "\n" for line in some))
        paths = map(str, files)
        command = [sys.executable, str(script), *paths, "--commit", "abc", "--date", "2026-01-02"]
        return completed(command, nursery.run, capture_output=True, text=True)

    return make


def test_each_metric_is_a_row_with_the_device_and_the_commit(made, tmp_path):
    assert made(LINE, {"failed": "gpu.overlap"}).returncode == 0
    page = (tmp_path / "benchmarks-gpu.md").read_text()
    assert ", commit abc, 2026-01-02." in page
    assert "| gpu.mfu | 0.5 | 0.5123 | 0.98 | 5 | of the products | a \\| b |" in page
    assert page.count("\n| ") == 3


def test_of_several_files_each_metrics_last_line_counts(made, tmp_path):
    older = [LINE | {"value": 0.4}, LINE | {"metric": "gpu.overlap"}]
    assert made(LINE, before=older).returncode == 0
    page = (tmp_path / "benchmarks-gpu.md").read_text()
    assert "| gpu.mfu | 0.5 |" in page
    assert "| gpu.overlap |" in page
    assert "0.4" not in page
    assert page.count("\n| ") == 4


def test_without_a_metric_the_page_stays(made, tmp_path):
    done = made({"failed": "gpu"})
    assert done.returncode == 1
    assert "has no metric" in done.stderr
    assert not (tmp_path / "benchmarks-gpu.md").exists()
