"""Shared fixtures: golden files, processes that start fast, and each test's own log level.

`pytest --write-golden` rewrites tests/golden; the change is reviewed as a diff.
"""

import gc
import json
import logging
import signal
import sys
from pathlib import Path

import hypothesis
import numpy as np
import parts
import pytest
import torch
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from nursery import Nursery
from purity import GUARD

pytest.register_assert_rewrite("worlds")

from worlds.card import CARD, register  # noqa: E402 - its assertions are to be rewritten too

HAS_CARD = register()

# A shell without job control starts background processes with Ctrl-C ignored, and their children
# inherit that. The tests send Ctrl-C, so it is switched on again.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The everyday examples are a function of the tree, so that a commit is judged by the same tests
# wherever and whenever it is judged. `make test-long` searches further, at random.
NOT_BY_TIME = [hypothesis.HealthCheck.too_slow]  # it judges the machine
hypothesis.settings.register_profile(
    "everyday",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=NOT_BY_TIME,
)
hypothesis.settings.register_profile(
    "long",
    max_examples=200,
    deadline=None,
    derandomize=False,
    suppress_health_check=NOT_BY_TIME,
    database=hypothesis.database.DirectoryBasedExampleDatabase(".hypothesis/examples"),
)
hypothesis.settings.load_profile("everyday")
# hypothesis takes constants from the code that is loaded, so the tests before a test would decide
# its examples. The random search goes on with them.
constants_of_loaded_code = providers._get_local_constants


def constants():
    """Those of hypothesis itself, where examples are a function of the tree."""
    return Constants() if hypothesis.settings.default.derandomize else constants_of_loaded_code()


providers._get_local_constants = constants

GOLDEN = Path(__file__).parent / "golden"
NURSERIES = []  # they end with the session


def pytest_addoption(parser):
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="rewrite tests/golden/*.json with what the code does now",
    )
    parts.add_options(parser)


def pytest_configure(config):
    config.pluginmanager.register(parts.Parts(config), "parts")
    gc.disable()  # until all is imported, next to nothing ends


def pytest_collection_finish(session):
    spare_the_collector()
    gc.enable()


def spare_the_collector():
    """Let the garbage collector leave out what is there: modules, tests and their reports hold
    millions of objects, and some tests collect often."""
    gc.collect()
    gc.freeze()


def watched(item):
    """A wrapper of a test's phase that sees what a pure test touches."""
    if item.get_closest_marker("net"):
        return (yield)
    with GUARD.watching():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    GUARD.begin()
    return (yield from watched(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from watched(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    done = yield from watched(item)
    if not item.get_closest_marker("net"):
        GUARD.end()
    if nextitem is not None and nextitem.path != item.path:
        spare_the_collector()
    return done


def pytest_sessionfinish():
    """End what all tests share, after the last test's teardown, which is watched."""
    while NURSERIES:
        NURSERIES.pop().close()


@pytest.fixture
def card():
    """Plug a device with a memory of its own into this machine; see worlds/card.py."""
    if not HAS_CARD:
        pytest.skip("it needs torch 2.13, on a machine without a device of its own")
    yield CARD.plug_in()
    CARD.unplug()


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.gpu)])
def accelerator(request):
    """Return a device beside the CPU: the double, and with `-m gpu` the machine's own."""
    return accelerator_of(request, request.param)


def accelerator_of(request, kind):
    """Return the "double" or the "real" device; skip the test if there is none."""
    if kind == "double":
        return request.getfixturevalue("card")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        pytest.skip("this machine has no device beside the CPU")
    return found


@pytest.fixture(params=["cpu", "double", pytest.param("real", marks=pytest.mark.gpu)])
def elsewhere(request):
    """Return each device: the CPU, the double, and with `-m gpu` the machine's own."""
    return torch.device("cpu") if request.param == "cpu" else accelerator_of(request, request.param)


@pytest.fixture
def single(accelerator):
    """The accelerator, computing in the CPU's precision."""
    from farflock.node.model.device import Device  # it imports a lot

    return Device(accelerator, "Single", "fp32")


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("double", marks=pytest.mark.long),
        pytest.param("real", marks=pytest.mark.gpu),
    ]
)
def anywhere(request, monkeypatch):
    """The stages of simulated pipelines are on the CPU, or all on a device beside it."""
    if request.param != "cpu":
        place_all(monkeypatch, accelerator_of(request, request.param))


def place_all(monkeypatch, accelerator):
    """Put the stages of all simulated peers on a device, computing in the CPU's precision."""
    from farflock.node.model.device import Device  # they import a lot
    from farflock.node.simulate import pipeline

    real, there = pipeline.NodeServices, Device(accelerator, "Single", "fp32")
    monkeypatch.setattr(
        pipeline, "NodeServices", lambda *given, **named: real(*given, **named | {"device": there})
    )


@pytest.fixture(autouse=True)
def own_log_level():
    """Commands set our logger's level as their process's own; the next test must not inherit it."""
    logger = logging.getLogger("farflock")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def quiet_log():
    """No messages of calls that fail because a test killed a peer; `own_log_level` undoes it."""
    logging.getLogger("farflock").setLevel(logging.CRITICAL)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    """A process that forks itself for each command that a test starts: see nursery.py."""
    NURSERIES.append(Nursery(tmp_path_factory.mktemp("nursery")))
    return NURSERIES[-1]


@pytest.fixture
def forked(nursery, tmp_path_factory, monkeypatch):
    """Let each Python process that the product starts be a fork of the nursery."""
    stand_in = nursery.stand_in(tmp_path_factory.mktemp("stand-in") / "python")
    monkeypatch.setattr(sys, "executable", str(stand_in))


@pytest.fixture(scope="session")
def processors(tmp_path_factory):
    """The nursery whose torch and numpy use a level of vector instructions: "default" or "avx2".

    "default" means no vector instructions beyond the processor's baseline.
    """
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    disabled = {"default": " ".join(found), "avx2": ""}
    made = {}

    def of(level):
        if level not in made:
            made[level] = Nursery(
                tmp_path_factory.mktemp(level),
                # the first computes at import, so torch chooses its instructions here
                ("farflock.optimizers.decoupled", "farflock.node.train.shards"),
                ATEN_CPU_CAPABILITY=level,
                NPY_DISABLE_CPU_FEATURES=disabled[level],
            )
            NURSERIES.append(made[level])
        return made[level]

    return of


@pytest.fixture
def golden(request):
    """A function (name, actual) that returns what tests/golden/NAME.json holds.

    With --write-golden it first writes `actual` there.
    """

    def expected(name, actual):
        path = GOLDEN / f"{name}.json"
        if request.config.getoption("--write-golden"):
            path.write_text(json.dumps(actual, indent=1) + "\n")
        return json.loads(path.read_text())

    return expected
