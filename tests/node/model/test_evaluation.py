"""Held-out losses: the unigram floor by hand, a model's mean and standard error, a better model,
and bits a byte."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from farflock.node.data.samples import text_in_memory
from farflock.node.data.shard_order import SampleStream
from farflock.node.model import evaluation as module
from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import Batches, evaluation, evaluation_rows, inputs_and_targets
from farflock.node.model.evaluation import (
    evaluate,
    held_out_loss,
    measure,
    summarise,
    unigram_loss,
)
from farflock.node.model.llama import PRESETS, build, next_token_loss
from farflock.node.tokens.tokenizer import ByteTokenizer


class Fixed(nn.Module):
    """Gives every position the same logits, whatever it sees."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x):
        return self.logits.expand(*x.shape, -1)


def test_the_unigram_loss_is_that_of_smoothed_frequencies():
    train = np.array([0, 0, 0, 1], dtype=np.uint16)
    held_out = np.array([0, 1, 2], dtype=np.uint16)
    shares = [4 / 8, 2 / 8, 1 / 8, 1 / 8]  # counts plus one, over four tokens plus four kinds
    expected = -sum(math.log(shares[token]) for token in held_out) / 3
    assert unigram_loss(train, held_out, 4) == pytest.approx(expected)


def test_a_unigram_model_of_its_own_text_reaches_its_entropy():
    text = np.tile(np.arange(4, dtype=np.uint16), 100_000)
    assert unigram_loss(text, text, 4) == pytest.approx(math.log(4), abs=1e-4)


def test_a_unigram_loss_needs_held_out_tokens():
    with pytest.raises(ValueError, match="no held-out tokens"):
        unigram_loss(np.zeros(3, dtype=np.uint16), np.zeros(0, dtype=np.uint16), 4)


def test_an_evaluation_is_the_mean_over_sequences_and_its_standard_error():
    model = Fixed([1.0, 0.0, -1.0])
    y = torch.tensor([[0, 0], [0, 1], [2, 2]])
    log_total = math.log(math.e + 1 + 1 / math.e)
    losses = [log_total - 1, log_total - 0.5, log_total + 1]
    got = evaluate(model, torch.zeros_like(y), y, batch_size=2)
    assert got.sequences == 3
    assert got.mean == pytest.approx(np.mean(losses), rel=1e-6)
    assert got.standard_error == pytest.approx(np.std(losses, ddof=1) / math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_an_evaluation_does_not_depend_on_its_batch_size(batch_size):
    model = build(PRESETS["tiny"], 0)
    x = torch.arange(7 * 16).reshape(7, 16) % 256
    y = (x + 1) % 256
    assert evaluate(model, x, y, batch_size).mean == pytest.approx(
        evaluate(model, x, y, 7).mean, rel=1e-5
    )


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_leaves_no_gradient_and_no_changed_mode(training):
    model = Fixed([0.0, 0.0]).train(training)
    evaluate(model, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
    assert model.training is training
    assert model.logits.grad is None


def test_one_sequence_has_no_known_error():
    assert summarise(torch.tensor([2.0], dtype=torch.float64)).standard_error == math.inf


def test_a_tiny_model_falls_below_the_unigram_loss_on_the_shipped_plays():
    corpus, tokenizer = load_corpus("shakespeare"), ByteTokenizer()
    train, held_out = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    floor = unigram_loss(train, held_out, tokenizer.vocab_size)
    assert 3.2 < floor < 3.4
    model, data = (
        build(PRESETS["tiny"], 0),
        Batches(text_in_memory(train), SampleStream(0, "alice"), 8, 64),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    windows = evaluation(held_out, 64, 64)
    before = evaluate(model, *windows)
    for step in range(120):
        x, y = data.batch(step)
        next_token_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = evaluate(model, *windows)
    assert before.mean > math.log(256) - 0.1
    assert after.mean + 4 * after.standard_error < floor


@pytest.fixture(scope="module")
def plays():
    """Ten sequences of 32 tokens, each with the token behind it."""
    ids = ByteTokenizer().encode(load_corpus("shakespeare").held_out)
    return evaluation_rows(ids, 32, 10)


def test_a_measurement_in_parts_is_that_of_the_whole_and_its_progress_ends_at_all(
    plays, monkeypatch
):
    shares, model = [], build(PRESETS["tiny"], 5)
    monkeypatch.setattr(module, "AT_ONCE", 3 * 32)
    found = measure(model, plays, np.ones(256, dtype=np.int64), shares.append)
    whole = evaluate(model, *inputs_and_targets(plays))
    assert found.estimate.mean == pytest.approx(whole.mean, abs=1e-6)
    assert found.estimate.standard_error == pytest.approx(whole.standard_error, abs=1e-6)
    assert (found.estimate.sequences, found.tokens) == (10, 320)
    assert found.perplexity == pytest.approx(math.exp(whole.mean))
    assert found.bits_per_byte == pytest.approx(whole.mean / math.log(2), rel=1e-6)  # plain text
    assert shares == pytest.approx([0.3, 0.6, 0.9, 1.0])


def test_bits_a_byte_are_all_nats_over_the_bytes_of_all_targets():
    rows = np.array([[9, 0, 1], [9, 1, 1]], dtype=np.uint16)  # the first token is no target
    found = held_out_loss(torch.tensor([2.0, 4.0]).double(), rows, np.array([1, 3, *[50] * 8]))
    assert (found.estimate.mean, found.tokens) == (3.0, 4)
    assert found.bits_per_byte == pytest.approx((2 * 2 + 2 * 4) / math.log(2) / (1 + 3 + 3 + 3))


@pytest.mark.parametrize("lengths", [None, np.zeros(10, dtype=np.int64)])
def test_without_the_bytes_of_the_text_there_are_no_bits_a_byte(lengths):
    rows = np.zeros((2, 3), dtype=np.uint16)
    assert held_out_loss(torch.ones(2).double(), rows, lengths).bits_per_byte is None


def test_a_huge_loss_has_an_infinite_perplexity():
    rows = np.zeros((2, 3), dtype=np.uint16)
    assert held_out_loss(torch.tensor([1e3, 1e4]).double(), rows).perplexity == math.inf


@pytest.mark.usefixtures("card")
def test_an_accelerator_measures_what_the_cpu_does(plays):
    from farflock.node.model.device import choose

    there = measure(build(PRESETS["tiny"], 5).to(choose("card").place), plays)
    here = measure(build(PRESETS["tiny"], 5), plays)
    assert there.estimate.mean == pytest.approx(here.estimate.mean, rel=1e-4)
