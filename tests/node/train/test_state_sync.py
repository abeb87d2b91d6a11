"""A node's state sync: the state it serves and adopts, and how far it says the run is."""

import asyncio
import threading
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from farflock.node.pipeline.lifecycle import left_out
from farflock.node.state import cut as cuts
from farflock.node.state import spool
from farflock.node.state.cut import raw
from farflock.node.state.kept_chunks import DownloadFolder
from farflock.node.state.spool import tensors_of
from farflock.node.train import microbatch_ids as notes
from farflock.node.train.driver import RunPosition
from farflock.node.train.exchange_client import ExchangeClient
from farflock.node.train.state_sync import (
    CorruptSnapshot,
    Spool,
    StateSync,
    decode_state,
    max_state_bytes,
)
from farflock.optimizers.catalog import METHODS
from farflock.optimizers.parts import blocks
from farflock.optimizers.parts.state import state_hash
from farflock.optimizers.trial_options import law_options
from farflock.swarm.compute import inline
from farflock.swarm.peer.snapshots import Snapshot, SnapshotUnavailable
from farflock.swarm.protocol.views import Certified, Member, View
from farflock.swarm.roles import NOTHING
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

INEXACT = [name for name, method in sorted(METHODS.items()) if method.equality != "exact"]


def snapshot(state, told=None, at=3):
    return Snapshot(at, state_hash(told or state), 640, (safetensors.torch.save(state),))


def test_a_state_that_must_not_leave_yet_is_waited_for_and_read_before_the_next_step():
    async def main():
        peer = SimpleNamespace(context=None, rounds=SimpleNamespace(streams={}))
        driver = SimpleNamespace()
        sync, may = StateSync(peer, driver, SimpleNamespace(stage=0), inline), [False]
        sync.may_leave = lambda: may[0]
        reading = asyncio.create_task(sync.leaving(lambda: "state"))
        await asyncio.sleep(1.0)
        await sync.let_leave()  # nothing may leave, so the step is made
        assert not reading.done()
        may[0] = True
        await sync.let_leave()
        assert reading.done()
        assert await reading == "state"
        before = asyncio.get_running_loop().time()
        await sync.let_leave()
        assert asyncio.get_running_loop().time() == before, "nobody waits any more"

    run_virtual(main())


def test_a_snapshot_that_is_what_its_hash_says_is_decoded():
    state = {"a": torch.arange(3.0)}
    assert torch.equal(decode_state(snapshot(state))["a"], state["a"])


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (snapshot({"a": torch.ones(2)}, told={"a": torch.zeros(2)}), "does not match its hash"),
        (Snapshot(1, bytes(32), 0, (b"no tensors",)), "cannot be read"),
        (Snapshot(1, bytes(32), 0, ()), "cannot be read"),
    ],
)
def test_other_bytes_are_refused(broken, reason):
    with pytest.raises(CorruptSnapshot, match=reason):
        decode_state(broken)


def seated(bench, text, work, method="diloco", peers=1):
    made = bench(text, method, peers=peers)

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            node.found()
            return await work(node)

    return run_virtual(main())


def test_progress_is_the_agreed_tokens_and_what_everybody_has_presumably_trained_since(bench, text):
    async def work(node):
        node.state_sync.load_state(RunPosition({"delta": 4}, 1000, 30, 5), {})
        return node.loop.driver.progress(7, 0.0), node.loop.driver.position

    progress, place = seated(bench, text, work)
    assert (progress.step, progress.tokens) == (7, 1000 + 30 * 5)
    assert place == RunPosition({"delta": 4}, 1000, 30, 5)


def test_the_next_rounds_are_those_after_the_ones_in_the_state_by_the_swarms_names(bench, text):
    async def work(node):
        state_sync = node.state_sync
        first = dict(state_sync.next_rounds)
        state_sync.load_state(RunPosition({"delta": 4}), {})
        return first, state_sync.next_rounds

    assert seated(bench, text, work) == ({"delta": 0}, {"delta": 5})


