"""Real processes train on prepared data that each has in a folder of its own."""

import json
import random
import shutil
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import recorded
from recorded import hash_of, lives
from worlds.node_processes import BATCH, COMMAND, FOREVER, MODEL, ROOT, SEQ, SEQUENCES
from worlds.prepared import prepared
from worlds.waiting import output_of, until_real

from farflock.node.data.cursor import BadCursor, read_cursor
from farflock.node.data.folder import PreparedFolder
from farflock.node.data.samples import FolderShards, SampleReader, Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.run.manifest import resolve
from farflock.node.state.sample_position import SamplePosition

pytestmark = pytest.mark.net

MANIFEST = {
    "run": {"name": "prepared", "seed": 1, "total_tokens": FOREVER * SEQUENCES * SEQ},
    "model": {"preset": "tiny"},
    "train": {"batch": SEQUENCES, "seq": SEQ},
    "method": {"name": "diloco", "options": {"period": 4}},
    "exchange": {"view_s": 1.0, "start_peers": 2, "deadline_s": 10.0},
}


@pytest.fixture
def folders(tmp_path):
    """The founder's folder of prepared data, and a volunteer's copy of it."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(200):
        (texts / f"{number}.txt").write_text(f"text {number} of many, " * 20)
    content = prepared(texts, tmp_path / "prepared", held_out=0.1).content
    shutil.copytree(content.folder, tmp_path / "copy")
    return content.folder, tmp_path / "copy"


def reader_of(peer, folder):
    """A reader of a peer's samples, as the run has them."""
    text = Text((FolderShards(PreparedFolder(folder)),), (1.0,))
    return SampleReader(text, SampleStream(1, peer), SEQ + 1)


def drawn(node, run, peer, folder):
    """How many samples of a node rounds have counted, by its file."""
    name = reader_of(peer, folder).fingerprint
    try:
        return read_cursor(SamplePosition(node.folder, run).read(), name, 1).drawn
    except BadCursor:
        return 0  # there is none yet


def founded(run, folders, **terms):
    """Start a run of two on prepared data; return its founder."""
    run.brake(0.02)
    manifest = resolve(MANIFEST | terms, prepared=folders[:1])
    (run.folder / "run.toml").write_bytes(manifest.canonical())
    founder = run.start("founder", "run", run.folder / "run.toml", "--data", folders[0])
    run.invite = founder.reaches(lambda status: status["invite"])["invite"]
    return founder


def test_a_killed_volunteer_goes_on_after_its_last_round(run, folders):
    founder = founded(run, folders)
    mine = run.join("mine", "--data", folders[1])
    status = mine.comes_in()
    who = status["run"], status["peer"], folders[1]
    until_real(lambda: drawn(mine, *who) >= 16, "two rounds", mine.told)
    mine.kill()
    before = drawn(mine, *who)
    assert before % SEQUENCES == 0, "whole steps"

    again = run.join("mine", "--data", folders[1])
    again.comes_in()
    until_real(lambda: drawn(again, *who) > before, "another round", again.told)
    again.leaves()
    founder.leaves()


def evaluations(node, by):
    """The losses that a node knows of a member's evaluations, by round."""
    found = [event for event in node.events("evaluation") if event["by"] == by]
    return {event["round"]: event["loss"] for event in found}


