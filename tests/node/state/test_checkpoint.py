"""Whatever happens while a checkpoint is written or kept, it reads whole or not at all.

Nothing is overwritten.
"""

import errno
import fcntl
import logging
import os
import shutil

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import (
    CheckpointCorrupt,
    CheckpointError,
    bytes_of,
    latest,
    load,
    prune,
    save,
    steps,
)

SYSTEM_CALLS = ("mkdir", "open", "write", "fsync", "replace")


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "inner": {
            "weight": torch.randn(5, 3, generator=generator),
            "moment": torch.randn(4, generator=generator).bfloat16(),
        },
        "outer": {"step": torch.tensor(step), "empty": torch.zeros(0, 3)},
    }


def write(folder, step):
    return save(folder, step, state(step), {"cursor": [step, 3]}, {"config.json": b'{"dim": 24}'})


def assert_whole(found, step):
    assert found.step == step
    assert found.meta == {"cursor": [step, 3]}
    assert found.files == {"config.json": b'{"dim": 24}'}
    for group, tensors in state(step).items():
        assert found.groups[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found.groups[group][name], tensor)
            assert found.groups[group][name].dtype == tensor.dtype


class Trap:
    """Counts a save's system calls and fails at the chosen one; `log` has their names and paths."""

    def __init__(self, monkeypatch, at, failure):
        self.at, self.failure, self.log, self.paths = at, failure, [], {}
        for name in SYSTEM_CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))
        if failure is Killed:
            monkeypatch.setattr(shutil, "rmtree", self.wrap("rmtree", shutil.rmtree))

    def wrap(self, name, call):
        def wrapped(*args, **kwargs):
            if len(self.log) > self.at and self.failure is Killed:
                raise Killed
            self.log.append((name, self.paths.get(args[0], str(args[0]))))
            if len(self.log) - 1 == self.at:
                if name == "write":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])
                raise (
                    self.failure
                    if self.failure is Killed
                    else OSError(self.failure, os.strerror(self.failure))
                )
            result = call(*args, **kwargs)
            if name == "open":
                self.paths[result] = str(args[0])
            return result

        return wrapped


def interrupted(monkeypatch, folder, at, failure):
    """Save step 2 and fail at call number `at`; return the error (None at the end) and the log."""
    with monkeypatch.context() as patch:
        trap = Trap(patch, at, failure)
        try:
            write(folder, 2)
        except (Killed, CheckpointError) as error:
            return error, trap.log
    return None, trap.log


def test_what_was_saved_is_loaded(tmp_path):
    path = write(tmp_path / "checkpoints", 7)
    assert path == tmp_path / "checkpoints" / "step-7"
    assert_whole(load(path), 7)
    assert sorted(os.listdir(path)) == [
        "config.json",
        "inner.safetensors",
        "manifest.json",
        "outer.safetensors",
    ]


def test_loaded_tensors_can_be_changed_and_saved_again(tmp_path):
    found = load(write(tmp_path, 1))
    found.groups["inner"]["weight"].add_(1)
    again = load(save(tmp_path, 2, found.groups, found.meta))
    assert torch.equal(again.groups["inner"]["weight"], state(1)["inner"]["weight"] + 1)


def test_views_and_transposed_tensors_are_saved_by_value(tmp_path):
    grid = torch.arange(12.0).reshape(3, 4)
    found = load(save(tmp_path, 0, {"inner": {"turned": grid.T, "row": grid[1]}}, {}))
    assert torch.equal(found.groups["inner"]["turned"], grid.T)
    assert torch.equal(found.groups["inner"]["row"], grid[1])


@pytest.mark.parametrize(
    "failure", [Killed, errno.ENOSPC, errno.EIO], ids=["killed", "full", "broken"]
)
def test_a_failure_at_any_system_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch, failure):
    total = len(interrupted(monkeypatch, tmp_path / "count", 10**9, failure)[1])
    # two folders, four files, two folder fsyncs with their opens, the rename
    assert total >= 2 + 4 * 3 + 5
    outcomes = set()
    for at in range(total):
        folder = tmp_path / f"at-{at}"
        write(folder, 1)
        error, log = interrupted(monkeypatch, folder, at, failure)
        found = latest(folder)
        # mkdir of a folder that is there, clean-up after the rename
        assert error is not None or found.step == 2
        assert_whole(found, found.step)
        outcomes.add(found.step)
        if failure is not Killed:
            assert not list(folder.glob(".*")), f"left behind after {log[-1]}"
        if found.step == 1:
            write(folder, 2)
        assert_whole(latest(folder), 2)
        prune(folder, 1)
        assert os.listdir(folder) == ["step-2"]
    assert outcomes == {1, 2}


