"""The parameters of each layer, by their names alone."""

from farflock.optimizers.parts.layers import is_numbered, layers_of


def test_layers_are_named_blocks_or_modules_or_single_parameters():
    names = (
        "embed.weight",
        "model.layers.0.attn.q",
        "model.layers.0.mlp.up",
        "model.layers.10.mlp.up",
        "head",
        "norm.b",
        "norm.w",
    )
    assert layers_of(names) == {
        "embed": ["embed.weight"],
        "model.layers.0": ["model.layers.0.attn.q", "model.layers.0.mlp.up"],
        "model.layers.10": ["model.layers.10.mlp.up"],
        "head": ["head"],
        "norm": ["norm.b", "norm.w"],
    }


def test_only_layers_of_a_stack_are_numbered():
    assert is_numbered("model.layers.10")
    assert not is_numbered("model.norm")
    assert not is_numbered("head")
