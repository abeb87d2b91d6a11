"""The long tests, divided into parts of at most 20 minutes on two idle cores.

`make test-long PART=2` runs one; docs/testing.md says when each was run last. A long test belongs
to the part that names its file or folder, or the beginning of its own name.
"""

from dataclasses import dataclass

MAX_LIMIT_S = 1200  # of any test


@dataclass(frozen=True)
class LongPart:
    """What a part is about, the beginnings of its tests' names, and the marks of its tests."""

    what: str
    tests: tuple[str, ...]
    marks: str = "long and not gpu"

    def has(self, test):
        return test.startswith(self.tests)

    @property
    def files(self):
        """The files and folders that hold its tests."""
        return list(dict.fromkeys(name.partition("::")[0] for name in self.tests))


RANDOM = LongPart(
    "everyday tests of hypothesis, with more examples, new in each run",
    ("tests/",),
    "hypothesis and not long and not gpu",
)
LONG = {
    1: RANDOM,
    2: LongPart("seeded disasters of whole swarms", ("tests/sim/test_seeds.py",)),
    3: LongPart("a pipeline swarm of 24 with churn", ("tests/sim/test_pipeline.py",)),
    4: LongPart(
        "other pipelines: direct transfer, replicas, codecs, delays",
        (
            "tests/node/pipeline/",
            "tests/sim/test_asynchronous.py",
            "tests/sim/test_mixed.py",
            "tests/sim/test_pipeline_codecs.py",
            "tests/sim/test_pipeline_direct.py",
            "tests/sim/test_pipeline_samples.py",
            "tests/sim/test_pipeline_spoilt.py",
            "tests/sim/test_pipeline_subspace.py",
            "tests/sim/test_selective.py",
        ),
    ),
    5: LongPart(
        "protocols, and the laws of methods",
        ("tests/optimizers/", "tests/sim/test_conformance.py", "tests/swarm/"),
    ),
    6: LongPart(
        "whole runs: shipped manifests, sizes, restarts, devices, threads",
        (
            "tests/experiments/placement/",
            "tests/node/assembly/test_on_device.py",
            "tests/node/assembly/test_resume.py",
            "tests/node/simulate/",
            "tests/node/train/",
            "tests/sim/test_any_size.py",
            "tests/sim/test_runs.py",
        ),
    ),
    7: LongPart(
        "real processes",
        (
            "tests/experiments/bench/",
            "tests/net/",
            "tests/node/assembly/test_followers.py",
            "tests/test_packaging.py",
        ),
    ),
}


def numbers_of(test):
    """Return the numbers of the parts to which a long test belongs."""
    return [number for number, part in LONG.items() if part is not RANDOM and part.has(test)]


def fault_of(test, limits_s):
    """Return what is wrong with a long test of this name and these limits, or None."""
    if len(numbers_of(test)) != 1:
        return f"{test} is long, so exactly one part of LONG has to have it (tests/long_parts.py)"
    if max(limits_s, default=0) > MAX_LIMIT_S:
        return f"{test} may take {max(limits_s)} s; divide it: no limit is above {MAX_LIMIT_S} s"
    return None
