"""One process of a sharded replica: `python sharded_worker.py RANK COUNT FOLDER`.

The folder `tests` must be on the path. The processes meet in a file of FOLDER. Rank 0 runs the
law and the cases below, and writes the result of each to FOLDER/results.json; the others follow
it.
"""

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from worlds import node_replica_law as law

from farflock.node.model.ranks import Ranks
from farflock.node.model.replica_fsdp import FsdpReplica
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Progress, Result
from farflock.optimizers.parts.blocks import BLOCK_VALUES, stored
from farflock.optimizers.parts.inner import InnerConfig

TIMEOUT_S = 240.0
END, BACKWARD, LOSS = range(3)


class CountedRanks(Ranks):
    """Ranks that note the largest tensor that this process has sent or received."""

    largest = 0

    def broadcast(self, values):
        self._note(values)
        super().broadcast(values)

    def send(self, values, rank):
        self._note(values)
        super().send(values, rank)

    def receive(self, values, rank):
        self._note(values)
        super().receive(values, rank)

    def _note(self, values):
        self.largest = max(self.largest, values.numel())


class Sharded(law.Subject):
    """Each process computes its part of every batch; FSDP takes the mean of the gradients."""

    exact = False
    ranks: Ranks

    def shard(self, module):
        fully_shard(module.inside)
        fully_shard(module)
        return module

    def replica_of(self):
        return FsdpReplica(self.module, self.optimizer, law.CLIP, self.ranks)

    def backward(self, seed):
        self._together(BACKWARD, seed)

    def loss(self, seed):
        return self._together(LOSS, seed)

    def end(self):
        self._together(END, 0)

    def follow(self):
        """Serve the other processes until the leader ends the case."""
        act = BACKWARD
        while act != END:
            while self.replica.follow():
                pass
            act, _ = self._do(torch.zeros(2, dtype=torch.int64))

    def _together(self, act, seed):
        self.replica.release()
        return self._do(torch.tensor([act, seed]))[1]

    def _do(self, call):
        dist.broadcast(call, 0)
        act, seed = call.tolist()
        part, parts = dist.get_rank(), dist.get_world_size()
        value = torch.zeros(())
        if act == BACKWARD:
            law.loss_of(self.module, seed, part, parts).backward()
        if act == LOSS:
            with torch.no_grad():
                value = law.loss_of(self.module, seed, part, parts).detach().clone()
            dist.all_reduce(value)
        return act, float(value) / parts


# cases that only a sharded replica has, in addition to the law


def shards_are_really_apart(world):
    local = sum(p.to_local().numel() for p in world.module.parameters())
    whole = sum(x.numel() for x in world.all().values())
    assert 0 < local < whole


def a_method_trains_as_on_a_plain_replica(world, name="diloco"):
    """The same method over the same batches, on two processes and on one: both must agree."""
    plain = law.Subject()
    ended = []
    for each in (world, plain):
        options = {"codec": "fp32", "deadline_s": 5.0}
        if name != "ddp":
            options["period"] = 2
        if name != "noloco":
            options["return_codec"] = "fp32"
        made = method(name, **options)
        for step in range(6):
            each.backward(step)
            made.local_step(each.replica, Progress(step))
            for exchange in made.due(each.replica, Progress(step + 1)):
                sent = exchange.tensors
                taken = {what: [(0, x.numel())] for what, x in sent.items()}
                number = exchange.key.round + 1
                made.apply(
                    each.replica,
                    exchange,
                    Result("alone", number, ("me",), (1.0,), sent, None, sent, taken),
                )
        ended.append(made.snapshot(each.replica))
    world.close(*ended)


def ddp_trains_as_on_a_plain_replica(world):
    a_method_trains_as_on_a_plain_replica(world, "ddp")


def noloco_trains_as_on_a_plain_replica(world):
    a_method_trains_as_on_a_plain_replica(world, "noloco")


def state_travels_in_blocks(world):
    """Tensors of more than a block, of which one rank holds less than the other."""
    world.ranks.largest = 0
    values = torch.arange(0.0, 301 * 500).view(301, 500)
    world.replica.write({"weight": values}, "param")
    world.replica.update(("weight",), ("param", "exp_avg"), lambda block, x, m: (x + 1, x))
    assert torch.equal(world.replica.read(["weight"], "param")["weight"], values + 1)
    assert torch.equal(world.replica.read(["weight"], "exp_avg")["weight"], values)
    first = world.module.weight.to_local()
    assert torch.equal(first, values[:151] + 1)
    # what a checkpoint or a joiner reads is put together where there is room for it
    spooled = []
    world.replica.spool = lambda shape: spooled.append(torch.zeros(shape)) or spooled[-1]
    whole = stored(world.replica, "weight", "exp_avg")
    assert torch.equal(whole, values)
    assert [whole.data_ptr()] == [x.data_ptr() for x in spooled]
    assert 50_000 < world.ranks.largest <= BLOCK_VALUES


def an_unsharded_module_is_refused(world):
    law.refused(lambda: FsdpReplica(law.Net(), world.optimizer), "call fully_shard on it first")


CASES = (
    shards_are_really_apart,
    a_method_trains_as_on_a_plain_replica,
    state_travels_in_blocks,
    ddp_trains_as_on_a_plain_replica,
    noloco_trains_as_on_a_plain_replica,
    an_unsharded_module_is_refused,
)


class Wide(Sharded):
    """One large tensor, of an odd number of rows."""

    def __init__(self, inner="adamw"):
        self.module = nn.Linear(500, 301, bias=False)
        fully_shard(self.module)
        self.optimizer = InnerConfig(inner, lr=law.LR).build(self.module)
        self.replica = self.replica_of()


def run_case(case, inner):
    """None, or the traceback of what went wrong here."""
    world = Wide(inner) if case is state_travels_in_blocks else Sharded(inner)
    if dist.get_rank() != 0:
        world.follow()
        return None
    try:
        case(world)
    except Exception:
        return traceback.format_exc()
    finally:
        world.end()


def refuses_columns():
    """Return whether each side refuses shards of columns."""
    columns = nn.Linear(4, 6, bias=False)
    fully_shard(columns, shard_placement_fn=lambda parameter: Shard(1))
    inner = torch.optim.SGD(columns.parameters(), lr=0.1)
    try:
        FsdpReplica(columns, inner, ranks=Sharded.ranks)
    except ValueError as error:
        return "along its dimension 0" in str(error)
    return False


def spmd_reads():
    """Called on each side instead of through `follow`: the leader alone gets the tensors."""
    world = Sharded()
    read = world.replica.read(world.replica.names, "param")
    world.replica.write(read, "param")
    world.replica.inner_step()
    return sorted(read)


def main(rank, count, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT_S)
    )
    Sharded.ranks = CountedRanks(timeout_s=TIMEOUT_S)
    cases = [(case, "adamw") for case in (*law.LAW, *CASES)] + [
        (case, "sgd") for case in law.SGD_LAW
    ]
    results = {case.__name__: run_case(case, inner) for case, inner in cases}
    assert refuses_columns()
    names = spmd_reads()
    Path(folder, f"names-{rank}.json").write_text(json.dumps(names))
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
        Sharded.ranks.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
