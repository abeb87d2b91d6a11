"""A user's loop gets the samples that a node would train on, through workers and further lives."""

import pickle
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from worlds.prepared import prepared

import farflock
from farflock.node.data.cursor import BadCursor
from farflock.node.data.index import BadIndex
from farflock.node.data.samples import FolderShards, SampleReader, Text, TooShort
from farflock.node.data.shard_order import SampleStream
from farflock.node.errors import Usage
from farflock.node.library import samples as module

PEER = SimpleNamespace(seed=3, peer="alice")


@pytest.fixture
def content(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number} " * number)
    return prepared(tmp_path / "texts", tmp_path / "out", held_out=0.0).content


def dataset(content, **options):
    return farflock.samples(PEER, content.folder, **{"batch": 4, "seq": 16} | options)


def taken(loader, count):
    return [batch[0].tolist() for batch in islice(loader, count)]


def test_the_samples_are_those_of_the_run_s_nodes(content):
    reader = SampleReader(Text((FolderShards(content),), (1.0,)), SampleStream(3, "alice"), 17)
    rows = reader.read(0, 40)
    for number, (x, y) in zip(range(10), dataset(content), strict=False):
        assert x.dtype == y.dtype == torch.int64
        assert x.tolist() == rows[4 * number : 4 * number + 4, :-1].tolist()
        assert y.tolist() == rows[4 * number : 4 * number + 4, 1:].tolist()


@pytest.mark.parametrize("count", [1, 3])
def test_workers_share_the_batches_out_and_none_is_lost(content, monkeypatch, count):
    whole = taken(dataset(content), 12)
    found = []
    for number in range(count):
        worker = SimpleNamespace(id=number, num_workers=count)
        monkeypatch.setattr(module, "get_worker_info", lambda worker=worker: worker)
        found.append(iter(taken(dataset(content), 12 // count)))
    assert [next(found[number % count]) for number in range(12)] == whole


def test_another_life_goes_on_after_the_last_batch(content):
    whole, first = taken(dataset(content), 12), dataset(content)
    assert taken(first, 5) == whole[:5]
    other = dataset(content)
    other.load_state_dict(first.state_dict())
    assert taken(other, 4) == whole[5:9]
    assert taken(other, 3) == whole[9:]


def test_each_worker_goes_on_with_its_own_batches(content, monkeypatch):
    whole = taken(dataset(content), 12)
    worker = SimpleNamespace(id=1, num_workers=2)
    monkeypatch.setattr(module, "get_worker_info", lambda: worker)
    first = dataset(content)
    assert taken(first, 2) == [whole[1], whole[3]]
    other = dataset(content)
    other.load_state_dict(first.state_dict())
    assert taken(other, 2) == [whole[5], whole[7]]


def test_workers_of_a_loaded_dataset_go_on_together(content, monkeypatch):
    whole, first = taken(dataset(content), 12), dataset(content)
    taken(first, 5)
    other = dataset(content)
    other.load_state_dict(first.state_dict())
    copy = pickle.loads(pickle.dumps(other))
    worker = SimpleNamespace(id=1, num_workers=2)
    monkeypatch.setattr(module, "get_worker_info", lambda: worker)
    assert taken(copy, 2) == [whole[6], whole[8]]


def test_the_processes_of_a_program_have_samples_of_their_own(content, monkeypatch):
    one = taken(dataset(content), 3)
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 1)
    assert taken(dataset(content), 3) != one


@pytest.mark.parametrize("state", [{}, {"cursor": 7}, {"cursor": "zz"}])
def test_a_state_that_is_none_is_refused(content, state):
    with pytest.raises(Usage, match="it has no place in prepared data; load one of this dataset"):
        dataset(content).load_state_dict(state)


def test_mistakes_are_seen_before_the_first_batch(content, tmp_path):
    with pytest.raises(BadIndex, match="name a folder that `farflock data prepare` made"):
        farflock.samples(PEER, tmp_path, batch=1, seq=8)
    with pytest.raises(TooShort, match="train on shorter sequences"):
        dataset(content, seq=10**6)
    with pytest.raises(BadCursor, match="of another run, or of other data"):
        dataset(content).load_state_dict(dataset(content, seq=8).state_dict())
