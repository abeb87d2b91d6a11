"""Many seeds of one simulation, in blocks that are a test each."""

import pytest

BLOCK = 50  # so that a test has time enough on a machine with five times as much to do


def blocks(first, end, size=BLOCK):
    """Parametrize a test by `seeds`, a range of at most `size`; its name has the first of them."""
    digits = len(str(end - 1))
    return pytest.mark.parametrize(
        "seeds",
        [
            pytest.param(range(at, min(at + size, end)), id=f"{at:0{digits}}")
            for at in range(first, end, size)
        ],
    )


def each(seeds, run):
    """Run every seed; return the results, or fail with what each seed that failed said."""
    results, failures = [], []
    for seed in seeds:
        try:
            results.append(run(seed))
        except (AssertionError, TimeoutError, RuntimeError) as error:
            failures.append(f"seed {seed}: {error!r:.300}")
    assert not failures, "\n".join(failures)
    return results
