"""Means and outer steps have the same bits whatever vector instructions torch uses."""

import json
import sys

import pytest
import torch
from worlds.waiting import completed

pytestmark = pytest.mark.net

SCRIPT = """
import hashlib, json, torch
from farflock.compression.catalog import codec
from farflock.compression.elementwise import weighted_mean
from farflock.node.train.shards import Reducer, ShardLayout
from farflock.optimizers.parts.feedback import message
from farflock.optimizers.parts.outer import OuterHeavyBall, OuterNesterov, OuterSGD

def mixed(count, seed):
    h = (torch.arange(count) + seed * 1_000_003) * 2_654_435_761 & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 2_246_822_519) & 0xFFFFFFFF
    return ((h ^ (h >> 13)) - 2**31).to(torch.float32) * 2.0**-40

def digest(*tensors):
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in tensors)).hexdigest()

report = {"capability": torch.backends.cpu.get_cpu_capability()}
for outer in (OuterSGD(0.7), OuterNesterov(), OuterHeavyBall(0.6, 0.3)):
    phi, u = mixed(10_007, 1), torch.zeros(10_007)
    for seed in range(5):
        phi, u = outer.step(phi, mixed(10_007, seed + 2), u)
    report[type(outer).__name__] = digest(phi, u)
weights = (1.0, 3.0, 0.1, 4096.0, 7.0)
inputs = [(weight, [mixed(4099, seed), mixed(17, seed)]) for seed, weight in enumerate(weights)]
report["mean"] = digest(*weighted_mean(inputs))
report["feedback"] = digest(message(mixed(4099, 8), mixed(4099, 9), 0.9))
shapes = {"a": (4099,), "b": (17,)}
for out in ("int8", "topk:64/4096"):
    cut = ShardLayout.of(shapes, codec(out))
    payloads = [
        (str(n), weight, cut.pack(0, 0, values)) for n, (weight, values) in enumerate(inputs)
    ]
    reduced = Reducer(cut, codec("bf16"), compensate=False).reduce(0, 0, payloads)
    report[out] = hashlib.sha256(reduced.data).hexdigest()
print(json.dumps(report))
"""


def report(processor):
    command = [sys.executable, "-c", SCRIPT]
    done = completed(command, processor.run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_means_outer_steps_and_reductions_are_equal_with_and_without_vector_instructions(
    processors,
):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no vector instructions that torch knows")
    plain, vector = (report(processors(level)) for level in ("default", "avx2"))
    assert (plain.pop("capability"), vector.pop("capability")) == ("DEFAULT", "AVX2")
    assert vector == plain
    assert len(set(plain.values())) == len(plain) == 7
