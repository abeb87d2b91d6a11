"""The basis of a run: made from the seed, bit by bit alike, only as the manifest names it."""

import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.waiting import completed

from farflock.compression.activation import Incompatible
from farflock.compression.subspace import Basis
from farflock.node.model.llama import ModelConfig, build
from farflock.node.run.basis import (
    MAX_RANK,
    basis_bytes,
    largest_rank,
    orthonormal,
    require_digest,
    run_basis,
)


@given(st.integers(0, 2**31 - 1), st.integers(2, 40), st.data())
@settings(max_examples=40, deadline=None)
def test_columns_are_orthonormal_whatever_the_seed_and_the_sizes(seed, width, data):
    rank = data.draw(st.integers(1, largest_rank(width)))
    basis = run_basis(seed, width, rank, 5)
    assert (basis.version, basis.width, basis.rank, tuple(basis.fixed_VD.shape)) == (
        1,
        width,
        rank,
        (5, width),
    )
    wide = basis.columns_DK.double()
    assert float((wide.T @ wide - torch.eye(rank)).abs().amax()) < 1e-6
    assert float((basis.exact_DK.T @ basis.exact_DK - torch.eye(rank)).abs().amax()) < 1e-14
    assert float((basis.exact_DK - wide).abs().amax()) < 1e-6


def test_it_follows_from_seed_and_sizes_and_from_nothing_else():
    made = run_basis(7, 24, 5, 50)
    torch.manual_seed(99)
    run_basis.cache_clear()
    again = run_basis(7, 24, 5, 50)
    assert again is not made
    assert again.digest == made.digest
    assert torch.equal(again.columns_DK, made.columns_DK)
    others = [
        run_basis(8, 24, 5, 50),
        run_basis(7, 24, 6, 50),
        run_basis(7, 24, 5, 51),
        run_basis(7, 26, 5, 50),
    ]
    assert len({made.digest, *(other.digest for other in others)}) == 5
    assert Basis.from_bytes(made.to_bytes(), made.digest).digest == made.digest


def test_its_bits_are_written_down():
    """Another version of this program must draw the same basis, or it cannot take part in a run."""
    assert run_basis(1, 32, 4, 20).digest.hex()[:16] == "a9a34ee954a75d3c"


def test_the_frozen_embedding_is_spread_as_initial_weights_are():
    config = ModelConfig(
        vocab_size=512, dim=64, layers=1, heads=2, kv_heads=1, ffn_dim=16, context=8, tied=False
    )
    usual = dict(build(config, 0).named_parameters())["model.embed_tokens.weight"].detach()
    table = run_basis(0, 64, 8, 512).fixed_VD
    assert float(table.std()) == pytest.approx(float(usual.std()), rel=0.02)
    assert abs(float(table.mean())) < 0.02 * float(table.std())
    assert float((table[:, :-1] * table[:, 1:]).mean()) < 0.02 * float(table.var())


def test_a_random_subspace_prefers_no_coordinate():
    shares = run_basis(0, 512, 64, 2).columns_DK.square().sum(1)
    assert float(shares.mean()) == pytest.approx(64 / 512, rel=1e-6)
    assert 0.2 < float(shares.amin() / shares.mean()) <= float(shares.amax() / shares.mean()) < 2


@pytest.mark.parametrize(("width", "rank"), [(8, 0), (8, 5), (1, 1), (10_000, MAX_RANK + 1)])
def test_a_rank_that_saves_nothing_is_refused(width, rank):
    with pytest.raises(
        ValueError, match=f"for a width of {width} has a rank from 1 to .*, not {rank}"
    ):
        run_basis(0, width, rank, 2)


def test_columns_that_depend_on_each_other_are_refused():
    with pytest.raises(ValueError, match="not independent"):
        orthonormal(torch.ones(6, 2, dtype=torch.float64))


def test_the_nearest_orthonormal_matrix_is_the_polar_factor():
    matrix = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(orthonormal(matrix), left @ right, rtol=0, atol=1e-11)


def test_another_digest_than_the_named_one_is_refused():
    basis = run_basis(1, 32, 4, 20)
    assert require_digest(basis, None) is require_digest(basis, basis.digest.hex()) is basis
    with pytest.raises(
        Incompatible,
        match=r"with digest [0-9a-f]{16}, and the manifest names 000.*; update farflock",
    ):
        require_digest(basis, "0" * 64)


def test_its_memory_is_known_before():
    basis = run_basis(1, 32, 4, 20)
    tensors = (basis.columns_DK, basis.fixed_VD, basis.exact_DK)
    assert basis_bytes(32, 4, 20) == sum(x.nbytes for x in tensors)


SCRIPT = """
import hashlib, json, torch
from farflock.compression.subspace import project
from farflock.node.run.basis import run_basis
from farflock.optimizers.parts.philox import words
basis = run_basis(3, 200, 30, 64)
drawn = {
    name: (words(9, at, 0, 200 * 77) - 2**31).float().view(200, 77) * 2.0**-33
    for at, name in enumerate("ab")
}
drawn["b"] = drawn["b"].T.contiguous()
project(drawn, {"a": 0, "b": 1}, basis)
bits = b"".join(x.contiguous().numpy().tobytes() for x in drawn.values())
report = {"capability": torch.backends.cpu.get_cpu_capability(), "basis": basis.digest.hex()}
print(json.dumps(report | {"projected": hashlib.sha256(bits).hexdigest()}))
"""


@pytest.mark.net
def test_bases_and_projections_are_equal_with_and_without_vector_instructions(processors):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no vector instructions that torch knows")
    reports = []
    for level in ("default", "avx2"):
        command = [sys.executable, "-c", SCRIPT]
        done = completed(command, processors(level).run, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    assert [report.pop("capability") for report in reports] == ["DEFAULT", "AVX2"]
    assert reports[0] == reports[1]