def test_everything_is_on_the_disk_before_the_name_appears(tmp_path, monkeypatch):
    _, log = interrupted(monkeypatch, tmp_path, 10**9, errno.EIO)
    renamed = next(i for i, (name, path) in enumerate(log) if name == "replace")
    synced = {path for name, path in log[:renamed] if name == "fsync"}
    partial = tmp_path / ".step-2.partial"
    files = {"config.json", "inner.safetensors", "outer.safetensors", "manifest.json"}
    assert synced == {str(partial), *(str(partial / name) for name in files)}
    for path in synced - {str(partial)}:
        assert log.index(("fsync", path)) > max(
            i for i, call in enumerate(log) if call == ("write", path)
        )
    assert ("fsync", str(tmp_path)) in log[renamed:]


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (errno.ENOSPC, r"no room on the disk for .*step-2; free some space"),
        (errno.EDQUOT, r"no room on the disk"),
        (errno.EACCES, r"no permission to write .*step-2; make its folder writable"),
        (errno.EROFS, r"no permission to write"),
        (errno.EIO, r"could not be written \(Input/output error\); check the disk"),
    ],
)
def test_a_failed_save_is_one_sentence_with_its_remedy(tmp_path, monkeypatch, failure, sentence):
    error, _ = interrupted(monkeypatch, tmp_path, 6, failure)
    assert isinstance(error, CheckpointError)
    with pytest.raises(CheckpointError, match=sentence):
        raise error


def test_long_files_are_written_in_several_pieces(tmp_path, monkeypatch):
    whole = os.write
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "write", lambda descriptor, content: whole(descriptor, bytes(content)[:7])
        )
        path = write(tmp_path, 3)
    assert_whole(load(path), 3)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return write(tmp_path_factory.mktemp("kept"), 5)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_found(kept, data):
    path = kept / data.draw(st.sampled_from(sorted(os.listdir(kept))))
    good = path.read_bytes()
    position, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    path.write_bytes(good[:position] + bytes([good[position] ^ (1 << bit)]) + good[position + 1 :])
    try:
        with pytest.raises(CheckpointCorrupt, match=path.name):
            load(kept)
    finally:
        path.write_bytes(good)
    assert_whole(load(kept), 5)


@settings(max_examples=60)
@given(data=st.data())
def test_any_truncation_is_found(kept, data):
    path = kept / data.draw(st.sampled_from(sorted(os.listdir(kept))))
    good = path.read_bytes()
    path.write_bytes(good[: data.draw(st.integers(0, len(good) - 1))])
    try:
        with pytest.raises(CheckpointCorrupt, match="use an earlier one or the swarm's snapshot"):
            load(kept)
    finally:
        path.write_bytes(good)


def sealed(manifest):
    text = msgspec.json.encode(manifest)
    digest = checkpoint.hashlib.sha256(text).hexdigest()
    return msgspec.json.encode({"sha256": digest, "manifest": msgspec.Raw(text)})


def reseal(path, change):
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes())["manifest"]
    change(manifest)
    (path / "manifest.json").write_bytes(sealed(manifest))


def test_values_that_are_not_finite_are_refused_on_both_ways(tmp_path):
    path = write(tmp_path, 1)
    bad = {"weight": torch.tensor([1.0, float("nan")])}
    with pytest.raises(CheckpointError, match="inner/weight holds NaN or infinite values"):
        save(tmp_path, 2, {"inner": bad}, {})
    content = checkpoint.safetensors.save(bad)
    (path / "inner.safetensors").write_bytes(content)
    entry = {"sha256": checkpoint.hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    reseal(path, lambda manifest: manifest["files"].update({"inner.safetensors": entry}))
    with pytest.raises(
        CheckpointCorrupt, match=r"inner\.safetensors holds NaN or infinite values in weight"
    ):
        load(path)
    assert [step for step, _ in steps(tmp_path)] == [1]


@pytest.mark.parametrize("name", ["../outside", "a/b", ".hidden", "", "x" * 200])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path, name):
    path = write(tmp_path, 1)
    entry = {"sha256": "0" * 64, "size_bytes": 3}
    reseal(path, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(CheckpointCorrupt, match="names a file"):
        load(path)


def test_another_format_is_named_not_guessed(tmp_path):
    path = write(tmp_path, 1)
    reseal(path, lambda manifest: manifest.update(format=2))
    with pytest.raises(
        CheckpointError, match=r"has checkpoint format 2, but this version .* reads format 1"
    ):
        load(path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"sha256": "0", "manifest": 1}']
)
def test_a_manifest_of_noise_is_refused(tmp_path, content):
    path = write(tmp_path, 1)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json"):
        load(path)


