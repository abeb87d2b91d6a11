"""Planned paths in real processes: a trainer sends each microbatch where the manifest says."""

import pytest
from worlds.node_processes import BATCH, MODEL, SEQ, SEQUENCES, fallen

from farflock.node.run.manifest import resolve

pytestmark = [pytest.mark.net, pytest.mark.long]

STEPS = 20


def test_each_of_two_stages_has_half_of_the_microbatches_and_those_at_the_ends_all(run):
    total = STEPS * BATCH * SEQUENCES * SEQ
    manifest = resolve(
        {
            "run": {"name": "planned", "seed": 1, "total_tokens": total},
            "model": MODEL | {"layers": 4},
            "train": {"batch": SEQUENCES, "seq": SEQ, "lr": 1e-2, "clip": 0.0},
            "pipeline": {
                "stages": 4,
                "batch": BATCH,
                "policy": "planned",
                "plan": {"lanes": [["0:0 1:0 3:0", "0:0 2:0 3:1"]]},
            },
            "method": {"name": "ddp", "options": {}},
            "exchange": {"view_s": 1.0, "start_peers": 5},
        }
    )
    founder = run.found(manifest)
    servers = [
        run.join(f"server-{number}", "--role", f"stage:{stage}")
        for number, stage in enumerate((1, 2, 3, 3))
    ]
    for node in run.nodes:
        node.is_done()

    work = founder.status()["work"]
    assert (work["doubled"], work["in doubt"]) == (0, 0)
    assert work["microbatches"] > STEPS * BATCH // 2
    assert founder.status()["tokens"] >= total
    assert fallen(founder) > 0.5
    one, other, *last = (node.status()["work"]["merged"] for node in servers)
    whole = founder.status()["work"]["merged"]
    assert one + other == pytest.approx(whole, abs=3 * BATCH)
    assert one == pytest.approx(other, abs=2 * BATCH)
    assert min(last) > whole // 4, "both servers of the last stage are on a path"
