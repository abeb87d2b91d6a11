"""The long tests, divided into parts of at most 20 minutes on two idle cores.

`make test-long PART=2` runs one; docs/testing.md says when each was run last. A long test belongs
to the part that names its folder or file, or the beginning of its own name. Many seeds of one
simulation come in blocks of at most 50, whose names begin with the first of them.
"""

from dataclasses import dataclass

MAX_LIMIT_S = 1200  # of any test
MARKS = "long and not gpu"


@dataclass(frozen=True)
class LongPart:
    """What a part is about, the beginnings of its tests' names, and the marks of its tests."""

    what: str
    tests: tuple[str, ...]
    marks: str = MARKS

    def has(self, test):
        return test.startswith(self.tests)

    def may_have(self, path):
        """Return whether tests of a file, or below a folder, may belong to it."""
        files = tuple(name.partition("::")[0] for name in self.tests)
        return path.startswith(files) or any(name.startswith(path) for name in files)


SEEDS = "tests/sim/test_seeds.py::test_two_thousand_seeds_violate_nothing"
CHURN = "tests/sim/test_pipeline.py::test_two_hundred_seeds_of_a_swarm_of_24_with_churn"
PIPELINES = "tests/sim/test_seeds.py::test_five_hundred_seeds_of_pipelines_violate_nothing"
RETURNS = "tests/sim/test_seeds.py::test_five_hundred_seeds_of_returns_violate_nothing"
SIZE = "tests/net/at_size/test_models.py::test"
_PARTS = [
    LongPart(
        "everyday tests of hypothesis, with more examples, new in each run",
        ("tests/",),
        "hypothesis and not long and not gpu",
    ),
    LongPart("seeded disasters of whole swarms, seeds 0 to 999", (f"{SEEDS}[0",)),
    LongPart("seeded disasters of whole swarms, seeds 1000 to 1999", (f"{SEEDS}[1",)),
    LongPart("a pipeline swarm of 24 with churn, seeds 0 to 99", (f"{CHURN}[0",)),
    LongPart("a pipeline swarm of 24 with churn, seeds 100 to 199", (f"{CHURN}[1",)),
    LongPart(
        "other pipelines: direct transfer, replicas, codecs, delays",
        (
            "tests/node/pipeline/",
            "tests/sim/test_asynchronous.py",
            "tests/sim/test_mixed.py",
            "tests/sim/test_pipeline.py::test_a_",
            "tests/sim/test_pipeline.py::test_gradients_",
            "tests/sim/test_pipeline.py::test_unequal_",
            "tests/sim/test_pipeline_",
            "tests/sim/test_planned.py",
            "tests/sim/test_selective.py",
        ),
    ),
    LongPart(
        "protocols, and the laws of methods",
        ("tests/optimizers/", "tests/sim/test_conformance.py", "tests/swarm/"),
    ),
    LongPart(
        "whole runs: shipped manifests, sizes, endings, restarts, devices, threads",
        (
            "tests/experiments/placement/",
            "tests/node/assembly/test_on_device.py",
            "tests/node/assembly/test_resume.py",
            "tests/node/data/",
            "tests/node/library/",
            "tests/node/process/",
            "tests/node/simulate/",
            "tests/node/test_loop.py",
            "tests/node/train/",
            "tests/sim/test_any_size.py",
            "tests/sim/test_endings.py",
            "tests/sim/test_runs.py",
        ),
    ),
    LongPart(
        "real processes",
        (
            "tests/experiments/bench/",
            "tests/net/test_a",
            "tests/net/test_d",
            "tests/net/test_e",
            "tests/net/test_f",
            "tests/net/test_i",
            "tests/net/test_mixed",
            "tests/net/test_more_examples",
            "tests/net/test_p",
            "tests/net/test_r",
            "tests/node/assembly/test_followers.py",
            "tests/test_packaging.py",
        ),
    ),
    LongPart(
        "seeded disasters of pipelines, all methods, seeds 0 to 249",
        tuple(f"{PIPELINES}[{first}" for first in ("0", "1", "200", "225")),
    ),
    LongPart(
        "seeded disasters of pipelines, all methods, seeds 250 to 499",
        tuple(f"{PIPELINES}[{first}" for first in ("250", "275", "3", "4")),
    ),
    LongPart("models that transformers has made, at size, in three stages", (f"{SIZE}_three",)),
    LongPart("the same models whole, with a joiner", (f"{SIZE}_a_joiner",)),
    LongPart("seeded disasters of returns, all methods, seeds 0 to 499", (RETURNS,)),
]
LONG = {f"long-{number}": part for number, part in enumerate(_PARTS, 1)}


def what_is_wrong(test, limits_s):
    """Return what is wrong with a long test of this name and these limits, or None."""
    if sum(part.marks == MARKS and part.has(test) for part in LONG.values()) != 1:
        return f"{test} is long, so exactly one part of tests/long_parts.py has to have it"
    if max(limits_s, default=0) > MAX_LIMIT_S:
        return f"{test} may take {max(limits_s)} s; divide it: no limit is above {MAX_LIMIT_S} s"
    return None
