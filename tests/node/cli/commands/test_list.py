"""`farflock list` shows the runs of this user, for people and for programs."""

import json
import os
from datetime import datetime

RUN = "ab" * 16


def test_it_shows_each_run_with_its_folder_and_how_far_it_is(farflock, stopped):
    code, out, _ = farflock("list")
    assert (code, out) == (
        0,
        "there is none yet; begin with `farflock join INVITE` or `farflock run MANIFEST`\n",
    )
    folder = stopped(RUN)
    os.utime(folder / "status.json", (1e9, 1e9))
    _, out, _ = farflock("list")
    seen = f"{datetime.fromtimestamp(1e9):%Y-%m-%d %H:%M}"
    assert out.splitlines()[1].split() == [
        *("abababab", "a", "run", "stopped", "50.0%"),
        *seen.split(),
        str(folder),
    ]
    (found,) = json.loads(farflock("list", "--json")[1])["runs"]
    assert found == {
        "run": RUN,
        "name": "a run",
        "folder": str(folder),
        "pid": None,
        "doing": "trains",
        "tokens": 640,
        "total_tokens": 1280,
        "seen_s": 1e9,
    }
