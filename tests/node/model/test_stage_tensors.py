"""Checkpoints of N stages become checkpoints of any other number of stages."""

import msgspec
import pytest
import torch

from farflock.node.model.llama import PRESETS, build
from farflock.node.model.stage_tensors import Misfit, cut, joined, names_of
from farflock.node.run.split import even, split
from farflock.node.state import checkpoint

CONFIG = msgspec.structs.replace(PRESETS["tiny"], layers=6, tied=False)


def moments_of(span):
    """A stage's parameters with two moments, as a checkpoint's part has them."""
    model = build(CONFIG, 5, span)
    return {
        f"{what}.{name}": weight.detach() * factor
        for what, factor in (("param", 1.0), ("exp_avg", 0.5), ("exp_avg_sq", 0.25))
        for name, weight in model.named_parameters()
    }


@pytest.mark.parametrize("after", [1, 2, 3, 5, 6])
def test_a_checkpoint_of_four_stages_loads_into_any_number(tmp_path, after):
    """E13, through real files."""
    saved = []
    for index, span in enumerate(even(CONFIG, 4)):
        folder = checkpoint.save(tmp_path / str(index), 9, {"replica": moments_of(span)}, {})
        saved.append(checkpoint.load(folder).groups["replica"])
    whole = joined(saved)
    for span in even(CONFIG, after):
        part, expected = cut(whole, CONFIG, span), moments_of(span)
        assert part.keys() == expected.keys()
        assert all(torch.equal(part[name], tensor) for name, tensor in expected.items())


def test_a_stage_out_of_the_whole_model_loads_strictly():
    whole = {name: weight.detach() for name, weight in build(CONFIG, 1).named_parameters()}
    for span in split(CONFIG, [1, 4, 1]):
        model = build(CONFIG, 2, span)
        model.load_state_dict(cut(whole, CONFIG, span))
        assert {name for name, _ in model.named_parameters()} == names_of(CONFIG, span)


def test_the_ends_have_the_embedding_and_the_head():
    first, middle, last = (names_of(CONFIG, span) for span in split(CONFIG, [2, 2, 2]))
    assert "model.embed_tokens.weight" in first
    assert {"model.norm.weight", "lm_head.weight"} <= last
    assert not {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} & middle


def test_a_missing_tensor_is_named():
    whole = moments_of(range(6))
    del whole["exp_avg.model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(
        Misfit,
        match="layers 2 to 4 lack 1 tensors, "
        r"such as exp_avg\.model\.layers\.3\.mlp\.up_proj\.weight",
    ):
        cut(whole, CONFIG, range(2, 5))
    assert len(cut(whole, CONFIG, range(4, 6))) == 3 * len(names_of(CONFIG, range(4, 6)))


def test_no_tensors_at_all_are_a_misfit():
    with pytest.raises(Misfit, match="layers 0 to 1 lack"):
        cut({}, CONFIG, range(2))


def test_pieces_of_different_moments_are_not_put_together():
    one, other = moments_of(range(3)), moments_of(range(2, 6))
    assert joined([one, other]).keys() == moments_of(range(6)).keys()
    other["param.model.layers.2.mlp.up_proj.weight"] += 1
    with pytest.raises(Misfit, match="differs between two pieces"):
        joined([one, other])
