"""Cuts: the bytes of a state at one moment, whatever changes while they are read."""

import threading

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.state import cut as cuts
from farflock.node.state.cut import Cut, OpenCuts, raw

TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SMALL = 64  # bytes a piece


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(cuts, "PIECE_BYTES", SMALL)


def whole(cut):
    return cut.head + b"".join(bytes(raw(piece)) for _, piece in cut.read())


@st.composite
def tensors(draw):
    names = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=6))
    made = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        made[name] = torch.randint(0, 2, shape).to(draw(st.sampled_from(TYPES)))
    return made


@given(tensors())
def test_the_bytes_are_those_of_a_safetensors_file(state):
    cut = Cut(state)
    assert cut.size_bytes == len(safetensors.torch.save(state))
    assert whole(cut) == safetensors.torch.save(state)


def test_transposed_tensors_and_views_are_cut_by_value():
    base = torch.arange(12.0).reshape(3, 4)
    state = {"turned": base.t(), "row": base[1], "one": torch.zeros(()).expand(2, 3)}
    assert whole(Cut(state)) == safetensors.torch.save(
        {name: x.clone(memory_format=torch.contiguous_format) for name, x in state.items()}
    )


@pytest.mark.parametrize("read_before", [0, 1, 5, 16])
def test_what_is_saved_before_it_changes_is_read_as_it_was(small_pieces, read_before):
    state = {"a": torch.arange(128.0), "b": torch.arange(128.0) + 0.5}
    expected = safetensors.torch.save(state)
    cut = Cut(state)
    reader = cut.read()
    found = [cut.head, *(bytes(raw(next(reader)[1])) for _ in range(read_before))]
    cut.save()
    assert cut.saved_bytes == (16 - read_before) * SMALL, "only what has not been read is copied"
    for x in state.values():
        x.zero_()
    cut.save()
    assert cut.saved_bytes == (16 - read_before) * SMALL, "and only once"
    assert b"".join((*found, *(bytes(raw(piece)) for _, piece in reader))) == expected
    assert cut.saved_bytes == 0, "what was read is given back"


def test_a_thread_that_changes_the_state_and_one_that_reads_it_may_meet_anywhere(small_pieces):
    for _ in range(20):
        state = {"a": torch.arange(4096.0)}
        expected, cut, found = safetensors.torch.save(state), Cut(state), []
        reader = threading.Thread(target=lambda cut=cut, found=found: found.append(whole(cut)))
        reader.start()
        cut.save()
        state["a"].fill_(-1.0)
        reader.join()
        assert found == [expected]


def test_what_is_too_much_to_copy_is_waited_for(small_pieces, monkeypatch):
    """The reader comes to the last eighth before it is copied, unless it hangs or gives up."""
    monkeypatch.setattr(cuts, "MIN_SAVED_BYTES", SMALL)
    state = {"a": torch.arange(1024.0)}  # 64 pieces
    expected, cut, saver = safetensors.torch.save(state), Cut(state), None
    found = [cut.head]
    for number, (_, piece) in enumerate(cut.read()):
        found.append(bytes(raw(piece)))
        if number == 9:
            saver = threading.Thread(target=lambda: (cut.save_soon(), state["a"].zero_()))
            saver.start()
        assert cut.saved_bytes <= 8 * SMALL
    saver.join()
    assert b"".join(found) == expected
    hung = Cut(state)
    monkeypatch.setattr(cuts, "STALL_S", 0.0)
    hung.save_soon()
    assert hung.saved_bytes == 64 * SMALL
    given_up = Cut(state)
    given_up.close()
    given_up.save_soon()
    assert not given_up.saved_bytes


def test_a_local_step_saves_what_it_changes_and_a_round_saves_all():
    stepped, agreed = (Cut({"x": torch.ones(4)}) for _ in range(2))
    both = OpenCuts()
    with both.added(stepped, agreed):
        both.add(stepped, stepped=True)
        both.add(agreed, stepped=False)
        with both.stepping():
            assert (stepped.saved_bytes, agreed.saved_bytes) == (16, 0)
        both.before_change()
        assert agreed.saved_bytes == 16
    after = Cut({"x": torch.ones(4)})
    with pytest.raises(ZeroDivisionError), both.added(after):
        both.add(after, stepped=True)
        raise ZeroDivisionError
    both.before_change()
    assert not after.saved_bytes, "a cut that is not read any more is not saved"


def test_a_step_and_what_is_done_between_steps_wait_for_each_other():
    both, inside, seen = OpenCuts(), threading.Event(), []

    def step():
        with both.stepping():
            inside.set()
            seen.append("step")

    with both.between_steps():
        stepping = threading.Thread(target=step)
        stepping.start()
        assert not inside.wait(0.05)
        seen.append("between")
    stepping.join()
    assert seen == ["between", "step"]

    def between():
        with both.between_steps():
            seen.append("between")

    with both.stepping():
        waiting = threading.Thread(target=between)
        waiting.start()
        waiting.join(0.05)
        seen.append("step")
    waiting.join()
    assert seen == ["between", "step", "step", "between"]
