"""The experiment's machinery: peers that compress stay in the subspace, the others are free, and a
round is the same to all."""

import math

import pytest
import torch

from farflock.compression.subspace import outside
from farflock.experiments.pipelines import selective
from farflock.experiments.pipelines.selective import (
    EMBEDDING,
    MODEL,
    Arm,
    Size,
    arms,
    close,
    compute,
    group_of,
    writers,
)
from farflock.node.data.samples import text_in_memory
from farflock.node.errors import Failure
from farflock.optimizers.method import Progress

SIZE = Size(
    replicas=2, steps=6, period=3, codec="fp32", ranks=[8, 2], rates=[6e-3], seeds=[1], held_out=4
)
TEXT = text_in_memory(
    torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0))
    .numpy()
    .astype("uint16")
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tensors(one):
    return {name: x.detach() for name, x in one.model.named_parameters()}


def test_a_replica_that_compresses_stays_in_the_subspace_and_its_frozen_embedding_stays():
    strong, weak = reversed(group_of(SIZE, Arm("", 1, 8), 6e-3, 1, TEXT))
    before = tensors(weak)[EMBEDDING].clone()
    for one in (strong, weak):
        one.begin()
    assert torch.equal(tensors(weak)[EMBEDDING], before) or torch.allclose(
        tensors(weak)[EMBEDDING], before, atol=1e-6
    )
    for number in range(3):
        strong.step(number, 6e-3)
        weak.step(number, 6e-3)
        assert outside(tensors(weak), writers(MODEL), weak.basis) < 1e-6
        moved = {EMBEDDING: tensors(weak)[EMBEDDING] - weak.frozen_VD}
        assert outside(moved, {EMBEDDING: 1}, weak.basis) < 1e-4
    assert outside(tensors(strong), writers(MODEL), weak.basis) > 0.5
    assert not torch.equal(tensors(weak)[EMBEDDING], before)


def test_the_last_stage_and_what_only_reads_the_stream_are_free():
    assert len(writers(MODEL)) == 2 * (MODEL.layers - 1)
    assert not any(f"layers.{MODEL.layers - 1}." in name for name in writers(MODEL))
    weak = group_of(SIZE, Arm("", 2, 2), 6e-3, 1, TEXT)[0]
    weak.begin()
    rest = {
        name: x
        for name, x in tensors(weak).items()
        if name not in writers(MODEL) and x.shape[:1] == (MODEL.dim,)
    }
    assert outside(rest, dict.fromkeys(rest, 0), weak.basis) > 0.5


def test_a_round_tells_everybody_the_same_mean_of_what_the_codec_leaves():
    group = group_of(SIZE, Arm("", 1, 8), 6e-3, 1, TEXT)
    for one in group:
        one.begin()
        for number in range(3):
            one.step(number, 6e-3)
    due = [exchange for one in group for exchange in one.method.due(one.replica, Progress(3))]
    here, there = close(due, 1)
    assert here.participants == there.participants
    for name, x in here.mean.items():
        assert torch.equal(x, there.mean[name])
        torch.testing.assert_close(x, (due[0].tensors[name] + due[1].tensors[name]) / 2)
        assert torch.equal(here.sent[name], due[0].tensors[name]), "fp32 changes nothing"
    for one, exchange, result in zip(group, due, (here, there), strict=True):
        one.method.apply(one.replica, exchange, result)
    ends = [one.method.eval_params(one.replica) for one in group]
    assert all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())


def test_replicas_that_start_in_the_subspace_of_all_columns_lose_nothing():
    """With as many columns as the stream is wide, the projection is the identity but for
    rounding."""
    plain = selective.train(SIZE, Arm("", 0, 64), 6e-3, 1, TEXT)
    whole = selective.train(SIZE, Arm("", 2, 64), 6e-3, 1, TEXT)
    for name, x in plain.items():
        # AdamW makes rounding of tiny gradients large
        torch.testing.assert_close(x, whole[name], rtol=1e-3, atol=2e-3)


def test_the_table_has_a_row_for_each_arm_and_what_selection_saves():
    said = []
    table = compute(SIZE, said.append)
    rows = {row.name: row.values for row in table.rows}
    assert [arm.name for arm in arms(SIZE)] == list(rows)[:5]
    for share in ("87.5%", "96.9%"):
        saved = rows[f"all compress by {share}"][0] - rows[f"the weak compress by {share}"][0]
        assert rows[f"selection saves at {share}"] == pytest.approx([saved])
    assert all(math.isfinite(value) for values in rows.values() for value in values)
    assert said == sorted(said)
    assert said[-1] == 1.0


def test_arms_that_diverge_at_every_rate_are_an_error(monkeypatch):
    monkeypatch.setattr(selective, "train", lambda *given: None)
    with pytest.raises(Failure, match="nobody compresses: every rate diverges"):
        compute(SIZE, lambda share: None)
