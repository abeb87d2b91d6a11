"""What no swarm can train, and the folder of another run, is refused by name at the start."""

import copy
import pickle

import pytest
import torch
from torch import nn
from worlds import virtual_optimizer
from worlds.peers import identity

from farflock.node.assembly.known_run import keep_terms, own_run
from farflock.node.errors import Usage
from farflock.node.library.door import require_own_run
from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.node.run.user_terms import fingerprint, founded, wish
from farflock.node.state.paths import RunFolder


class NoDoor:
    """A door that must not be opened."""

    def enter(self, join_request):
        raise AssertionError("something was started")


def of_zero_3():
    model = nn.Sequential(nn.Linear(8, 8))
    weight = model[0].weight
    weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2, device="meta")), "0.weight: it is on the meta"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight: it has no shape yet"),
        (of_zero_3, "0.weight: it is a shard of DeepSpeed's ZeRO-3"),
        (lambda: nn.Embedding(3, 2, sparse=True), "parameter weight: its gradients are sparse"),
        (
            lambda: nn.Sequential(nn.EmbeddingBag(3, 2, mode="sum", sparse=True)),
            "parameter 0.weight: its gradients are sparse; use the layer with sparse=False",
        ),
    ],
)
def test_it_is_refused_by_name(model, says):
    with pytest.raises(Usage, match=says) as refused:
        SwarmOptimizer(model(), invite=NoDoor())
    assert "\n" not in str(refused.value)


def test_a_sparse_layer_may_be_frozen():
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True).requires_grad_(False), nn.Linear(2, 1))
    virtual_optimizer.alone(model).close(patient=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied(copied):
    optimizer = virtual_optimizer.alone(nn.Linear(2, 2))
    with pytest.raises(Usage, match="cannot be copied or pickled: it is one peer of a run"):
        copied(optimizer)
    optimizer.close(patient=False)


def wished(width=3, **options):
    model = torch.nn.Linear(width, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    run = {"name": None, "seed": None}
    return wish(fingerprint(model, inner), "diloco", run, options)


def run_of(key, told):
    return own_run(key, founded(told))


def test_a_folder_of_another_run_is_refused_with_what_differs_and_nothing_is_lost(tmp_path):
    key, folder, told = identity(1), RunFolder(tmp_path), wished()
    known = run_of(key, told)
    require_own_run(folder, known.run, told)
    keep_terms(folder.terms, known)
    kept = folder.terms.read_bytes()
    require_own_run(folder, known.run, told)
    for other, what in (
        (wished(width=4), "in which model"),
        (wished(period=7), "in which method.options.period differs: it is 7 here and"),
    ):
        with pytest.raises(Usage, match=f"belongs to another run: .*{what}"):
            require_own_run(folder, run_of(key, other).run, other)
    another = run_of(identity(2), told).run  # its key is gone
    with pytest.raises(Usage, match=f"belongs to another run: it is of run {known.run[:8]}; give"):
        require_own_run(folder, another, told)
    assert folder.terms.read_bytes() == kept
