"""A model that cannot fit is refused by arithmetic alone, with the numbers."""

from types import SimpleNamespace

import psutil
import pytest

from farflock.node.errors import Failure, RefusedByRun
from farflock.node.run.manifest import resolve
from farflock.node.run.memory import needed_bytes, require_memory


def manifest(model="10m", method="diloco", **train):
    return resolve({"model": {"preset": model}, "method": {"name": method}, "train": train}).plan()


def test_it_is_as_much_as_whole_nodes_were_seen_to_take():
    """Peak memory above a tiny model's node, as measured with batches of 2 x 32 tokens."""
    seen_bytes = {"local": 861e6, "ddp": 1298e6, "noloco": 1293e6, "diloco": 1251e6}
    for method, peak_bytes in seen_bytes.items():
        assert (
            peak_bytes <= needed_bytes(manifest(method=method, batch=2, seq=32)) <= 1.2 * peak_bytes
        )


def test_a_larger_batch_takes_more_and_accumulation_does_not():
    one, two = (needed_bytes(manifest(batch=batch, seq=64)) for batch in (8, 16))
    assert two > one
    assert needed_bytes(manifest(batch=8, seq=64, accumulate=4)) == one


@pytest.mark.parametrize("kind", [RefusedByRun, Failure])
def test_the_refusal_says_how_much_is_needed_and_how_much_there_is(monkeypatch, kind):
    run = manifest()
    needed = needed_bytes(run)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    require_memory(run, kind)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    with pytest.raises(
        kind, match=rf"about {needed / 1e6:,.0f} MB of memory, and {needed / 1e6:,.0f} MB are free"
    ):
        require_memory(run, kind)


def test_the_largest_model_that_a_manifest_can_name_is_answered_at_once():
    model = {
        "dim": 65_536,
        "layers": 1024,
        "heads": 1024,
        "kv_heads": 1024,
        "ffn_dim": 262_144,
        "context": 131_072,
    }
    with pytest.raises(Failure, match="too large for this machine"):
        require_memory(resolve({"model": model}).plan(), Failure)
