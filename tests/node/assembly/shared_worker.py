"""One process of a peer, as torchrun starts it: `python shared_worker.py CASE FOLDER`.

The leader runs a node on a simulated network, and writes what became of the case to
FOLDER/result.txt: nothing if all was well. A follower writes its error to FOLDER/follower.txt.
"""

import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
from worlds.model_folder import QWEN3, weights_of, write_model
from worlds.peers import peer_in

from farflock.node.assembly.followers import Assignment, lead
from farflock.node.assembly.node import replica_node
from farflock.node.assembly.resume import checkpoint_state, load_state
from farflock.node.assembly.text import text_of
from farflock.node.model import loss
from farflock.node.model.data import evaluation_rows
from farflock.node.model.device import Device
from farflock.node.model.evaluation import HeldOut
from farflock.node.model.llama import build
from farflock.node.model.ranks import FollowerLost
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.process.torchrun import follow_leader, gathered, place_of, unless_lost
from farflock.node.run.manifest import resolve
from farflock.node.state import checkpoint
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.train.model_meter import ModelMeter
from farflock.node.train.shared_task import SharedTask
from farflock.optimizers.parts.stateful import evaluated_weights
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

TOKENS = 960
BATCH, SEQ, ACCUMULATE = 3, 32, 2  # two processes take one row and two


def manifest(corpus, method="diloco", model=None, **options):
    return resolve(
        {
            "run": {"name": "shared", "seed": 3, "total_tokens": TOKENS},
            "model": model or {"preset": "tiny"},
            "train": {
                "batch": BATCH,
                "seq": SEQ,
                "accumulate": ACCUMULATE,
                "lr": 0.01,
                "autocast": options.pop("autocast", False),
            },
            "method": {"name": method, "options": options},
            "data": {"corpus": corpus},
            "exchange": {"start_peers": 1},
        }
    )


class World:
    """A lone node at a time, of all ranks or of this process."""

    def __init__(self, ranks, folder):
        self.ranks, self.corpus = ranks, str(folder / "corpus.txt")
        self.identity = Identity.from_seed(bytes(32))
        self.weights = None  # that the run starts from, if not from its seed
        Path(self.corpus).write_text("\n".join(f"{n} squared is {n * n}" for n in range(2000)))
        os.environ["FARFLOCK_HOME"] = str(folder / "home")
        text = text_of(self.manifest().data)
        self.text, self.held_out = text.train(), text.held_out()

    def manifest(self, **terms):
        return manifest(self.corpus, **terms)

    def peer(self):
        return peer_in(SimNetwork(3), self.identity, RunTerms("3", 3, view_s=2.0))

    def node(self, peer, described, shared, losses=None, **how):
        async def compute(work):
            return work()

        async def train(work):
            found = await asyncio.to_thread(work) if losses is None else work()
            if losses is not None:
                losses.append(found)
            await asyncio.sleep(0.5)
            return found

        part = None
        if shared:
            begun = "" if self.weights is None else str(self.weights.folder)
            assignment = Assignment(described.canonical(), peer.me, **how, weights=begun)
            part = lead(self.ranks, assignment, self.text, Device())
        return replica_node(
            described.plan(),
            peer,
            self.text,
            compute=compute,
            train=train,
            shared=part,
            weights=self.weights,
        )

    def trained(self, described, shared, saved=None, **how):
        """Return a node's state at the start, the node at the end, and its losses. A node with a
        checkpoint only loads it. `how` is what an `Assignment` says on how several processes
        compute."""
        losses = []

        async def main():
            async with self.peer().running() as peer:
                node = self.node(peer, described, shared, losses, **how)
                node.peer.found()
                if saved is not None:
                    load_state(node, saved)
                    return state_of(node), node
                node.state_sync.open()
                began = state_of(node)
                await node.loop.run(TOKENS)
                return began, node

        began, node = run_virtual(main())
        return began, node, losses


def state_of(node):
    groups, _ = checkpoint_state(node)
    return {part: {name: x.clone() for name, x in held.items()} for part, held in groups.items()}


def same(one, other):
    assert one.keys() == other.keys()
    for part, held in one.items():
        assert held.keys() == other[part].keys(), part
        for name, x in held.items():
            assert torch.equal(x, other[part][name]), f"{part} {name}"


def close(one, other):
    assert one.keys() == other.keys()
    for part, held in one.items():
        assert held.keys() == other[part].keys(), part
        for name, x in held.items():
            away = (x.double() - other[part][name].double()).norm()
            assert away <= 1e-3 * other[part][name].double().norm() + 1e-9, f"{part} {name}"


def local_steps_are_those_of_one_process(world, described, **how):
    began, node, losses = world.trained(described, shared=True, **how)
    began_alone, alone, losses_alone = world.trained(described, shared=False)
    same(began, began_alone)
    assert len(losses) == len(losses_alone) >= 5
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(losses_alone), rtol=1e-5, atol=1e-5
    )
    close(state_of(node), state_of(alone))
    assert node.trained_tokens == alone.trained_tokens
    assert node.tokens == alone.tokens
    return node, losses


