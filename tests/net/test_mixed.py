"""A full replica and a pipeline of small nodes train one model in real processes.

Whichever of them is killed, the others take over its part.
"""

import pytest
from worlds.node_processes import described, fallen, one_state

pytestmark = pytest.mark.net
STAGES = 2
HELD_S = 3.0  # a step while nobody has noticed a kill, so that the run outlasts any machine's delay


def found(run, manifest, role):
    """As `Run.found`, by a founder of this role."""
    (run.folder / "run.toml").write_bytes(manifest.canonical())
    founder = run.start("founder", "run", run.folder / "run.toml", "--role", role)
    run.invite = founder.reaches(lambda status: status["invite"])["invite"]
    return founder


def begun(run, steps):
    """A replica that founds, a server of each of two stages, a trainer; slow until told."""
    run.brake(0.3)
    manifest = described(4, steps, stages=STAGES)
    founder = found(run, manifest, "replica")
    servers = [run.join(f"server-{stage}", "--role", f"stage:{stage}") for stage in range(STAGES)]
    return manifest.run.total_tokens, founder, servers, run.join("trainer", "--role", "trainer")


def all_counted_once(*nodes):
    for node in nodes:
        work = node.status()["work"]
        assert (work["doubled"], work["in doubt"]) == (0, 0)
        assert work["microbatches"] > 0


def test_a_replica_keeps_the_stage_of_its_pipeline_whose_only_server_is_killed(
    run,
):
    total, replica, servers, trainer = begun(run, 80)
    replica.reaches(lambda status: status["tokens"] >= total // 10)
    servers[1].kill()
    run.brake(HELD_S)
    left = trainer.reaches(lambda status: len(status["members"]) == 3)
    before = replica.status()["work"]
    run.brake(0.0)
    for node in (replica, servers[0], trainer):
        node.is_done()

    assert left["tokens"] < total
    assert (replica.status()["role"], replica.status()["tokens"] >= total) == ("replica", True)
    assert {partner["role"] for partner in left["partners"]} == {"replica", "stage:0"}
    all_counted_once(replica, trainer)
    assert replica.status()["work"]["backward"] > before["backward"], (
        "the trainer did not go on through it"
    )
    assert fallen(replica) > 0.5
    assert one_state([replica.saved(0), servers[0].saved(0)])
    assert all(replica.saved(stage).meta["tokens"] >= total for stage in range(STAGES))
    assert {entry["peers"] for entry in replica.events("round")} >= {1, 2}, (
        "no round was with a server, or none without"
    )


@pytest.mark.long
def test_a_founding_replica_that_is_killed_comes_back_to_the_state_that_the_others_have(run):
    total, founder, servers, trainer = begun(run, 200)
    killed = founder.reaches(lambda status: status["tokens"] >= total // 10)
    founder.kill()
    run.brake(HELD_S)
    trainer.reaches(lambda status: len(status["members"]) == 3)
    again = run.start("founder", "run", run.folder / "run.toml", "--role", "replica")
    again.comes_in()
    run.brake(0.0)
    for node in (again, *servers, trainer):
        node.is_done()

    assert again.status()["peer"] == killed["peer"]
    assert [entry["role"] for entry in again.events("joined")] == ["replica"], (
        "it went on by itself"
    )
    all_counted_once(again, trainer)
    for stage in range(STAGES):
        assert one_state([again.saved(stage), servers[stage].saved(stage)])
