"""A checkpoint holds everything that a node needs: resuming from it changes no bit."""

from dataclasses import replace

import pytest
import torch

from farflock.node.assembly.resume import checkpoint_state, cursors_of, load_moments, load_state
from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import CheckpointCorrupt
from farflock.node.train.driver import Pending
from farflock.optimizers.method import ExchangeKey, Result
from farflock.swarm.sim.virtual_time import run_virtual

EMBED = "model.embed_tokens.weight"
METHODS = {
    "local": {},
    "ddp": {"codec": "bf16"},
    "diloco": {"period": 7, "feedback": 0.9, "codec": "int4"},
    "noloco": {"period": 7},
    "lean": {"period": 7, "codec": "ecsq:30", "return_codec": "ecsq:30"},
    "co2": {"period": 7},  # a result waits for the end of the next period
    "streaming": {"period": 8, "fragments": 2, "overlap": 3},
}
EVERY_DAY = {("diloco", 1700), ("lean", 1700), ("co2", 640), ("streaming", 640)}


def write(node, folder):
    groups, cursors = checkpoint_state(node)
    return checkpoint.load(checkpoint.save(folder, node.loop.step, groups, {"node": cursors}))


async def begun(bench, node, until):
    node.peer.found()
    node.state_sync.open()
    await node.loop.run(until)
    return node


def whole(bench, folder):
    """One peer alone, from start to end."""

    async def main():
        async with bench.peer(0).running() as peer:
            return write(await begun(bench, bench.node(peer), bench.total), folder)

    return run_virtual(main())


def stopped(bench, folder, at):
    """The same, ended at `at` tokens, and taken up by another process's node."""

    async def first():
        async with bench.peer(0).running() as peer:
            return write(await begun(bench, bench.node(peer), at), folder / "first")

    async def second(saved):
        async with bench.peer(0, incarnation=2).running() as peer:
            node = bench.node(peer)
            node.peer.found()
            load_state(node, saved)
            assert node.loop.step == saved.step
            await node.loop.run(bench.total)
            return write(node, folder / "second")

    return run_virtual(second(run_virtual(first())))


@pytest.mark.parametrize(
    ("method", "at"),
    [
        pytest.param(method, at, marks=() if (method, at) in EVERY_DAY else pytest.mark.long)
        for method in METHODS
        for at in (640, 1700)
    ],
)
def test_one_peer_alone_goes_on_bit_by_bit(bench, text, tmp_path, method, at):
    made = bench(text, method, total=4_160, **METHODS[method])
    expected, found = whole(made, tmp_path / "whole"), stopped(made, tmp_path / "stopped", at)
    assert found.meta == expected.meta
    assert found.step == expected.step
    # a coarse return codec leaves something out
    assert bool(found.groups["reducer"]) == (method == "lean")
    for group, tensors in expected.groups.items():
        assert tensors.keys() == found.groups[group].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found.groups[group][name]), f"{group}/{name}"


def with_pending(bench, node):
    """A node with three exchanges in flight: answered by a mean, by a gather, and not answered."""
    driver = node.loop.driver
    node.loop.step = 9
    template = driver.method.streams(driver.replica)[0]
    filled = {name: torch.full(shape, 0.5) for name, shape in driver.replica.shapes.items()}
    halves = {name: tensor / 2 for name, tensor in filled.items()}
    taken = {name: [(0, tensor.numel())] for name, tensor in filled.items()}
    mean = Result("partial", 5, ("a", "b"), (1.0, 2.0), filled, None, halves, taken, tokens=77)
    gather = Result(
        "ok", 6, ("a", "b"), (1.0, 1.0), None, {"a": filled, "b": halves}, None, taken, tokens=78
    )
    results = [mean, gather, None]
    table = []
    for number, result in enumerate(results):
        exchange = replace(
            template,
            key=ExchangeKey(template.key.stream, 4 + number),
            tensors=filled,
            weight=3.0,
            apply_after=7,
        )
        table.append(Pending(exchange, since_step=5 + number, since_s=0.0, result=result))
    driver.load_state(table)
    return table


