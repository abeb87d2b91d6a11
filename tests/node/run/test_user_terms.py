"""The terms on which peers with their own models must agree, and the refusal of a joiner."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run import manifest
from farflock.node.run.user_terms import fingerprint, founded, joined, run_id, wish


def net(width=3, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width, bias=bias), nn.Linear(width, 1, bias=bias))


def print_of(model, inner=torch.optim.AdamW):
    return fingerprint(model, inner(model.parameters(), lr=0.1))


def wished(model=None, method=None, name=None, seed=None, **options):
    return wish(print_of(model or net()), method, {"name": name, "seed": seed}, options)


TERMS = founded(wished(method="diloco", name="mine", seed=3, period=7, codec="int8"))


def test_a_founder_s_terms_spell_out_every_option():
    assert TERMS.method.options["period"] == 7
    assert TERMS.method.options["outer"]["name"] == "nesterov"
    assert TERMS.exchange.codec == "int8"
    assert TERMS.exchange.return_codec == "bf16"
    assert TERMS.exchange.deadline_s == 30.0
    assert founded(wished()).method.name == "diloco"


@pytest.mark.parametrize("method", ["diloco", "noloco", "ddp", "local"])
def test_terms_survive_the_way_to_a_joiner_for_every_method(method):
    terms = founded(wished(method=method))
    assert joined(terms.canonical(), wished()) == terms
    assert type(terms.build()).__name__.lower() == method


def test_a_joiner_may_name_what_the_founder_named_or_nothing():
    raw = TERMS.canonical()
    assert joined(raw, wished()) == TERMS
    assert (
        joined(
            raw,
            wished(method="diloco", name="mine", seed=3, period=7, codec="int8", deadline_s=30.0),
        )
        == TERMS
    )


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"period": 8}, "method.options.period: it is 8 here and 7 in the run"),
        ({"perod": 7}, "method.options.perod: it is 7 here and not set in the run"),
        ({"method": "noloco"}, "method.name: it is 'noloco' here and 'diloco' in the run"),
        ({"codec": "fp16"}, "exchange.codec: it is 'fp16' here and 'int8' in the run"),
        ({"seed": 4}, "run.seed: it is 4 here and 3 in the run"),
        ({"outer": {"lr": 0.1}}, "method.options.outer.lr: it is 0.1 here"),
        (
            {"model": net(4)},
            "this model differs from the run's: it has 4 tensors with 17 values, "
            "the run's model 4 with 13",
        ),
        (
            {"model": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(1, 1, bias=False))},
            "5 tensors with 12 values",
        ),
    ],
)
def test_a_joiner_that_names_something_else_is_told_what_and_what_to_do(named, says):
    with pytest.raises(RefusedByRun, match="; ") as refusal:
        joined(TERMS.canonical(), wished(**named))
    assert says in str(refusal.value)


def test_another_inner_optimizer_is_refused():
    mine = wish(print_of(net(), torch.optim.SGD), None, {}, {})
    with pytest.raises(RefusedByRun, match=r"user_model\.inner: it is 'SGD' here and 'AdamW'"):
        joined(TERMS.canonical(), mine)


def test_names_types_and_frozen_values_are_part_of_the_fingerprint_and_trained_values_are_not():
    plain, other = net(), net()
    with torch.no_grad():
        other[0].weight.add_(1)
    assert print_of(plain) == print_of(other)
    frozen = [net(), net()]
    for model in frozen:
        model[0].weight.requires_grad_(False)
    assert print_of(frozen[0]) == print_of(frozen[1]) != print_of(plain)
    with torch.no_grad():
        frozen[1][0].weight.add_(1)
    assert print_of(frozen[0]) != print_of(frozen[1])
    assert print_of(net().double()) != print_of(plain)
    named = nn.ModuleDict({"a": net()[0], "b": net()[1]})
    assert (print_of(named).numbers, print_of(named).sha256 == print_of(plain).sha256) == (
        print_of(plain).numbers,
        False,
    )


def test_a_model_without_trained_parameters_is_refused():
    model = net().requires_grad_(False)
    with pytest.raises(Usage, match="unfreeze"):
        fingerprint(model, torch.optim.SGD([torch.zeros(1)]))


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"method": "dilocko"}, "diloco"),
        ({"period": 0}, "period of 0"),
        ({"perod": 5}, "period"),
        ({"codec": "int9"}, "int"),
        ({"name": "../run"}, "run.name"),
        ({"seed": -1}, "run.seed"),
        ({"view_s": 0.0}, "view_s"),
        ({"period": "ten"}, "period"),
        ({"method": "local", "codec": "fp16"}, "local"),
    ],
)
def test_a_founder_s_mistakes_are_named(named, says):
    with pytest.raises(Usage, match=says):
        founded(wished(**named))


def test_a_node_s_run_and_a_program_s_run_name_the_right_way_in():
    raw = manifest.resolve({"model": {"preset": "tiny"}}).canonical()
    with pytest.raises(RefusedByRun, match="farflock join"):
        joined(raw, wished())
    with pytest.raises(RefusedByRun, match="SwarmOptimizer"):
        manifest.parse(TERMS.canonical())


def test_the_run_s_id_depends_on_terms_and_founder():
    raw = TERMS.canonical()
    others = [run_id(raw + b"#", "a"), run_id(raw, "b")]
    assert run_id(raw, "a") not in others
    assert len(run_id(raw, "a")) == 32


@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: b"[user_model]\n" + text.encode())
)
def test_any_other_bytes_are_refused(raw):
    with pytest.raises(RefusedByRun):
        joined(raw, wished())


def test_terms_that_claim_too_much_are_refused():
    table = msgspec.to_builtins(TERMS)
    for place, value in (("protocol", 99), ("seed", 2**40)):
        text = (
            TERMS.canonical()
            .decode()
            .replace(f"{place} = {table['run'][place]}", f"{place} = {value}")
            .encode()
        )
        with pytest.raises(RefusedByRun):
            joined(text, wished())
