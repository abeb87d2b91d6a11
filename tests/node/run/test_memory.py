"""A model that cannot fit is refused by arithmetic alone, with the numbers."""

from types import SimpleNamespace

import psutil
import pytest
from worlds.card import CARD

from farflock.node.errors import Failure, RefusedByRun
from farflock.node.model.device import Device
from farflock.node.run.manifest import resolve
from farflock.node.run.memory import (
    WHOLE_BATCH,
    Exchanged,
    StepChoices,
    evaluation_bytes,
    kept_outer,
    needed_bytes,
    needed_device_bytes,
    require_memory,
)
from farflock.node.train.run_size import exchanged


def manifest(model="10m", method="diloco", **train):
    return resolve({"model": {"preset": model}, "method": {"name": method}, "train": train}).plan()


SHAPES = {  # width, layers, heads, hidden width
    "10m": (320, 8, 8, 864),
    "60m": (640, 12, 10, 1728),
}
# Peak anonymous memory of whole nodes with AdamW above that of a tiny model's node, MiB: a founder
# or a member from the start, with checkpoints, batches of 1 x 32 tokens; at 60m with a joiner,
# and 64 tokens.
SEEN_MIB = {
    ("10m", "local"): 166,
    ("10m", "ddp"): 612,
    ("10m", "diloco"): 432,
    ("10m", "sparseloco"): 268,
    ("60m", "diloco"): 1899,
}


@pytest.mark.parametrize(("size", "method"), SEEN_MIB)
def test_it_is_as_much_as_whole_nodes_were_seen_to_take(size, method):
    dim, layers, heads, hidden = SHAPES[size]
    shape = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": heads, "ffn_dim": hidden}
    options = {"options": {"codec": "int8"}} if method == "diloco" else {}
    plan = resolve(
        {
            "model": shape | {"context": 1024},
            "method": {"name": method, **options},
            "train": {"batch": 1, "seq": 32},
        }
    ).plan()
    seen_bytes = SEEN_MIB[size, method] * 2**20
    assert seen_bytes <= needed_bytes(plan, exchanged(plan)) <= 1.35 * seen_bytes


def test_what_is_kept_beside_the_model_is_counted():
    alone, adamw = needed_bytes(manifest(), Exchanged()), manifest().model.parameters() * 4
    assert needed_bytes(manifest(), Exchanged(8000, 100, 1000, 50)) - alone == (
        8000 + 100 + 1250 + 50 + 8000 // 8
    )
    sgd = needed_bytes(manifest(optimizer="sgd"), Exchanged())
    assert sgd < alone - 1.9 * adamw


def test_small_moments_are_counted_beside_what_a_checkpoint_makes_of_them():
    plan, weights = manifest(), manifest().model.parameters()
    fp32, bf16, int8 = (
        needed_bytes(plan, Exchanged(), StepChoices(moments=kind))
        for kind in ("fp32", "bf16", "int8")
    )
    assert bf16 - fp32 == 2 * 2 * weights
    assert bf16 - int8 == pytest.approx((2 - 1 - 4 / 256) * 2 * weights, abs=2)


def test_a_copy_of_the_weights_is_counted_for_an_evaluation_instead_of_the_passes():
    small, large = manifest(batch=1, seq=32), manifest(batch=512)
    measuring = StepChoices(evaluates=True)
    assert evaluation_bytes(small, StepChoices()) == 0
    assert evaluation_bytes(small, measuring) > 4 * small.model.parameters()
    for needed in (lambda plan, how: needed_bytes(plan, Exchanged(), how), needed_device_bytes):
        more = needed(small, measuring) - needed(small, StepChoices())
        assert 0 < more < evaluation_bytes(small, measuring)
        assert needed(large, measuring) == needed(large, StepChoices())


def test_a_larger_batch_takes_more_and_accumulation_does_not():
    one, two = (needed_bytes(manifest(batch=batch, seq=64), Exchanged()) for batch in (8, 16))
    assert two > one
    assert needed_bytes(manifest(batch=8, seq=64, accumulate=4), Exchanged()) == one


@pytest.mark.parametrize("kind", [RefusedByRun, Failure])
def test_the_refusal_says_how_much_is_needed_and_how_much_there_is(monkeypatch, kind):
    run = manifest()
    needed = needed_bytes(run, Exchanged())
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=needed, total=needed)
    )
    require_memory(run, kind)
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1, total=needed - 1)
    )
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


def test_fewer_sequences_at_once_take_less_here_and_on_a_device():
    run = manifest(batch=8, seq=64)
    here = [needed_bytes(run, Exchanged(), StepChoices(size)) for size in (1, 4, 8, None, 100)]
    there = [needed_device_bytes(run, StepChoices(size)) for size in (1, 4, 8, None, 100)]
    for each in (here, there):
        assert each[0] < each[1] < each[2] == each[3] == each[4]


def test_beside_a_device_the_host_holds_no_activations():
    one, two = (
        needed_bytes(manifest(batch=batch, seq=64), Exchanged(), StepChoices(on_device=True))
        for batch in (8, 16)
    )
    assert one == two < needed_bytes(manifest(batch=8, seq=64), Exchanged())


def test_auto_keeps_outer_state_on_a_device_with_room_for_it(card, monkeypatch):
    run, device, held = manifest(), Device(card, "Double Card", "fp32"), Exchanged(10**8, 10**7)
    needed = needed_device_bytes(run) + 5 * 11 * 10**7 // 4
    for room, place in ((needed, "device"), (needed - 1, "host")):
        monkeypatch.setattr(CARD, "capacity_bytes", CARD.used_bytes + room)
        assert kept_outer("auto", run, held, WHOLE_BATCH, device) == place
    assert kept_outer("device", run, held, WHOLE_BATCH, device) == "device"
    assert kept_outer("auto", run, held, WHOLE_BATCH, Device()) == "host"


def test_what_is_kept_on_a_device_takes_no_memory_of_the_host(monkeypatch):
    run, held = manifest(), Exchanged(10**8, 10**7)
    free = needed_bytes(run, held) - 10**8 - 10**7
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=free, total=free)
    )
    require_memory(run, Failure, "device", held)
    with pytest.raises(Failure, match="--outer disk"):
        require_memory(run, Failure, "host", held)