def same(left, right):
    assert (left is None) == (right is None)
    assert left is None or all(torch.equal(left[name], right[name]) for name in {*left, *right})


def test_pending_exchanges_keep_their_results_and_their_age(bench, text, tmp_path):
    made = bench(text, "diloco")

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            table = with_pending(made, node)
            saved = write(node, tmp_path)
            other = made.node(peer)
            other.peer.found()
            load_state(other, saved)
            return table, other.loop.driver.table

    before, after = run_virtual(main())
    assert [entry.exchange.key for entry in after] == [entry.exchange.key for entry in before]
    for old, new in zip(before, after, strict=True):
        assert (new.since_step, new.exchange.weight, new.exchange.apply_after) == (
            old.since_step,
            3.0,
            7,
        )
        same(new.exchange.tensors, old.exchange.tensors)
    for old, new in zip(before[:2], after[:2], strict=True):
        same(new.result.mean, old.result.mean)
        same(new.result.sent, old.result.sent)
        for peer in old.result.gathered or ():
            same(new.result.gathered[peer], old.result.gathered[peer])
        for field in ("status", "next_round", "participants", "weights", "tokens"):
            assert getattr(new.result, field) == getattr(old.result, field)
        assert {name: list(ranges) for name, ranges in new.result.taken.items()} == old.result.taken


def test_an_exchange_without_an_answer_has_failed_once(bench, text, tmp_path):
    made = bench(text, "diloco")

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            with_pending(made, node)
            saved = write(node, tmp_path)
            other = made.node(peer)
            other.peer.found()
            load_state(other, saved)
            return other.loop.driver.table[-1].result

    assert run_virtual(main()).status == "failed"


def test_a_peer_that_rejoins_a_swarm_takes_only_its_cursor_and_moments(bench, text, tmp_path):
    made = bench(text, "diloco", period=7)

    async def main():
        async with made.peer(0).running() as peer:
            node = await begun(made, made.node(peer), 640)
            saved, moments = (
                write(node, tmp_path),
                node.loop.driver.replica.read([EMBED], "exp_avg"),
            )
        async with made.peer(0, incarnation=2).running() as peer:
            other = made.node(peer)
            fresh = other.loop.driver.replica.read(other.loop.driver.replica.names, "param")
            load_moments(other, saved)
            now = other.loop.driver.replica
            same(now.read(now.names, "param"), fresh)
            return saved.step, other.loop.step, moments, now.read([EMBED], "exp_avg")

    step, found, before, after = run_virtual(main())
    assert found == step > 0
    assert bool(before[EMBED].any())
    same(before, after)


@pytest.mark.parametrize("group", ["replica", "method", "personal"])
def test_a_checkpoint_of_another_model_is_refused_in_a_sentence(bench, text, tmp_path, group):
    made = bench(text, "diloco")

    async def main():
        async with made.peer(0).running() as peer:
            node = await begun(made, made.node(peer), 128)
            groups, cursors = checkpoint_state(node)
            groups[group] = {
                name: tensor
                for name, tensor in groups[group].items()
                if not name.endswith(("embed", "since"))
            }
            groups[group] = {
                name.replace("embed", "other"): tensor for name, tensor in groups[group].items()
            }
            saved = checkpoint.load(checkpoint.save(tmp_path, 1, groups, {"node": cursors}))
            load_state(made.node(peer), saved)

    with pytest.raises(CheckpointCorrupt, match="does not fit this run"):
        run_virtual(main())


@pytest.mark.parametrize("meta", [{}, {"node": 3}, {"node": {"step": "x"}}])
def test_a_checkpoint_without_cursors_is_refused(tmp_path, meta):
    saved = checkpoint.load(checkpoint.save(tmp_path, 1, {"model": {}}, meta))
    with pytest.raises(CheckpointCorrupt, match="does not say where"):
        cursors_of(saved)
