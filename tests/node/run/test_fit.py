"""A machine may keep the inner moments in fewer bytes where nobody else's depend on them."""

import pytest

from farflock.node.errors import Usage
from farflock.node.run.fit import SHARED_MOMENTS, AveragesMoments, require_moments
from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.parts.inner import InnerConfig

ADAMW = InnerConfig()


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_methods_whose_replicas_share_moments_refuse_small_ones(name, moments):
    made = method(name)
    require_moments(name, made, ADAMW, "fp32", in_stages=False)
    averages = isinstance(made, AveragesMoments) and made.averaged_moments()
    if name in SHARED_MOMENTS or averages:
        with pytest.raises(Usage, match=f"--moments {moments}.*with method {name}"):
            require_moments(name, made, ADAMW, moments, in_stages=False)
    else:
        require_moments(name, made, ADAMW, moments, in_stages=False)


def test_some_methods_share_and_some_do_not():
    for name in ("diloco", "local", "lean", "sparseloco"):
        require_moments(name, method(name), ADAMW, "int8", in_stages=False)
    with pytest.raises(Usage, match="all replicas have the same moments"):
        require_moments("ddp", method("ddp"), ADAMW, "int8", in_stages=False)


@pytest.mark.parametrize("name", ["sgd", "muon", "nadam"])
def test_other_optimizers_refuse_small_moments(name):
    with pytest.raises(Usage, match=f"the run's optimizer is {name}"):
        require_moments("diloco", method("diloco"), InnerConfig(name), "int8", in_stages=False)


def test_pipelines_refuse_small_moments():
    with pytest.raises(Usage, match="this run is a pipeline"):
        require_moments("diloco", method("diloco"), ADAMW, "bf16", in_stages=True)
    require_moments("diloco", method("diloco"), ADAMW, "fp32", in_stages=True)
