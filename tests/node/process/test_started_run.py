"""A founder that cannot hand out the weights of its run is refused before anything starts."""

from dataclasses import replace

import pytest
from worlds.model_folder import write_model

from farflock.node.errors import Failure
from farflock.node.process.entering import found
from farflock.node.process.network import MachineOptions
from farflock.node.run.manifest import resolve
from farflock.node.state.paths import RunFolder
from farflock.swarm.identity import Identity
from farflock.swarm.sim.virtual_time import run_virtual


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def machine(tmp_path):
    folder = RunFolder.at(tmp_path / "node")
    Identity.from_seed(bytes([1]) * 32).save(folder.identity)
    return MachineOptions(folder)


def described(folder):
    return resolve({"model": {"from": str(folder)}, "train": {"batch": 2, "seq": 32}})


def refusal(machine, manifest):
    with pytest.raises(Failure) as caught:
        run_virtual(found(machine, manifest, lambda node: pytest.fail("it has started")))
    return str(caught.value)


def test_a_founder_without_the_folder_is_refused(machine, folder):
    said = refusal(machine, described(folder))
    assert said.startswith("the run cannot begin here: it starts from trained weights")


def test_a_founder_with_other_weights_is_refused(machine, folder, tmp_path):
    other = replace(machine, model=write_model(tmp_path / "other", seed=5))
    said = refusal(other, described(folder))
    assert "it starts from the weights" in said
    assert said.endswith("name the folder with the weights that the manifest means")
