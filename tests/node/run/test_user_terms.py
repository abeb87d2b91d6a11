"""The terms on which peers with their own models must agree, and the refusal of a joiner."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run.head import PROTOCOL
from farflock.node.run.manifest import parse, resolve
from farflock.node.run.model_section import UserModel
from farflock.node.run.user_terms import fingerprint, founded, require_agreed, wish

CANONICAL = f"""\
[run]
name = "mine"
seed = 3
protocol = {PROTOCOL}

[model]
tensors = 2
numbers = 3
sha256 = "{"ab" * 32}"
inner = "SGD"

[method]
name = "diloco"

[method.options]
period = 7
weights = "uniform"

[method.options.outer]
name = "nesterov"
lr = 0.7
momentum = 0.9

[exchange]
codec = "fp16"
return_codec = "bf16"
deadline_s = 30.0
view_s = 5.0
branch_after_s = 600.0
start_peers = 1

[trust]
level = "trusted"
"""
BEFORE = """\
[run]
name = "mine"
seed = 3
protocol = 9

[user_model]
tensors = 2
numbers = 3
inner = "SGD"
"""


def net(width=3, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width, bias=bias), nn.Linear(width, 1, bias=bias))


def print_of(model, inner=torch.optim.AdamW):
    return fingerprint(model, inner(model.parameters(), lr=0.1))


def wished(model=None, method=None, name=None, seed=None, **options):
    return wish(print_of(model or net()), method, {"name": name, "seed": seed}, options)


def joined(raw, wished):
    """The terms that a joiner gets from the run's members."""
    terms = parse(raw, UserModel)
    require_agreed(terms, wished)
    return terms


TERMS = founded(wished(method="diloco", name="mine", seed=3, period=7, codec="int8"))


def test_a_founder_s_terms_spell_out_every_option():
    assert TERMS.method.options["period"] == 7
    assert TERMS.method.options["outer"]["name"] == "nesterov"
    assert TERMS.exchange.codec == "int8"
    assert TERMS.exchange.return_codec == "bf16"
    assert TERMS.exchange.deadline_s == 30.0
    assert founded(wished()).method.name == "diloco"


def test_the_terms_of_a_program_are_one_text():
    founder = UserModel(2, 3, "ab" * 32, "SGD")
    terms = founded(wish(founder, "diloco", {"name": "mine", "seed": 3}, {"period": 7}))
    assert terms.canonical().decode() == CANONICAL
    assert parse(CANONICAL, UserModel) == terms


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
        ({"view_s": 9.0}, "exchange.view_s: it is 9.0 here and 5.0 in the run"),
        ({"model": net(4)}, "model.numbers: it is 17 here and 13 in the run; build the model"),
        (
            {"model": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(1, 1, bias=False))},
            "model.tensors: it is 5 here and 4 in the run",
        ),
        ({"model": net().double()}, f"and {TERMS.model.sha256!r} in the run; build the model"),
        ({"model": net(4), "period": 8}, "model.numbers"),
    ],
)
def test_a_joiner_that_names_something_else_is_told_what_and_what_to_do(named, says):
    with pytest.raises(RefusedByRun, match="; ") as refusal:
        joined(TERMS.canonical(), wished(**named))
    assert says in str(refusal.value)


def test_another_inner_optimizer_is_refused():
    mine = wish(print_of(net(), torch.optim.SGD), None, {}, {})
    with pytest.raises(RefusedByRun, match=r"model\.inner: it is 'SGD' here and 'AdamW'"):
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
    raw = resolve({"model": {"preset": "tiny"}}).canonical()
    with pytest.raises(RefusedByRun, match="one of Farflock's models; join it with `farflock join"):
        joined(raw, wished())
    with pytest.raises(RefusedByRun, match=r"own program; join .* farflock\.SwarmOptimizer"):
        parse(TERMS.canonical())


def test_a_program_s_run_from_before_its_terms_were_a_manifest_is_refused_in_one_sentence():
    for read in (parse, lambda raw: parse(raw, UserModel)):
        with pytest.raises(RefusedByRun) as refusal:
            read(BEFORE)
        assert str(refusal.value) == (
            f"the run has another protocol: it speaks version 9, this program version {PROTOCOL};"
            " use the version of farflock that made it"
        )


