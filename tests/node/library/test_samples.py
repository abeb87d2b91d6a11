"""A user's own loop gets the samples that its peer draws, whoever has the data, and goes on at the
next one."""

import itertools

import pytest
import torch
from torch import nn
from worlds.prepared import documents_of, prepared

import farflock
from farflock.node.assembly.text import listed_text
from farflock.node.data.index import read_index
from farflock.node.data.local_data import LocalData
from farflock.node.data.sequences import PackedBatches
from farflock.node.errors import RefusedByRun, Usage
from farflock.node.library import samples as module

BATCH, SEQ = 4, 32
QUICK = {"view_s": 1.0, "deadline_s": 10.0, "period": 4}
MIX = {"web": 3, "code": 1}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A prepared folder and its root; each call has a cache of its own, as on machines of their
    own."""
    caches = itertools.count()
    monkeypatch.setattr(module, "data_cache", lambda: tmp_path / f"cache-{next(caches)}")
    sources = {"web": documents_of(300), "code": documents_of(200, seed=9_000)}
    (tmp_path / "texts").mkdir()
    return tmp_path / "texts", prepared(tmp_path / "texts", sources, shards=6)


def expected(folder, root, peer):
    """The batches of this peer, from the folder itself."""
    local = LocalData(root, [folder], folder / "unused")
    index = read_index(local.index_bytes(), "it", root)
    return PackedBatches(listed_text(index, local, MIX), 0, peer, BATCH, SEQ)


def trained(optimizer, model, batches):
    """Train on these batches, one a step; return them."""
    seen = []
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        seen.append((x, y))
    return seen


def test_peers_with_and_without_the_data_draw_what_the_pure_function_says(texts):
    folder, root = texts

    def work(rank, optimize):
        model = nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        optimizer = optimize(model, lr=1e-2)
        stream = farflock.samples(
            optimizer, root if rank else folder, batch=BATCH, seq=SEQ, mix=MIX
        )
        seen = trained(optimizer, model, itertools.islice(stream, 8))
        again = farflock.samples(optimizer, folder, batch=BATCH, seq=SEQ, mix=MIX)
        return optimizer.peer, [*seen, next(again)]

    with farflock.local_swarm(2, "diloco", **QUICK) as swarm:
        found = swarm.train(work)
    assert len({peer for peer, _ in found}) == 2
    for peer, seen in found:
        batches = expected(folder, root, peer)
        for step, (x, y) in enumerate(seen):  # the last is of another iterator, begun at step 8
            assert torch.equal(x, batches.batch(step)[0])
            assert torch.equal(y, batches.batch(step)[1])


@pytest.mark.parametrize("root", ["nowhere", "ab" * 31, "zz" * 32])
def test_what_is_no_data_is_refused_in_words(root):
    with farflock.local_swarm(1, "diloco", **QUICK) as swarm:
        (error,) = swarm.train(lambda rank, optimize: refused(optimize(nn.Linear(1, 1)), root))
    assert "neither a folder of prepared data nor a root of 64 hexadecimal digits" in error


def refused(optimizer, root):
    with pytest.raises(Usage) as error:
        farflock.samples(optimizer, root, batch=1, seq=8)
    return str(error.value)


def test_data_that_nobody_has_is_refused_at_once(texts):
    def work(rank, optimize):
        optimizer = optimize(nn.Linear(1, 1))
        with pytest.raises(RefusedByRun) as error:
            farflock.samples(optimizer, "ab" * 32, batch=1, seq=8)
        return str(error.value)

    with farflock.local_swarm(1, "diloco", **QUICK) as swarm:
        (error,) = swarm.train(work)
    assert "is not on this machine" in error
