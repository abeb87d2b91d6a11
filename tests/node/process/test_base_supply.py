"""A base comes to whoever needs it, once, whole and with the right weights; and it is lent on."""

import asyncio
import collections
import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from worlds.chunk_net import Net, in_virtual_time
from worlds.folders.model_folder import SMALL, weights_of, write_model
from worlds.waiting import now, until

from farflock.node.data.base_index import index_of, read_base_index
from farflock.node.data.index import PIECE_BYTES, BadIndex, root_of
from farflock.node.data.local_data import Arrival, LocalData, partial_of
from farflock.node.errors import Failure, RefusedByRun
from farflock.node.process import base_supply as module
from farflock.node.process.base_supply import BaseSupply, base_supply_of
from farflock.node.process.data_fetch import DataFetcher
from farflock.node.process.network import CacheOptions, MachineOptions
from farflock.node.run.model_section import ModelSection
from farflock.node.state.paths import RunFolder
from farflock.node.state.weights_file import WeightsFolder
from farflock.swarm.compute import Worker, inline

CONFIG = msgspec.structs.replace(SMALL, vocab_size=120_000)  # an embedding of several pieces
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    coarse = {name: x.bfloat16().float() for name, x in weights_of(CONFIG).items()}
    made = write_model(folder / "base", CONFIG, shards=2, weights=coarse)
    (made / "tokenizer.json").write_bytes(b"{}")
    write_model(folder / "bf16", CONFIG, shards=1, dtype=torch.bfloat16, weights=coarse)
    write_model(folder / "other", CONFIG, shards=2, seed=5)
    return made


class Bases:
    """The bases of several nodes on one simulated network."""

    def __init__(self, net, model, tmp_path):
        self.net, self.model, self.tmp_path = net, model, tmp_path
        self.start = WeightsFolder(model, CONFIG).hash
        raw = index_of(model)
        self.root, self.index = root_of(raw), read_base_index(raw, "it")
        self.members = []

    def supply(self, name, *folders, cache=None, start=None, root=None, work=inline):
        """The supply of one more member."""
        cache = self.tmp_path / (cache or name) / "bases"
        local = LocalData(root or self.root, folders, cache)
        self.members.append(name)
        others = lambda: [peer for peer in self.members if peer != name]  # noqa: E731
        fetcher = DataFetcher(local, self.net.peer(name), others, (), work, "the base model")
        return BaseSupply(fetcher, folders, CONFIG, start or self.start)

    async def founder(self, folder=None):
        supply = self.supply("founder", folder or self.model)
        await supply.lend(folder or self.model)
        return supply

    def leave(self, name):
        self.members.remove(name)
        self.net.lives[name] = "dead"

    def require_whole(self, folder):
        """Compare a folder with the founder's."""
        for file in self.index.files:
            assert (folder / file.name).read_bytes() == (self.model / file.name).read_bytes()
        names = {path.name for path in folder.iterdir()} - {"index.json", ".lock"}
        assert names == {file.name for file in self.index.files}

    def sent(self, name):
        return self.net.sent_bytes[name]


def case(main):
    """Run a test in virtual time, with the model and a folder of its own."""

    def test(model, tmp_path):
        @in_virtual_time
        async def whole(net):
            await main(Bases(net, model, tmp_path))

        whole()

    test.__doc__ = main.__doc__
    return test


@case
async def test_a_joiner_gets_the_founder_s_files_and_lends_them_on(bases):
    await bases.founder()
    bases.net.peer("idle")  # a member without any of it
    bases.members.insert(0, "idle")
    seen = []
    joiner = bases.supply("joiner")
    folder = await joiner.folder(lambda here, total: seen.append((here, total)))
    bases.require_whole(folder)
    assert WeightsFolder(folder, CONFIG).hash == bases.start
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {bases.index.size}
    assert seen[-1][0] == bases.index.size
    assert len({here for here, _ in seen}) > 4  # between pieces too
    bases.leave("founder")
    bases.require_whole(await bases.supply("third").folder())
    assert bases.sent("joiner") > bases.index.size


@case
async def test_a_base_that_is_here_is_not_fetched_again(bases):
    await bases.founder()
    await bases.supply("one").folder()
    sent = bases.sent("founder")
    await bases.supply("again", cache="one").folder()
    assert bases.sent("founder") == sent
    bases.leave("founder")
    bases.leave("one")
    alone = bases.supply("alone", cache="one")
    bases.members = ["alone"]
    bases.require_whole(await alone.folder())


@case
async def test_a_folder_with_the_right_weights_is_used_however_they_are_stored(bases):
    await bases.founder()
    mine = bases.model.parent / "bf16"
    joiner = bases.supply("joiner", mine)
    assert await joiner.folder() == mine
    assert bases.sent("founder") < 100_000  # the index alone
    weights = next(file for file in bases.index.files if file.name == SHARDS[0])
    assert not any(joiner.local.lends(digest) for digest, _ in weights.chunks())
    assert bases.net.peers["joiner"].store.serves(bytes.fromhex(bases.root))