def test_a_huge_manifest_is_refused_unread(tmp_path):
    path = write(tmp_path, 1)
    with (path / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointCorrupt, match="above"):
        load(path)


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        load(tmp_path / "step-9")
    path = write(tmp_path, 1)
    (path / "outer.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"outer\.safetensors is missing"):
        load(path)


def test_the_latest_whole_checkpoint_is_taken_and_broken_ones_are_reported(tmp_path, caplog):
    assert latest(tmp_path / "nowhere") is None
    for step in (9, 10, 100):
        write(tmp_path, step)
    (tmp_path / "step-100" / "inner.safetensors").write_bytes(b"")
    (tmp_path / "step-2000").mkdir()
    (tmp_path / ".step-3000.partial").mkdir()
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-4000").write_text("a file")
    with caplog.at_level(logging.WARNING, logger="farflock"):
        assert_whole(latest(tmp_path), 10)
    assert [record.getMessage().split("/")[-2] for record in caplog.records] == [
        "step-2000",
        "step-100",
    ]


def test_a_whole_checkpoint_is_never_overwritten(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match="exists already and is not overwritten"):
        save(tmp_path, 1, {"inner": {"weight": torch.zeros(1)}}, {})
    assert_whole(load(tmp_path / "step-1"), 1)


def test_a_corrupt_one_of_the_same_step_is_set_aside(tmp_path, caplog):
    for damage in (b"one", b"two"):
        path = write(tmp_path, 1)
        (path / "inner.safetensors").write_bytes(damage)
    write(tmp_path, 1)
    assert_whole(latest(tmp_path), 1)
    assert (tmp_path / "step-1.corrupt-1" / "inner.safetensors").read_bytes() == b"one"
    assert (tmp_path / "step-1.corrupt-2" / "inner.safetensors").read_bytes() == b"two"
    assert "is corrupt; renaming it to step-1.corrupt-1" in caplog.text


def test_pruning_keeps_the_newest_whole_ones(tmp_path):
    for step in range(1, 7):
        write(tmp_path, step)
    (tmp_path / "step-5" / "manifest.json").unlink()
    (tmp_path / ".step-7.partial").mkdir()
    prune(tmp_path, 2)
    assert [step for step, _ in steps(tmp_path)] == [4, 5, 6]
    assert not (tmp_path / ".step-7.partial").exists()
    with pytest.raises(ValueError, match="keeps at least one"):
        prune(tmp_path, 0)


def test_pruning_by_size_deletes_the_oldest_and_never_the_last_intact_one(tmp_path):
    for step in range(1, 7):
        write(tmp_path, step)
    one = bytes_of(tmp_path / "step-1")
    prune(tmp_path, 9, 4 * one)
    assert [step for step, _ in steps(tmp_path)] == [3, 4, 5, 6]
    (tmp_path / "step-6" / "manifest.json").write_bytes(b"broken")
    prune(tmp_path, 9, 1)
    assert [step for step, _ in steps(tmp_path)] == [5, 6], "5 is the newest intact one"
    prune(tmp_path, 9, 2 * one)
    assert [step for step, _ in steps(tmp_path)] == [5, 6]


def test_pruning_does_not_read_again_what_is_known_to_be_intact(tmp_path):
    paths = [write(tmp_path, step) for step in (1, 2)]
    intact = {paths[1]}
    (paths[1] / "manifest.json").unlink()
    prune(tmp_path, 2, intact=intact)
    assert intact == set(paths)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "manifest.json", "extra.safetensors"])
def test_a_file_that_could_not_be_read_back_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be the name of a checkpoint's file"):
        save(tmp_path, 1, {}, {}, {name: b""})
    assert os.listdir(tmp_path) == []


def test_a_negative_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0 or more, got -1"):
        save(tmp_path, -1, {}, {})


@pytest.mark.parametrize("writes", ["as asked", "short", "not past the cache"])
def test_large_parts_are_written_in_stages_of_whole_pages(tmp_path, monkeypatch, writes):
    monkeypatch.setattr(checkpoint, "_STAGE_BYTES", 8192)
    whole, direct = os.write, getattr(os, "O_DIRECT", 0)

    def write_some(descriptor, content):
        if writes == "not past the cache" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & direct:
            raise OSError(errno.EINVAL, "not here")
        return whole(descriptor, content[:5000] if writes == "short" else content)

    groups = {"inner": {"a": torch.randn(10_000), "b": torch.randn(77)}}
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        path = save(tmp_path, 1, groups, {})
    assert (path / "inner.safetensors").read_bytes() == safetensors.torch.save(groups["inner"])
    assert torch.equal(load(path).groups["inner"]["a"], groups["inner"]["a"])
