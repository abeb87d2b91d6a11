"""Shards come from the web where no member has them; who serves others is asked no more."""

import asyncio

import pytest
from worlds.prepared import prepared

from farflock.node.data.local_shards import table_of
from farflock.node.data.web_folder import BadWebFolder, ShardFiles
from farflock.node.process.web_shards import ANSWER_S, REST_S, WebShards
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import run_virtual


class Folder:
    """A copy on the web; `false` shards or an error may come instead."""

    def __init__(self, content, root=None, error=None, false=False):
        table = table_of(content)
        files = ShardFiles(table)
        self.root, self.url, self.error, self.false = root or table.root, "https://a", error, false
        self.raw = {files.place(n): content.raw(*table.place(n)) for n in range(len(table))}
        self.asked = 0

    def read_root(self):
        return self.root

    def range(self, name, offset, size):
        self.asked += 1
        if self.error is not None:
            raise self.error
        raw = self.raw[name, offset]
        assert len(raw) == size
        return bytes(size) if self.false else raw


@pytest.fixture
def content(small, texts, tmp_path):
    return prepared(texts, tmp_path / "out", held_out=0.1).content


def fetched(content, *folders, roots=(), times=1, pause_s=0.0):
    """What comes of shard 0 at last."""

    async def main():
        table = table_of(content)
        web = WebShards(folders, {table.root, *roots}, inline)
        for _ in range(times):
            found = await web.fetch(table, 0)
            await asyncio.sleep(pause_s)
        assert web.fetched_bytes == (0 if found is None else times * len(found))
        return found

    return run_virtual(main())


def test_a_shard_comes_from_a_server_that_serves(content, caplog):
    broken = Folder(content, error=BadWebFolder("it is away"))
    assert fetched(content, broken, Folder(content), times=3) == content.raw("train", 0)
    assert broken.asked == 1, "it rests"
    assert [each.getMessage() for each in caplog.records] == ["data from the web: it is away"]


def test_a_server_that_failed_is_asked_again_after_a_rest(content):
    broken = Folder(content, error=BadWebFolder("it is away"))
    assert fetched(content, broken, times=2, pause_s=REST_S) is None
    assert broken.asked == 2


def test_who_serves_a_false_shard_is_asked_no_more(content, caplog):
    liar = Folder(content, false=True)
    assert fetched(content, liar, times=2, pause_s=2 * REST_S) is None
    assert liar.asked == 1
    assert "https://a sent a false copy of" in caplog.text


def test_a_copy_of_another_source_is_passed_over_and_one_of_other_data_named(content, caplog):
    assert fetched(content, Folder(content, root="ab" * 32), roots=["ab" * 32]) is None
    assert not caplog.records
    assert fetched(content, Folder(content, root="cd" * 32)) is None
    assert "https://a has the data cdcdcdcdcdcdcdcd…, on which the run does not" in caplog.text


def test_a_server_that_never_ends_its_answer_is_waited_for_only_so_long(content, caplog):
    async def endless(work):
        await asyncio.Event().wait()

    async def main():
        folder, began_s = Folder(content), asyncio.get_running_loop().time()
        shards = WebShards([folder], {folder.root}, endless)
        assert await shards.fetch(table_of(content), 0) is None
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(ANSWER_S)
        assert await shards.fetch(table_of(content), 0) is None  # it rests
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(ANSWER_S)

    run_virtual(main())
    assert caplog.text.count("has no answer after") == 1
