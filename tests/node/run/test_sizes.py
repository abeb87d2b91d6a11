"""Sizes that a founder leaves out follow from the others; presets are the sizes they are named
after."""

import pytest

from farflock.node.model.llama import PRESETS, ModelConfig
from farflock.node.run.manifest import resolve
from farflock.node.run.sizes import HEAD_DIM, completed, heads_of

LLAMA_3_VOCABULARY = 128_256


@pytest.mark.parametrize(
    ("given", "heads", "ffn_dim"),
    [
        ({"dim": 512}, 8, 1408),
        ({"dim": 768}, 12, 2048),
        ({"dim": 1024}, 16, 2752),
        ({"dim": 96}, 2, 256),
        ({"dim": 24}, 1, 64),
        ({"dim": 2}, 1, 64),
    ],
)
def test_heads_and_inner_width_follow_from_the_width(given, heads, ffn_dim):
    model = resolve({"model": {**given, "layers": 2}}).model
    assert (model.heads, model.kv_heads, model.ffn_dim) == (heads, heads, ffn_dim)
    assert model.head_dim <= HEAD_DIM
    assert 8 / 3 * model.dim <= model.ffn_dim < 8 / 3 * model.dim + 64


@pytest.mark.parametrize("dim", [2, 6, 24, 96, 130, 384, 1000, 4096, 65_536])
def test_the_chosen_heads_fit_the_width(dim):
    assert heads_of(dim) * 2 <= dim
    assert dim % (2 * heads_of(dim)) == 0


def test_what_is_given_stays():
    given = {"dim": 96, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 100, "context": 70}
    assert completed(given, 64) == given
    model = resolve({"model": {"dim": 96, "layers": 3, "heads": 4}}).model
    assert model.kv_heads == 4


@pytest.mark.parametrize(("train", "context"), [({}, 64), ({"seq": 200}, 200)])
def test_the_context_is_a_sequence_of_training(train, context):
    table = {"model": {"dim": 64, "layers": 1}, "train": dict(train)}
    assert resolve(table).model.context == context


@pytest.mark.parametrize("wrong", ["wide", True, 0, -4, 3.5, None, [64]])
def test_what_is_no_width_is_left_to_the_check_of_types(wrong):
    assert completed({"dim": wrong, "layers": 2}, wrong) == {"dim": wrong, "layers": 2}


@pytest.mark.parametrize(
    ("preset", "parameters"),
    # The models' own cards count so many.
    [("1b", 1_235_814_400), ("3b", 3_212_749_824), ("8b", 8_030_261_248)],
)
def test_with_their_vocabulary_the_largest_presets_are_llama_3s(preset, parameters):
    table = {"model": {"preset": preset, "vocab_size": LLAMA_3_VOCABULARY}}
    assert resolve(table).model.parameters() == parameters


@pytest.mark.parametrize("preset", ["60m", "125m", "350m"])
def test_presets_have_about_as_many_weights_as_they_say(preset):
    shape = PRESETS[preset]
    weights = ModelConfig(
        **{name: getattr(shape, name) for name in shape.__struct_fields__} | {"vocab_size": 50_000}
    ).parameters()
    assert 0.84 < weights / (int(preset[:-1]) * 1_000_000) < 1.05