def a_checkpoint_moves_between_one_process_and_two(world, described, node, folder):
    groups, cursors = checkpoint_state(node)
    meta = {"run": "3", "step": node.step, "tokens": node.tokens, "node": cursors}
    path = checkpoint.save(folder / "checkpoints", node.step, groups, meta)
    for shared in (False, True):  # the last one ends the shards that are read here
        loaded, _, _ = world.trained(described, shared, checkpoint.load(path))
        same(loaded, checkpoint.load(path).groups)


def the_leader_measures_what_one_process_does(world, described):
    found = []
    rows = evaluation_rows(world.held_out, SEQ, 8)
    for shared in (True, False):
        _, node, _ = world.trained(described, shared)
        driver, held_out = node.loop.driver, HeldOut(rows)
        meter = ModelMeter(node.model, lambda: held_out, ByteTokenizer())  # noqa: B023 - called at once
        copied = meter.copy(evaluated_weights(driver.method, driver.replica))
        found.append(copied(lambda: False).estimate)
    assert found[0].sequences == 8
    assert abs(found[0].mean - found[1].mean) < 1e-3 * found[1].mean


def in_bf16_the_loss_falls_as_in_float32(world, options, exact):
    _, node, losses = world.trained(world.manifest(autocast=True, **options), shared=True)
    assert losses != exact
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact), rtol=0.02, atol=0.02)
    assert all(x.dtype == torch.float32 for x in node.model.parameters())


def each_rank_holds_its_rows_alone(world):
    described = world.manifest(period=3)

    async def main():
        return world.node(world.peer(), described, shared=True)

    node = run_virtual(main())
    whole = build(described.plan().model, described.plan().run_seed)
    for (name, mine), (other, every) in zip(
        node.model.named_parameters(), whole.named_parameters(), strict=True
    ):
        half = -(-len(every) // 2)
        assert name == other
        assert torch.equal(mine.to_local(), every[:half])
    assert torch.equal(node.model.cos, whole.cos)


OPTIONS = {"period": 2, "codec": "fp32", "return_codec": "fp32"}


def all_is_well(world, folder):
    each_rank_holds_its_rows_alone(world)
    described = world.manifest(**OPTIONS)
    node, _ = local_steps_are_those_of_one_process(world, described)
    a_checkpoint_moves_between_one_process_and_two(world, described, node, folder)


def so_it_is_on_other_terms(world, folder):
    by_steps = world.manifest(method="ddp", codec="fp32")
    local_steps_are_those_of_one_process(world, by_steps)
    for described in (by_steps, world.manifest(**OPTIONS)):
        the_leader_measures_what_one_process_does(world, described)
    _, _, exact = world.trained(world.manifest(**OPTIONS), shared=True)
    in_bf16_the_loss_falls_as_in_float32(world, OPTIONS, exact)


def layers_are_computed_again_and_losses_in_chunks_a_sequence_at_a_time(world, folder):
    local_steps_are_those_of_one_process(
        world, world.manifest(**OPTIONS), checkpoints=True, micro_batch=1
    )


def each_rank_reads_its_rows_of_a_folder(world, folder):
    model = {"from": str(write_model(folder / "model", QWEN3))}
    described = world.manifest(model=model, **OPTIONS)
    world.weights = WeightsFolder(folder / "model", QWEN3)
    began, _, _ = world.trained(described, shared=True)
    wanted = weights_of(QWEN3)
    assert all(torch.equal(began["replica"][f"param.{name}"], x) for name, x in wanted.items())
    local_steps_are_those_of_one_process(world, described)


def layers_are_compiled(world, folder):
    local_steps_are_those_of_one_process(world, world.manifest(**OPTIONS), compiles=True)


def a_follower_fails(world, folder):
    """Train for ever in real time: the follower's third step raises."""

    async def main():
        async with world.peer().running() as peer:
            node = world.node(peer, world.manifest(period=3), shared=True)
            node.peer.found()
            node.state_sync.open()
            await unless_lost(world.ranks, node.loop.run(10**9))

    asyncio.run(main())


def the_leader_dies(world, folder):

    async def main():
        world.node(world.peer(), world.manifest(period=3), shared=True)

    asyncio.run(main())
    (folder / "result.txt").write_text("")
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at_step_3(task, step, take_part=SharedTask.take_part):
    if step == 3:
        raise MemoryError("a planted shortage of memory")
    return take_part(task, step)


def main(case, folder):
    torch.set_num_threads(1)
    if "chunks" in case:
        loss.MAX_LOGITS = 11 * 256  # a row has 32 tokens
    with gathered(place_of(os.environ), Device()) as ranks:
        if ranks.leads:
            globals()[case](World(ranks, folder), folder)
            return
        if case == "a_follower_fails":
            SharedTask.take_part = fail_at_step_3
        follow_leader(ranks, Device(), 1)


if __name__ == "__main__":
    where, leads = Path(sys.argv[2]), os.environ["RANK"] == "0"
    result = ""
    try:
        main(sys.argv[1], where)
    except FollowerLost as error:
        result = str(error)
    except Exception:
        result = traceback.format_exc()
    (where / ("result.txt" if leads else "follower.txt")).write_text(result)
