"""Snapshots in chunks: what is read back is what was cut, and nothing malformed is read."""

import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.errors import Failure
from farflock.node.model.replica import in_memory
from farflock.node.state import spool
from farflock.node.state.cut import Cut
from farflock.node.state.outer_files import OuterFiles
from farflock.node.state.spool import Malformed, spooled, tensors_of
from farflock.swarm.chunk_store import digest_of

STATE = {
    "phi.a": torch.arange(2000.0).reshape(40, 50),
    "phi.b": torch.zeros(0, 3),
    "round": torch.tensor(7),
    "weights": torch.ones(3, dtype=torch.float64),
}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(spool, "CHUNK_BYTES", 1000)


@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_a_snapshot_is_a_safetensors_file_in_chunks_wherever_it_is_kept(
    small_chunks, tmp_path, kept
):
    state = STATE | {"phi.c": torch.randn(400_000)}  # a file of its own
    storage = in_memory if kept == "memory" else OuterFiles(tmp_path / "snapshots").allocate
    file, chunks, digests = spooled(Cut(state), storage)
    assert file == b"".join(chunks)
    assert b"".join(chunks) == safetensors.torch.save(state)
    assert digests == tuple(map(digest_of, chunks))
    assert {len(chunk) for chunk in chunks[:-1]} == {1000}
    assert not list(tmp_path.rglob("*.outer")), "a file without a name"


def test_a_full_disk_leaves_the_snapshot_in_memory(caplog):
    def full(shape):
        raise Failure("the disk cannot hold it", "no room", "make room")

    chunks = spooled(Cut(STATE), full).chunks
    assert b"".join(chunks) == safetensors.torch.save(STATE)
    assert "a snapshot for a joiner is kept in memory" in caplog.text


def test_what_was_cut_is_read_back_without_a_copy():
    file = memoryview(bytearray(safetensors.torch.save(STATE)))
    found = tensors_of(file)
    assert found.keys() == STATE.keys()
    for name, x in STATE.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x)
    file[-4:] = struct.pack("<f", 5.5)
    assert float(found["phi.a"][-1, -1]) == 5.5, "a view of the file"


@given(st.binary(max_size=200))
def test_noise_is_malformed(content):
    with pytest.raises(Malformed):
        tensors_of(memoryview(bytearray(content)))


@given(st.integers(0, 8000), st.binary(min_size=1, max_size=4))
def test_damage_is_read_as_values_or_as_malformed(at, noise):
    content = bytearray(safetensors.torch.save(STATE))
    content[at : at + len(noise)] = noise
    try:
        found = tensors_of(memoryview(content))
    except Malformed:
        return
    assert sum(x.nbytes for x in found.values()) <= len(content)


def file_of(described, values=bytes(8)):
    head = json.dumps(described).encode()
    head += b" " * (-len(head) % 8)
    return memoryview(bytearray(len(head).to_bytes(8, "little") + head + values))


def entry(**changed):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changed


@pytest.mark.parametrize(
    ("described", "values"),
    [
        ({"a": entry(shape=[3])}, bytes(8)),
        ({"a": entry(dtype="F99")}, bytes(8)),
        ({"a": entry(shape=[-2, -1])}, bytes(8)),
        ({"a": entry(shape=[0, 2**62, 2**62], data_offsets=[0, 0])}, b""),
        ({"a": entry(shape=[2**60])}, bytes(8)),
        ({"a": entry(data_offsets=[4, 12], shape=[2])}, bytes(12)),
        ({"a": entry(), "b": entry()}, bytes(8)),
        ({"a": entry()}, bytes(7)),
        ({"a": entry()}, bytes(9)),
        ({"a": entry(shape=[1] * 17 + [2])}, bytes(8)),
        ({"__metadata__": {"format": "pt"}, "a": entry()}, bytes(8)),
        (
            {"a": entry(shape=[2], dtype="BOOL", data_offsets=[0, 2])}
            | {"b": entry(shape=[1], data_offsets=[2, 6])},
            bytes(6),
        ),
    ],
)
def test_a_head_that_does_not_describe_the_bytes_is_malformed(described, values):
    with pytest.raises(Malformed):
        tensors_of(file_of(described, values))


def test_a_head_that_is_longer_than_all_there_is_is_not_read():
    with pytest.raises(Malformed, match="too long"):
        tensors_of(memoryview((2**63).to_bytes(8, "little") + bytes(100)))