@case
async def test_a_copy_of_the_founder_s_folder_is_lent_too(bases):
    await bases.founder()
    mine = shutil.copytree(bases.model, bases.tmp_path / "mine")
    assert await bases.supply("joiner", mine).folder() == mine
    bases.leave("founder")
    bases.require_whole(await bases.supply("third").folder())


@case
async def test_a_node_with_its_own_folder_does_not_need_the_index(bases):
    bases.net.peer("idle")
    bases.members.append("idle")
    joiner = bases.supply("joiner", bases.model)
    assert await joiner.folder() == bases.model
    assert now() < 2 * module.LEND_TIMEOUT_S
    assert not bases.net.peers["joiner"].store.serves(bytes.fromhex(bases.root))


@case
async def test_a_founder_that_is_alone_indexes_its_folder_again(bases):
    founder = bases.supply("founder", bases.model)
    assert await founder.folder() == bases.model
    assert (founder.local.cache / "index.json").read_bytes() == index_of(bases.model)
    other = bases.supply("other", bases.model.parent / "bf16")
    bases.members = ["other"]
    assert await other.folder() == bases.model.parent / "bf16"
    assert not bases.net.peers["other"].store.serves(bytes.fromhex(bases.root))


@case
async def test_named_folders_without_the_right_weights_are_refused(bases):
    await bases.founder()
    wrong = bases.model.parent / "other"
    with pytest.raises(RefusedByRun, match=r"other holds the weights .*…, and the run's are .*…; "):
        await bases.supply("one", wrong).folder()
    with pytest.raises(RefusedByRun, match=r"it has no weights.* and .*other holds .*leave --base"):
        await bases.supply("two", bases.tmp_path, wrong).folder()
    assert await bases.supply("three", wrong, bases.model).folder() == bases.model


@case
async def test_nobody_to_ask_is_said_at_once(bases):
    alone = bases.supply("alone")
    with pytest.raises(RefusedByRun, match="is no member that could send it; name a folder of"):
        await alone.folder()
    alone.local.keep_index(index_of(bases.model))
    with pytest.raises(RefusedByRun, match="is no member that could send it"):
        await alone.folder()
    assert now() == 0


@case
async def test_members_without_the_base_are_not_waited_for_longer_than_promised(bases):
    bases.net.peer("idle")
    bases.members.append("idle")
    with pytest.raises(RefusedByRun, match="nothing more of it came within 120 s; try again lat"):
        await bases.supply("joiner").folder()
    assert now() < 130


@case
async def test_what_came_before_the_holder_left_counts_at_the_next_try(bases):
    await bases.founder()
    half = bases.index.size // 2
    joiner = bases.supply("joiner")
    leaving = lambda here, total: here > half and bases.net.lives.update(founder="dead")  # noqa: E731
    with pytest.raises(RefusedByRun, match="nothing more of it came within 120 s"):
        await joiner.folder(leaving)
    bases.net.lives["founder"] = "alive"
    sent = bases.sent("founder")
    bases.require_whole(await bases.supply("again", cache="joiner").folder())
    assert bases.sent("founder") - sent < bases.index.size - half + PIECE_BYTES