def test_a_volunteer_with_an_empty_disk_trains_and_evaluates_and_a_visitor_sees_the_data(
    run, folders, monkeypatch, nursery
):
    home = run.folder / "home"
    monkeypatch.setenv("FARFLOCK_HOME", str(home))
    founder = founded(run, folders, evaluation={"every": 1, "sequences": 16})
    mine = run.join("mine")
    status = mine.comes_in()
    who = status["run"], status["peer"], folders[0]
    until_real(lambda: drawn(mine, *who) >= 16, "two rounds", mine.told)
    content = PreparedFolder(folders[0])
    names = {
        split: {content.place(split, n).digest.hex() for n in range(content.shards(split))}
        for split in ("train", "held-out")
    }
    by = status["peer"]

    def known():
        return evaluations(mine, by).keys() & evaluations(founder, by).keys()

    until_real(lambda: len(known()) >= 2, "two of its evaluations at both", mine.told)
    for number in known():
        assert evaluations(mine, by)[number] == evaluations(founder, by)[number]
    seen = mine.reaches(lambda status: status["evaluation"])
    assert not seen["evaluation"]["difference"], "both measured the same text"
    assert not seen["data"]["held_out_missing"]
    fetched = {path.name for path in (home / "data" / "shards").glob("*/*")}
    assert fetched & names["train"]
    assert fetched >= names["held-out"]
    assert (home / "data" / "index" / content.root).is_file()

    words = [*COMMAND, "data", "show", run.invite, "--json"]
    said = output_of(nursery.popen(words, cwd=ROOT, stdout=subprocess.PIPE), "the visitor")
    shown = json.loads(said.splitlines()[-1])
    assert [source["root"] for source in shown["sources"]] == [content.root]
    assert len(shown["samples"]) == 5
    assert all(" of many, text " in sample["text"] for sample in shown["samples"])
    mine.leaves()
    founder.leaves()


def test_a_trainer_of_a_pipeline_with_an_empty_disk_trains_on_data_from_members(
    run, folders, monkeypatch
):
    manifest = resolve(
        {
            **MANIFEST,
            "model": MODEL,
            "pipeline": {"stages": 2, "batch": BATCH},
            "method": {"name": "ddp", "options": {}},
            "exchange": {"view_s": 1.0, "start_peers": 3},
        },
        prepared=folders[:1],
    )
    (run.folder / "run.toml").write_bytes(manifest.canonical())
    monkeypatch.setenv("FARFLOCK_HOME", str(run.folder / "founders"))
    founder = run.start("founder", "run", run.folder / "run.toml", "--data", folders[0])
    run.invite = founder.reaches(lambda status: status["invite"])["invite"]
    monkeypatch.setenv("FARFLOCK_HOME", str(run.folder / "servers"))
    server = run.join("server", "--role", "stage:1")
    monkeypatch.setenv("FARFLOCK_HOME", str(run.folder / "trainers"))
    trainer = run.join("trainer", "--role", "trainer")
    server.comes_in()  # who is told to leave before has nothing to leave
    seen = trainer.reaches(lambda status: status["work"].get("microbatches", 0) > BATCH)
    assert seen["data"]["fetched_bytes"] > 0
    assert seen["data"]["seen"] > 0
    content = PreparedFolder(folders[0])
    names = {content.place("train", n).digest.hex() for n in range(content.shards("train"))}
    kept = {path.name for path in (run.folder / "trainers" / "data" / "shards").glob("*/*")}
    assert kept & names
    for node in (trainer, server, founder):
        node.leaves()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_twenty_times_it_reads_on_at_the_first_sample_that_no_round_has_counted(
    run, folders
):
    """Killed while it joins, before its first round, within a round, or after some."""
    chance, command = random.Random(45), (sys.executable, recorded.__file__)
    founder, begun = founded(run, folders), [0]
    for _ in range(20):
        mine = run.join("mine", "--data", folders[1], command=command)
        if chance.random() < 0.8:
            status = mine.comes_in()
            who = status["run"], status["peer"], folders[1]
            rounds = chance.randrange(3)
            until_real(
                lambda: drawn(mine, *who) >= begun[-1] + 4 * SEQUENCES * rounds,  # noqa: B023 - read at once
                f"{rounds} rounds",
                mine.told,
            )
        time.sleep(chance.random())
        mine.kill()
        begun.append(drawn(mine, *who))
    founder.leaves()
    reader = reader_of(who[1], folders[1])
    found = list(lives(mine.folder / "samples"))
    assert len(found) == 20
    assert len(set(begun)) > 5, begun
    for life, first, counted in zip(found, begun, begun[1:], strict=False):
        assert not life or life[0][0] == first, "where the life before had counted up to"
        assert all(one[0] + one[1] == other[0] for one, other in pairwise(life))
        assert first <= counted <= (life[-1][0] + life[-1][1] if life else first)
        for number, count, hashed in life:
            assert hash_of(reader.read(number, count)) == hashed