def test_the_run_s_id_depends_on_terms_and_founder():
    other = founded(wished(method="diloco", name="mine", seed=4, period=7, codec="int8"))
    assert TERMS.run_id("a") not in (other.run_id("a"), TERMS.run_id("b"))
    assert len(TERMS.run_id("a")) == 32


@settings(max_examples=25, deadline=None)
@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: b"[model]\ntensors = 1\n" + text.encode())
)
def test_any_other_bytes_are_refused(raw):
    with pytest.raises(RefusedByRun):
        parse(raw, UserModel)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_change_of_the_terms_is_other_terms_or_is_refused(data):
    text = TERMS.canonical()
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + data.draw(st.binary(max_size=3)) + text[place + 1 :]
    try:
        terms = parse(changed, UserModel)
    except RefusedByRun:
        return
    assert parse(terms.canonical(), UserModel) == terms
    assert terms.build()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tensors = 4", "tensors = 0", "model.tensors must be a whole number >= 1"),
        ("tensors = 4", 'tensors = "4"', "model.tensors must be a whole number, got '4'"),
        ("tensors = 4", "tensors = 4\ndim = 64", "model.dim: there is no such key"),
        ("tensors = 4", f"tensors = {10**30}", "model.tensors"),
        ("tensors = 4", "tensors = [4]", "model.tensors must be a whole number, got [4]"),
        ("numbers = 13", "numbers = 2000000000000000000", "model.numbers"),
        ("numbers = 13\n", "", "model.numbers: it is missing"),
        (TERMS.model.sha256, "AB" * 32, "model.sha256 must be text"),
        ('"AdamW"', '"Ad\\u0007"', "model.inner must be text"),
        ('"AdamW"', f'"{"a" * 300}"', "model.inner must be text"),
        ("seed = 3", f"seed = {2**40}", "run.seed must be a whole number"),
        (
            "seed = 3",
            "seed = 3\ntotal_tokens = 5",
            "run.total_tokens: a program that trains its own",
        ),
        ("seed = 3", "seed = 3\ntotals = 5", "run.totals: there is no such key"),
        ("[method]", "[train]\nlr = 0.1\nwarmup_tokens = 0\n[method]", "train.lr: a program that"),
        ("[method]", '[data]\ntokenizer = "bytes"\n[method]', "data.tokenizer: a program that"),
        ("[method]", "[evaluation]\nevery = 5\n[method]", "evaluation.every: a program that"),
        ("[method]", "[pipeline]\nstages = [1, 1]\n[method]", "pipeline.stages: a program that"),
        ("[method]", "[user_model]\ntensors = 4\n[method]", "user_model: there is no such key"),
        ("period = 7", f"period = {10**30}", "period"),
        ("period = 7", "period = inf", "period"),
        ("view_s = 5.0", "view_s = nan", "exchange.view_s"),
        ("deadline_s = 30.0", "deadline_s = 1e300", "exchange.deadline_s must be a number"),
        ('level = "trusted"', 'level = "open"', "trust.level: 'open' is not known"),
    ],
)
def test_terms_of_a_stranger_that_claim_too_much_are_refused_with_their_place(old, new, says):
    text = TERMS.canonical().decode()
    assert text.count(old) == 1
    with pytest.raises(RefusedByRun, match="this version cannot take part in that run: ") as shown:
        parse(text.replace(old, new), UserModel)
    assert says in str(shown.value)


def test_a_model_of_both_kinds_is_refused_by_joiners_of_both_kinds():
    text = resolve({}).canonical().decode().replace("[model]", "[model]\ntensors = 4")
    with pytest.raises(RefusedByRun, match=r"model\.vocab_size: there is no such key"):
        parse(text, UserModel)
    with pytest.raises(RefusedByRun, match="joined in another way"):
        parse(text)


def test_terms_of_a_later_protocol_are_refused_before_their_keys_are_looked_at():
    later = (
        TERMS.canonical().decode().replace(f"protocol = {PROTOCOL}", f"protocol = {PROTOCOL + 1}")
    )
    with pytest.raises(RefusedByRun, match=r"the run has another protocol.*update farflock"):
        parse(later + "[future]\nx = 1\n", UserModel)