@case
async def test_an_interrupted_download_goes_on(bases):
    await bases.founder()
    here = []
    task = asyncio.create_task(bases.supply("joiner").folder(lambda done, total: here.append(done)))
    await until(lambda: here and here[-1] > bases.index.size // 2, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    sent, again = bases.sent("founder"), []
    folder = await bases.supply("again", cache="joiner").folder(lambda done, _: again.append(done))
    bases.require_whole(folder)
    assert bases.sent("founder") - sent < bases.index.size * 2 // 3
    assert again[-1] == bases.index.size


@case
async def test_two_nodes_of_one_machine_fetch_one_base(bases):
    await bases.founder()
    supplies = [bases.supply(name, cache="both") for name in ("one", "two")]
    folders = await asyncio.gather(*(supply.folder() for supply in supplies))
    assert folders[0] == folders[1]
    bases.require_whole(folders[0])
    # the index, and the beginning of it that tells its size, may come twice
    assert bases.sent("founder") < bases.index.size + 5 * 2**16
    for name in ("one", "two"):
        assert bases.net.peers[name].store.serves(next(bases.index.files[0].chunks())[0])


@case
async def test_the_second_node_goes_on_where_the_first_was_interrupted(bases):
    await bases.founder()
    here = []
    first = asyncio.create_task(
        bases.supply("one", cache="both").folder(lambda done, _: here.append(done))
    )
    await until(lambda: here and here[-1] > bases.index.size // 2, 60)
    second = asyncio.create_task(bases.supply("two", cache="both").folder())
    await asyncio.sleep(0.1)
    first.cancel()
    bases.require_whole(await second)
    assert bases.sent("founder") < bases.index.size + 5 * PIECE_BYTES


@case
async def test_damaged_files_of_the_cache_are_fetched_again(bases):
    await bases.founder()
    folder = await bases.supply("one").folder()
    for name, damage in ((SHARDS[0], 5000), ("tokenizer.json", 1)):
        content = bytearray((folder / name).read_bytes())
        content[damage] ^= 1
        (folder / name).write_bytes(content)
        sent = bases.sent("founder")
        bases.require_whole(await bases.supply(f"after {name}", cache="one").folder())
        size = len(content) + 2**20
        assert bases.sent("founder") - sent < size


@case
async def test_other_weights_than_the_manifest_says_are_refused(bases):
    await bases.founder()
    with pytest.raises(RefusedByRun, match=r"is not what its manifest says: .* the run's are abab"):
        await bases.supply("joiner", start="ab" * 32).folder()


@case
async def test_a_chunk_that_is_no_index_is_refused(bases):
    raw = b'{"files": []}'
    bases.net.peer("founder", raw)
    bases.members.append("founder")
    with pytest.raises(BadIndex, match="the index of the base that members sent does not describe"):
        await bases.supply("joiner", root=root_of(raw)).folder()


@case
async def test_a_disk_that_is_too_small_is_said_before_the_download(bases):
    await bases.founder()
    free = bases.index.size - 1
    usage = collections.namedtuple("Usage", "free")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(free))
        with pytest.raises(
            Failure, match=r"does not fit into .* GB are missing, and that disk has"
        ):
            await bases.supply("joiner").folder()
        assert bases.sent("founder") < 100_000
        free = bases.index.size + 1
        assert await bases.supply("again", cache="joiner").folder()


@case
async def test_what_has_come_needs_no_room_again(bases):
    await bases.founder()
    joiner = bases.supply("joiner")
    joiner.local.cache.mkdir(parents=True)
    usage = collections.namedtuple("Usage", "free")
    largest = max(bases.index.files, key=lambda file: file.size)
    path = partial_of(joiner.local.cache / largest.name)
    shutil.copy(bases.model / largest.name, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(bases.index.size - largest.size))
        bases.require_whole(await joiner.folder())
    assert bases.sent("founder") < bases.index.size - largest.size + 5 * 2**16


@case
async def test_a_disk_that_fills_up_meanwhile_is_said_in_words(bases):
    await bases.founder()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arrival, "put", full)
        with pytest.raises(
            Failure, match=r"cannot be kept in .*: No space left .*; free some space"
        ):
            await bases.supply("joiner").folder()


@pytest.mark.ci_more
def test_transformers_reads_what_was_fetched(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = write_model(tmp_path / "model", SMALL)
    folders = []

    @in_virtual_time
    async def fetch(net):
        root = root_of(index_of(model))
        start = WeightsFolder(model, SMALL).hash
        for name, given in (("founder", [model]), ("joiner", [])):
            local = LocalData(root, given, tmp_path / name)
            others = {"founder": [], "joiner": ["founder"]}[name]
            fetcher = DataFetcher(local, net.peer(name), lambda: others, (), inline)  # noqa: B023
            folders.append(await BaseSupply(fetcher, given, SMALL, start).folder())

    fetch()
    other = transformers.AutoModelForCausalLM.from_pretrained(folders[1])
    for name, weight in weights_of(SMALL).items():
        assert torch.equal(other.state_dict()[name], weight)


def test_a_node_that_is_stopped_while_it_hashes_ends_within_a_piece(model, tmp_path, monkeypatch):
    monkeypatch.setattr("farflock.node.state.weights_file.PIECE_VALUES", 10)  # it takes long
    worker = Worker("test")

    async def stop():
        bases = Bases(Net(), model, tmp_path)
        copy = shutil.copytree(model, tmp_path / "copy")  # which was not hashed before
        supply = bases.supply("joiner", copy, work=worker)
        task = asyncio.create_task(supply.folder())
        await until(lambda: supply.fetcher.came_s > 0, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        began_s = now()
        worker.close()
        return now() - began_s

    assert asyncio.run(stop()) < 1


def test_only_a_run_of_adapters_has_a_base(model, tmp_path):
    machine = MachineOptions(
        RunFolder(tmp_path), model=model, base=(Path("b"),), cache=CacheOptions(tmp_path / "data")
    )
    plain = ModelSection(**msgspec.structs.asdict(CONFIG))
    chunks = Net().peer("me")
    assert base_supply_of(machine, plain, chunks, list) is None
    section = msgspec.structs.replace(plain, start="ab" * 32, files="cd" * 32)
    supply = base_supply_of(machine, section, chunks, list)
    assert supply.local.root == "cd" * 32
    assert supply.local.cache == tmp_path / "data" / "bases" / ("cd" * 32)
    assert supply.local.cache_bytes is None
    assert supply.fetcher.is_alone
    with pytest.raises(RefusedByRun, match=r"holds the weights .* and b: it has no weights"):
        asyncio.run(supply.folder())
