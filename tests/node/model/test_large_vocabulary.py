"""The vocabularies of Llama 3, Qwen and Gemma: training, the wire, generation and export."""

import msgspec
import numpy as np
import pytest
import torch

from farflock.compression.activation import ActivationContext, Exact
from farflock.compression.codec import CorruptPayload
from farflock.node.model.data import Batches, evaluation
from farflock.node.model.evaluation import unigram_loss
from farflock.node.model.export import export
from farflock.node.model.generate import GREEDY, generate
from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.tokens.json_tokenizer import JsonTokenizer

pytest.importorskip("tokenizers")
SIZES = {"Llama 3": 128_256, "Qwen": 151_936, "Gemma": 262_144}
SEQ = 16


def words(size):
    """A tokenizer of the words w0, w1, … and an end of text."""
    vocabulary = {f"w{place}": place for place in range(size - 1)} | {"</s>": size - 1}
    end = {"id": size - 1, "content": "</s>", "special": True, "normalized": False}
    options = {"single_word": False, "lstrip": False, "rstrip": False}
    raw = msgspec.json.encode(
        {
            "version": "1.0",
            "added_tokens": [end | options],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
        }
    )
    return JsonTokenizer(raw)


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def tokenizer(request):
    return words(request.param)


@pytest.fixture
def model(tokenizer):
    return build(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            dim=4,
            layers=1,
            heads=1,
            kv_heads=1,
            ffn_dim=4,
            context=SEQ,
        ),
        0,
    )


def text(tokenizer):
    """The highest ids, and those that differ from others only beyond 16 bits."""
    high = range(tokenizer.vocab_size - 12, tokenizer.vocab_size - 1)
    return " ".join(f"w{place}" for place in (*high, *(place - 65_536 for place in high)) * 3)


def test_ids_above_65_535_stay_themselves(tokenizer):
    ids = tokenizer.encode(text(tokenizer))
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids.tolist()) == text(tokenizer)
    assert int(ids.max()) == tokenizer.vocab_size - 2
    x, y = Batches(ids, 1, "a", 2, SEQ).batch(0)
    assert set(x.flatten().tolist()) <= set(ids.tolist())
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(evaluation(ids, SEQ, 1)[0][0], torch.from_numpy(ids[:SEQ].astype(np.int64)))
    assert unigram_loss(ids, ids, tokenizer.vocab_size) < np.log(tokenizer.vocab_size)


def test_a_training_step_moves_the_rows_of_high_ids(tokenizer, model):
    x, y = Batches(tokenizer.encode(text(tokenizer)), 1, "a", 2, SEQ).batch(0)
    before = model(x, y)
    before.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 5 * weight.grad
        assert model(x, y) < before
    table = model.model.embed_tokens.weight.grad
    assert int(x.max()) > 65_535
    assert float(table[int(x.max())].abs().sum()) > 0


def test_the_wire_of_a_pipeline_carries_high_ids(tokenizer):
    edges = Edges(Exact(), 2, SEQ, 4, tokenizer.vocab_size, 0)
    x, _ = Batches(tokenizer.encode(text(tokenizer)), 1, "a", 2, SEQ).batch(0)
    payload = edges.pack(x)
    assert len(payload) == edges.token_bytes == 2 * SEQ * 3
    assert torch.equal(edges.unpack(payload), x)
    assert torch.equal(ActivationContext((2, SEQ, 4), tokens=x).tokens, x)
    with pytest.raises(CorruptPayload, match=f"the vocabulary has {tokenizer.vocab_size}"):
        edges.unpack(b"\xff" * len(payload))


def test_high_ids_are_drawn_and_end_the_text(tokenizer, model):
    likely, table = tokenizer.vocab_size - 2, model.model.embed_tokens.weight
    with torch.no_grad():
        one = torch.ones(4)
        table.zero_()
        table[7], table[likely] = one, 2 * one
        said = generate(model, tokenizer, "w7", 3, sampling=GREEDY)
        assert said == f"w{likely} " * 2 + f"w{likely}"
        table[tokenizer.end_of_text] = 4 * one
    assert generate(model, tokenizer, "w7", 3, sampling=GREEDY) == ""


def test_transformers_computes_the_same_from_the_export(tokenizer, model, tmp_path):
    transformers = pytest.importorskip("transformers")
    export(tmp_path / "out", model.config, model.state_dict(), tokenizer, "card")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = reader(text(tokenizer))["input_ids"][:SEQ]
    assert ids == tokenizer.encode(text(tokenizer)).tolist()[:SEQ]
    with torch.no_grad():
        ours, theirs = model(torch.tensor([ids])), other(torch.tensor([ids])).logits
    assert ours.shape == theirs.shape == (1, SEQ, tokenizer.vocab_size)
    assert float((ours - theirs).abs().max()) <= 1e-5
    assert reader.eos_token_id == other.config.eos_token_id == tokenizer.end_of_text