def serve(node, snapshots):
    """Let a node hand out these snapshots, one after the other, the last one for ever."""
    left = list(snapshots)

    async def provide():
        return left.pop(0) if len(left) > 1 else left[0]

    node.peer.snapshots.serve("state", provide)


def test_a_download_is_read_where_it_has_landed(bench, text, monkeypatch):
    """In a process, that is a mapped file: a joiner's memory holds no second state."""
    made, places, taken = bench(text, "diloco", peers=2), [], {}

    def storage(shape):
        places.append(torch.zeros(shape))
        return places[-1]

    async def main():
        async with made.peer(0).running() as founder, made.peer(1).running() as newcomer:
            first, second = made.node(founder), made.node(newcomer)
            first.found()
            replica = first.loop.driver.replica
            replica.write({name: torch.ones(x) for name, x in replica.shapes.items()}, "param")
            state = first.loop.driver.method.snapshot(replica)
            serve(first, [snapshot(state | {"next.delta": torch.tensor(4)})])
            second.state_sync.spool = Spool(inline, storage)
            method = type(second.loop.driver.method)
            restore = method.restore

            def restored(self, replica, state, mode):
                taken.update(state)
                restore(self, replica, state, mode)

            monkeypatch.setattr(method, "restore", restored)
            await second.join([made.record(0)], 60.0)
            return state

    state = run_virtual(main())
    (place,) = places
    begin, end = place.data_ptr(), place.data_ptr() + place.nbytes
    assert taken.keys() == state.keys()
    assert all(begin < x.data_ptr() <= end - x.nbytes for x in taken.values())


def joined(bench, text, broken):
    """A newcomer to a founder that first serves `broken(state)` of its state, then the truth."""
    made = bench(text, "diloco", peers=2)

    async def main():
        async with made.peer(0).running() as founder, made.peer(1).running() as newcomer:
            first, second = made.node(founder), made.node(newcomer)
            first.found()
            method, replica = first.loop.driver.method, first.loop.driver.replica
            replica.write(
                {name: torch.ones(shape) for name, shape in replica.shapes.items()}, "param"
            )
            state = method.snapshot(replica)
            served = state | {"next.delta": torch.tensor(4)}
            serve(first, [broken(served), snapshot(served)])
            await second.join([made.record(0)], 60.0)
            other = second.loop.driver
            assert second.loop.driver.position.rounds == {"delta": 3}
            return (
                state_hash(state),
                state_hash(other.method.snapshot(other.replica)),
                newcomer.context.counters,
            )

    return run_virtual(main())


@pytest.mark.parametrize(
    "broken",
    [
        lambda state: snapshot(state, told={"other": torch.zeros(1)}),
        lambda state: snapshot(
            {name: tensor for name, tensor in state.items() if "norm" not in name}
        ),
        lambda state: snapshot({name: tensor * float("nan") for name, tensor in state.items()}),
        lambda state: snapshot(state | {"next.delta": torch.tensor(-7)}),
    ],
    ids=["a lie about its hash", "parts missing", "not finite", "a round below all"],
)
def test_a_newcomer_does_not_take_a_broken_snapshot_and_asks_again(bench, text, broken):
    truth, found, _ = joined(bench, text, broken)
    assert found == truth


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ["diloco", "noloco", "sparseloco", "ddp"])
def test_a_peer_with_the_same_weights_downloads_nothing_at_the_beginning(bench, text, name, same):
    made, shown = bench(text, name, peers=2), []

    async def main():
        async with made.peer(0).running() as founder, made.peer(1).running() as newcomer:
            first, second = made.node(founder), made.node(newcomer)
            ours, theirs = first.loop.driver, second.loop.driver
            if not same:
                theirs.replica.write(
                    {name: torch.zeros(shape) for name, shape in theirs.replica.shapes.items()},
                    "param",
                )
            first.found()
            await second.join([made.record(0)], 60.0, lambda here, total: shown.append(here))
            assert theirs.position == ours.position
            return [state_hash(driver.method.snapshot(driver.replica)) for driver in (ours, theirs)]

    one, other = run_virtual(main())
    assert one == other
    assert (shown == []) == same


