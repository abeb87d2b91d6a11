"""A program starts its own run only in a folder that is of no other one."""

import pytest
import torch
from worlds.peers import identity

from farflock.node.assembly.known_run import keep_terms, own_run
from farflock.node.errors import Usage
from farflock.node.library.door import require_own_run
from farflock.node.run.user_terms import fingerprint, founded, wish
from farflock.node.state.paths import RunFolder


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
