"""However many peers there are, a step of the run has the same sequences."""

import torch

from farflock.experiments.pipelines.text import texts
from farflock.experiments.reproduce.job import RUN
from farflock.experiments.reproduce.share import Share
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches


def parts(count, size):
    return [Share(texts()[0], 3, RUN, size, 8, part, count) for part in range(count)]


def test_the_parts_of_a_step_are_its_whole_batch_in_order():
    whole = Batches(texts()[0], SampleStream(3, RUN), 8, 8)
    for count, size in ((1, 8), (2, 4), (4, 2), (8, 1)):
        for step in (0, 1, 17):
            x, y = (
                torch.cat(column)
                for column in zip(*(part.batch(step) for part in parts(count, size)), strict=True)
            )
            assert torch.equal(x, whole.batch(step)[0])
            assert torch.equal(y, whole.batch(step)[1])


def test_a_share_without_parts_has_all_samples():
    alone, whole = Share(texts()[0], 3, RUN, 2, 8), Batches(texts()[0], SampleStream(3, RUN), 2, 8)
    assert torch.equal(alone.batch(5)[0], whole.batch(5)[0])


def test_another_step_and_another_seed_have_other_sequences():
    one = Share(texts()[0], 3, RUN, 4, 8)
    assert not torch.equal(one.batch(0)[0], one.batch(1)[0])
    assert not torch.equal(one.batch(0)[0], Share(texts()[0], 4, RUN, 4, 8).batch(0)[0])