def padded(state, size_bytes):
    chunk = bytes(1024 * 1024)
    return replace(
        snapshot(state), chunks=(*snapshot(state).chunks, *[chunk] * (size_bytes // len(chunk)))
    )


@pytest.mark.parametrize(("over", "comes"), [(0.0, True), (1.5, False)])
def test_of_a_state_that_is_larger_than_any_method_s_not_a_byte_is_downloaded(
    bench, text, over, comes
):
    seen = []

    def broken(state):
        shapes = {name: x.shape for name, x in state.items() if not name.startswith("next.")}
        # twice what the model alone says, for the state has two copies
        seen.append(max_state_bytes(shapes))
        return padded(state, int(over * seen[0]))

    truth, found, counters = joined(bench, text, broken)
    assert found == truth
    assert (counters["dropped: snapshot too large"] == 0) == comes


def test_a_node_that_is_offered_nothing_but_lies_gives_up_in_time_and_keeps_its_state(bench, text):
    made = bench(text, "diloco", peers=2)

    async def main():
        async with made.peer(0).running() as founder, made.peer(1).running() as newcomer:
            first, second = made.node(founder), made.node(newcomer)
            first.found()
            driver = second.loop.driver
            before = state_hash(driver.method.snapshot(driver.replica))
            serve(first, [snapshot({"a": torch.ones(2)})])
            with pytest.raises((TimeoutError, SnapshotUnavailable)):
                await second.join([made.record(0)], 20.0)
            return (
                before,
                state_hash(driver.method.snapshot(driver.replica)),
                asyncio.get_running_loop().time(),
            )

    before, after, time_s = run_virtual(main())
    assert before == after
    assert time_s < 60


@pytest.mark.parametrize(("lives", "loss"), [((60.0, None), 0.0), ((None,), 0.05)])
def test_a_newcomer_that_is_restarted_at_a_slow_line_or_loses_frames_fetches_what_is_missing(
    bench, text, tmp_path, monkeypatch, lives, loss
):
    """Frames stand for many times their bytes: a state of dozens of MB at 0.2 MB/s."""
    monkeypatch.setattr(spool, "CHUNK_BYTES", 4096)
    made, times, fetched = bench(text, "diloco", peers=2), [], []

    def life(peer):
        peer.snapshots.kept = DownloadFolder(tmp_path / "download").of
        fetch = peer.context.chunks.fetch

        async def counted(digest, size, *rest, **options):
            came = await fetch(digest, size, *rest, **options)
            fetched.extend([digest] if came and size == 4096 else [])
            return came

        peer.context.chunks.fetch = counted
        return made.node(peer)

    async def main():
        network = made.network
        network.line_bytes = lambda frame: 300 * len(frame)
        async with made.peer(0).running() as founder:
            first = made.node(founder)
            replica = first.loop.driver.replica
            replica.write({name: torch.rand(x) for name, x in replica.shapes.items()}, "param")
            first.found()
            line = LinkModel(down_bytes_per_s=200_000.0, loss=loss)
            network.set_link(made.identities[1].peer, line)
            for number, seconds in enumerate(lives):
                async with made.peer(1, 1 + number).running() as newcomer:
                    node = life(newcomer)
                    joining = asyncio.create_task(node.join([made.record(0)], 20.0))
                    began_s = asyncio.get_running_loop().time()
                    await asyncio.wait([joining], timeout=seconds)
                    times.append(asyncio.get_running_loop().time() - began_s)
                    assert joining.done() == (seconds is None)
                    joining.cancel()
            drivers = [each.loop.driver for each in (first, node)]
            assert same(*(driver.method.snapshot(driver.replica) for driver in drivers))
            return founder.context.chunks.server.sent_bytes

    sent_bytes = run_virtual(main())
    assert sum(times) > 100.0
    under_way = 7 * (len(lives) - 1)  # chunks of the life that ended
    assert sent_bytes < 1.3 * 4096 * (len(fetched) + under_way)
    assert len(fetched) == len(set(fetched)) > 10


@pytest.mark.parametrize("name", ["diloco", "streaming", "ddp"])
def test_a_node_goes_back_to_the_state_after_its_last_round(bench, text, name):
    """Of exact methods all local work is gone, and the tokens of it."""
    made = bench(text, name, peers=1)

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            node.found()
            driver = node.loop.driver
            before, first = expected_of(node), driver.replica.read(driver.replica.names, "param")
            beside = []
            driver.local_step(node.loop.progress)
            node.loop.train_one(node.loop.progress)
            driver.trained(8, 1)
            assert driver.position.own_tokens == 8
            left_out.go_back(driver, lambda: beside.append("here"))
            node.state_sync.open(driver.position.rounds, driver.position.agreed_tokens)
            assert beside == ["here"]
            assert same(before, expected_of(node))
            assert same(first, driver.replica.read(driver.replica.names, "param"))
            assert driver.position.own_tokens == 0

    run_virtual(main())


# A snapshot is of one moment.


def provided(node):
    """Found a node's run; return what makes its snapshots."""
    made, serve = [], node.peer.snapshots.serve

    def noted(name, provide, **options):
        made.append(provide)
        serve(name, provide, **options)

    node.peer.snapshots.serve = noted
    node.found()
    return made[-1]


def expected_of(node):
    driver = node.loop.driver
    rounds = {f"next.{name}": torch.tensor(at) for name, at in node.state_sync.next_rounds.items()}
    return driver.method.snapshot(driver.replica) | rounds


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )


async def beside(work):
    """Compute, as another worker would."""
    return work()


@pytest.fixture
def small_pieces(monkeypatch):
    """Also of tests' models most tensors are cut as they are stored, and read in many pieces."""
    monkeypatch.setattr(cuts, "PIECE_BYTES", 4096)
    monkeypatch.setattr(blocks, "BLOCK_VALUES", 256)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_snapshot_is_of_the_moment_at_which_it_was_cut(bench, text, method):
    """A piece is read after each step; each change saves what is not read."""
    made = bench(text, method, **law_options(METHODS[method]))
    expected, found, readers, served = {}, bytearray(), [], []

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            provide = provided(node)
            node.state_sync.spool = Spool(beside)

            async def pause():
                if node.loop.step == 10:
                    expected.update(expected_of(node))
                    served.append(await provide())
                    cut, _ = node.state_sync.cut()
                    assert not cut.saved_bytes
                    readers.append(cut.read())
                    found.extend(cut.head)
                for reader in readers:
                    found.extend(b"".join(bytes(raw(piece)) for _, piece in islice(reader, 1)))

            node.loop.pause = pause
            await node.loop.run(1400)

    run_virtual(main())
    left = [bytes(raw(piece)) for _, piece in readers[0]]
    assert left, "nothing was left to read"
    assert same(tensors_of(memoryview(found + b"".join(left))), expected)
    assert same(decode_state(served[0]), expected)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("method", INEXACT)
def test_a_snapshot_has_no_half_of_a_step(bench, text, method):
    """A step begins in the thread that trains while the state is being listed."""
    made = bench(text, method, **law_options(METHODS[method]))

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            provide, driver = provided(node), node.loop.driver
            node.state_sync.spool = Spool(beside)
            replica, progress = driver.replica, driver.progress(0, 0.0)
            replica.write({name: torch.ones(x) for name, x in replica.shapes.items()}, "grad")

            def step():
                driver.local_step(progress)
                driver.after_step(progress)

            training, read, reads = threading.Thread(target=step), replica.block, []

            def block(*where):
                reads.append(where)
                if len(reads) == 3:
                    training.start()
                    training.join(0.1)  # it ends, or waits until all is listed
                return read(*where)

            expected, replica.block = expected_of(node), block
            snapshot = await provide()
            if training.ident is None:  # the state has nothing of the replica
                training.start()
            training.join()
            return decode_state(snapshot), expected, expected_of(node)

    found, before, after = run_virtual(main())
    assert same(found, before)
    assert same(before, after) == (method not in ("local", "sparta"))  # whose weights are shared


def test_a_cut_that_its_own_worker_would_read_later_is_copied_at_once(bench, text):
    """What is queued before its reader would otherwise wait for it."""
    made = bench(text, "diloco")

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            node.found()
            return node.state_sync.cut()[0]

    cut = run_virtual(main())
    assert cut.saved_bytes == cut.size_bytes - len(cut.head)


# A stage's books.


class Books:
    """Brings a note of its own with each contribution, and writes down what it is told."""

    def __init__(self):
        self.brought_to, self.announced, self.told = [], [], []

    def brought(self, number):
        self.brought_to.append(number)
        return notes.written([("t", number)])

    def closing(self, number, noted):
        self.announced.append((number, noted))

    def closed(self, number, noted):
        self.told.append((number, noted))


def test_the_books_bring_notes_to_each_round_and_are_told_what_it_named(bench, text):
    made, contributions = bench(text, "diloco", total=3200, period=10), Books()

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            node.loop.driver.contributions = contributions
            node.found()
            await node.loop.run(made.total, 30.0)

    run_virtual(main())
    assert len(contributions.told) >= 4
    assert contributions.told == [
        (number, notes.written([("t", number)])) for number in range(len(contributions.told))
    ]
    assert contributions.announced == contributions.told
    assert contributions.brought_to == list(range(len(contributions.told)))


def test_the_books_of_a_method_with_several_streams_go_with_the_first_one(bench, text):
    made, contributions = (
        bench(text, "streaming", total=3200, period=8, fragments=2, overlap=1),
        Books(),
    )

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            node.loop.driver.contributions = contributions
            node.found()
            first, *others = node.loop.driver.method.streams(node.loop.driver.replica)
            shards = [
                peer.rounds.streams[entry.key.stream].stream.terms.shards
                for entry in (first, *others)
            ]
            assert shards == [2] + [1] * len(others)
            await node.loop.run(made.total, 30.0)
            return first

    first = run_virtual(main())
    assert len(contributions.told) >= 2
    assert contributions.brought_to[: len(contributions.told)] == [
        number for number, _ in contributions.told
    ]
    assert len(contributions.brought_to) <= len(contributions.told) + 1
    assert {number % first.stride for number, _ in contributions.told} == {
        first.key.round % first.stride
    }
    assert all(noted == notes.written([("t", number)]) for number, noted in contributions.told)


def test_a_stage_s_state_has_a_name_of_its_own_and_only_its_members_count(bench, text):
    made = bench(text, "diloco", peers=2)

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            client, driver = ExchangeClient(peer, 3, 1), node.loop.driver
            peer.found()
            driver.contributions = Books()
            state_sync = StateSync(peer, driver, client, inline)
            newest = peer.context.views.newest
            others = (Member("a", 1, 1), Member("b", 1, 0), Member("c", 1, NOTHING))
            members = (*newest.members, *others)
            peer.context.chain.views.append(Certified(View(1, newest.hash, 0, members)))
            state_sync.open()
            driver.trained(64, client.members())
            return set(peer.snapshots.served), driver.members, driver.tokens

    served, members, tokens = run_virtual(main())
    assert served == {"state/1"}
    assert (members, tokens) == (2, 128), "the replica and the stage's one member"
