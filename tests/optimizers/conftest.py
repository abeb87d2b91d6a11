"""The smallest replica: parameters and gradients in dictionaries, theta <- theta - lr·gradient."""

import sys

import pytest
import torch
from worlds.waiting import completed

from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.parts.blocks import BlocksOfWhole, LazyTensors
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.trial_options import quick_options


class Vectors(BlocksOfWhole):
    """Law of `Replica`, without torch modules and optimizers; steps are counted."""

    def __init__(self, lr=1.0, **values):
        self.lr, self.stepped = lr, 0
        self.tensors = {
            "param": {name: torch.as_tensor(value).clone() for name, value in values.items()}
        }

    @property
    def names(self):
        return tuple(self.tensors["param"])

    @property
    def shapes(self):
        return {name: tuple(value.shape) for name, value in self.tensors["param"].items()}

    def read(self, names, what):
        kept = self.tensors.get(what, {})
        return {
            name: kept[name].clone() if name in kept else torch.zeros(self.shapes[name])
            for name in names
        }

    def write(self, tensors, what, mix=1.0):
        for name, new in tensors.items():
            assert new.shape == self.shapes[name]
            assert mix == 1.0
            self.tensors.setdefault(what, {})[name] = new.clone()

    def inner_step(self, lr=None):
        self.stepped += 1
        for name, gradient in self.read(self.names, "grad").items():
            self.tensors["param"][name] = self.tensors["param"][name] - self.lr * gradient
        self.tensors.pop("grad", None)

    def add_gradient(self, **values):
        now = self.read(self.names, "grad")
        self.write(
            {name: now[name] + torch.as_tensor(value) for name, value in values.items()}, "grad"
        )


@pytest.fixture(autouse=True)
def held_messages(request, monkeypatch):
    """Copy each message as it is made: these tests use it as its own answer, and compare it later.
    In a loopback swarm messages are encoded at once, as in a node."""
    if request.path.parent.name == "swarm":
        return
    leave = RoundBook.leave

    def held(book, message=None):
        leave(book, message)
        if isinstance(message, LazyTensors):
            message.hold()

    monkeypatch.setattr(RoundBook, "leave", held)


@pytest.fixture(scope="session")
def vectors():
    """The class `Vectors`."""
    return Vectors


@pytest.fixture(scope="session")
def quick():
    """(name, options) -> a lossless method with rounds of two steps."""
    return lambda name, **options: method(name, **{**quick_options(METHODS[name]), **options})


@pytest.fixture
def same_bits(processors):
    """A check that `digest()` of a test's file returns the same in a process in which torch uses
    these vector instructions."""

    def check(capability, file, digest):
        if torch.backends.cpu.get_cpu_capability().lower() == capability:
            return  # the other process is compared with this one
        source = (
            "import importlib.util, torch\n"
            f"spec = importlib.util.spec_from_file_location('elsewhere', {file!r})\n"
            "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
            "print(torch.backends.cpu.get_cpu_capability(), module.digest())\n"
        )
        command = [sys.executable, "-c", source]
        run = completed(
            command, processors(capability).run, capture_output=True, text=True, check=True
        )
        seen, found = run.stdout.split()
        if seen.lower() != capability:
            pytest.skip(f"this processor runs {seen} instead of {capability}")
        assert found == digest()

    return check
