"""The hash of a state, and the check of a state that comes from another peer."""

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from farflock.optimizers.parts import state
from farflock.optimizers.parts.blocks import BLOCK_VALUES
from farflock.optimizers.parts.state import WrongState, counter, named, state_hash, unnamed

STATE = {"phi.a": torch.tensor([1.0, 2.0]), "phi.b": torch.tensor(3.0), "round": torch.tensor(4)}
SHAPES = {"a": (2,), "b": ()}


def test_the_hash_does_not_depend_on_the_order_of_names():
    assert state_hash(STATE) == state_hash(dict(reversed(STATE.items())))
    assert len(state_hash(STATE)) == 32


@pytest.mark.parametrize(
    "other",
    [
        {**STATE, "round": torch.tensor(5)},
        {**STATE, "round": torch.tensor(4, dtype=torch.int32)},
        {**STATE, "phi.a": torch.tensor([[1.0, 2.0]])},
        {**STATE, "phi.a": torch.tensor([1.0, 2.0000002])},
        {**STATE, "phi.b": torch.tensor(3.0).view(torch.int32)},
        {"phi.c" if name == "phi.a" else name: tensor for name, tensor in STATE.items()},
        {name: tensor for name, tensor in STATE.items() if name != "round"},
    ],
)
def test_another_name_type_shape_or_bit_is_another_hash(other):
    assert state_hash(other) != state_hash(STATE)


def test_minus_zero_is_another_hash_because_only_bits_count():
    assert state_hash({"a": torch.tensor(0.0)}) != state_hash({"a": torch.tensor(-0.0)})


def test_a_view_hashes_like_its_copy_and_an_empty_tensor_hashes():
    grid = torch.arange(12.0).reshape(3, 4)
    assert state_hash({"a": grid.T}) == state_hash({"a": grid.T.contiguous()})
    assert state_hash({"a": torch.empty(0)}) != state_hash({"a": torch.empty(0, 2)})


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 4), max_size=4))
def test_what_named_puts_in_unnamed_takes_out(sizes):
    tensors = {
        name: torch.rand(size, generator=torch.Generator().manual_seed(size))
        for name, size in sizes.items()
    }
    back = unnamed("phi", named("phi", tensors), {name: (size,) for name, size in sizes.items()})
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name] is tensor


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"phi.a": None}, "phi.a must be float32 .* got nothing"),
        ({"phi.a": torch.zeros(3)}, r"shape \(2,\), got torch.float32 of shape \(3,\)"),
        ({"phi.a": torch.zeros(2, dtype=torch.float64)}, "got torch.float64"),
        ({"phi.a": torch.tensor([1.0, float("nan")])}, "phi.a holds NaN or infinity"),
        ({"phi.b": torch.tensor(float("-inf"))}, "phi.b holds NaN or infinity"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(broken, message):
    state = {name: tensor for name, tensor in {**STATE, **broken}.items() if tensor is not None}
    with pytest.raises(WrongState, match=message):
        unnamed("phi", state, SHAPES)


@pytest.mark.parametrize("found", [None, torch.tensor(-1), torch.tensor(1.0), torch.tensor([1])])
def test_a_counter_that_counts_nothing_is_refused(found):
    with pytest.raises(WrongState, match="round must be an int64 scalar"):
        counter("round", {} if found is None else {"round": found})
    assert counter("round", STATE) == 4


def test_a_change_of_any_view_changes_the_hash_of_a_tensor_that_was_hashed_before():
    x = torch.zeros(3 * BLOCK_VALUES + 5)
    before = state_hash({"a": x})
    x.view(-1)[BLOCK_VALUES : BLOCK_VALUES + 1].copy_(torch.ones(1))
    changed = state_hash({"a": x})
    assert changed != before
    assert changed == state_hash({"a": x.clone()})
    x.detach()[BLOCK_VALUES] = 0.0
    assert state_hash({"a": x}) == before


def test_a_tensor_that_did_not_change_is_hashed_once(monkeypatch):
    hashed = []

    def counted(*data):
        hashed.extend(data)
        return blake3(*data)

    monkeypatch.setattr(state, "blake3", counted)
    x, y = torch.zeros(BLOCK_VALUES + 1), torch.zeros(2)
    first = state_hash({"a": x, "b": y})
    assert len(hashed) == 3
    assert state_hash({"a": x, "b": y}) == first
    assert len(hashed) == 3
    x[0] = 1.0
    state_hash({"a": x, "b": y})
    assert len(hashed) == 5


def test_the_hash_is_that_of_the_blocks_of_all_tensors():
    x, y = torch.arange(BLOCK_VALUES + 3.0), torch.tensor(7)
    header = f"a\0torch.float32\0({BLOCK_VALUES + 3},)\0".encode()
    blocks = (x[:BLOCK_VALUES].numpy().tobytes(), x[BLOCK_VALUES:].numpy().tobytes())
    root = blake3(header + b"".join(blake3(block).digest() for block in blocks))
    root.update(b"b\0torch.int64\0()\0" + blake3(y.numpy().tobytes()).digest())
    assert state_hash({"b": y, "a": x}) == root.digest()
