"""The loss of a saved model equals what a run measures, and bytes of tokens add up to the text."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import evaluation
from farflock.node.model.device import Device
from farflock.node.model.evaluation import evaluate
from farflock.node.model.export import byte_level
from farflock.node.model.llama import PRESETS, Llama, build
from farflock.node.model.loss import IGNORED
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer
from farflock.node.train.evaluator import meter_of
from farflock.node.use import held_out_loss
from farflock.node.use.held_out_loss import bytes_of_tokens, measure_held_out

TINY = PRESETS["tiny"]
TEXT = "the cat and the hat, and that is that: the cat sat. Ça va? 한글\n" * 20


@pytest.fixture(scope="module")
def windows():
    torch.set_num_threads(1)
    return evaluation(ByteTokenizer().encode(load_corpus("shakespeare").held_out), 32, 10)


def measured(model, windows, **more):
    return measure_held_out(model, Device(), windows, bytes_of_tokens(ByteTokenizer()), **more)


def test_it_is_the_loss_that_a_run_measures(windows, monkeypatch):
    monkeypatch.setattr(held_out_loss, "AT_ONCE", 3 * 32)
    model, shares = build(TINY, 5), []
    found = measured(model, windows, progress=shares.append)
    weights = dict(model.named_parameters())
    run = meter_of(model, Device(), windows, lambda: 4).measure(weights)
    assert found.estimate.mean == pytest.approx(run.mean, abs=1e-6)
    assert found.estimate.standard_error == pytest.approx(run.standard_error, abs=1e-6)
    assert found.estimate.sequences == 10
    assert found.tokens == 320
    assert found.perplexity == pytest.approx(math.exp(run.mean))
    assert found.bits_per_byte == pytest.approx(run.mean / math.log(2), rel=1e-6)  # plain text
    assert shares == [0.3, 0.6, 0.9, 1.0]


def test_tokens_that_do_not_count_are_in_neither_the_loss_nor_the_bytes(windows):
    model, (x, y) = build(TINY, 5), windows
    masked = y.clone()
    masked[:, ::2] = IGNORED
    found = measured(model, (x, masked))
    assert found.tokens == 160
    assert found.estimate.mean == pytest.approx(evaluate(model, x, masked).mean, abs=1e-6)
    assert found.bits_per_byte == pytest.approx(found.estimate.mean / math.log(2), rel=1e-6)


class Cramped(Llama):
    """A model that has room for a few sequences."""

    room = 3

    def forward(self, x, *given):
        if len(x) > self.room:
            raise torch.OutOfMemoryError("a planted shortage of memory")
        return super().forward(x, *given)


def test_fewer_sequences_are_taken_at_once_where_there_is_no_room(windows):
    model, roomy = Cramped(TINY), build(TINY, 5)
    model.load_state_dict(roomy.state_dict())
    assert measured(model, windows).estimate.mean == pytest.approx(
        measured(roomy, windows).estimate.mean, abs=1e-6
    )
    model.room = 0
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        measured(model, windows)


def test_a_huge_loss_has_an_infinite_perplexity(windows):
    model = build(TINY, 5)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(1e6)
    found = measured(model, windows)
    assert found.estimate.mean > 1000
    assert found.perplexity == math.inf


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("tokenizers")
    return JsonTokenizer(train_tokenizer([TEXT], 320))


@settings(max_examples=60)
@given(st.text(max_size=80))
def test_the_bytes_of_byte_level_tokens_add_up_to_the_text(trained, text):
    lengths = bytes_of_tokens(trained)
    assert int(lengths[trained.encode(text)].sum()) == len(text.encode())
    assert lengths[trained.end_of_text] == 0
    plain = bytes_of_tokens(JsonTokenizer(byte_level()))
    assert np.array_equal(plain, bytes_of_tokens(ByteTokenizer()))


def test_tokens_of_unknown_length_give_no_bits_per_byte(trained, windows):
    about = msgspec.json.decode(trained.raw)
    about["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    assert bytes_of_tokens(JsonTokenizer(msgspec.json.encode(about))) is None
    found = measure_held_out(build(TINY, 5), Device(), windows, None)
    assert found.bits_per_byte is None
    few = bytes_of_tokens(ByteTokenizer())[:50]  # the text has other tokens than these
    assert measure_held_out(build(TINY, 5), Device(), windows, few).bits_per_byte is None


@pytest.mark.usefixtures("card")
def test_an_accelerator_measures_what_the_cpu_does(windows):
    from farflock.node.model.device import choose

    device = choose("card")
    there = measure_held_out(build(TINY, 5).to(device.place), device, windows, None)
    here = measured(build(TINY, 5), windows)
    assert there.estimate.mean == pytest.approx(here.estimate.mean, rel=1e-4)
