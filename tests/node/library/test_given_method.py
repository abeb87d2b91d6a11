"""A method given as an instance means what its name means with the options that differ from its
defaults, and a class of the program's own needs no place in the catalog."""

from dataclasses import dataclass, field
from types import UnionType
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn
from worlds import virtual_optimizer
from worlds.virtual_optimizer import model_of, train_together

import farflock
from farflock.compression.codec import Codec
from farflock.node.errors import RefusedByRun, Usage
from farflock.node.library.run_options import OwnOptions, RunOptions, SwarmOptions
from farflock.node.run.manifest import parse
from farflock.node.run.model_section import UserModel
from farflock.node.run.user_terms import founded, require_agreed, spelt, wish
from farflock.optimizers.catalog import METHODS, method, options_of

MODEL = UserModel(1, 2, "0" * 64, "AdamW")


@dataclass(slots=True)
class Eager(farflock.DiLoCo):
    """DiLoCo with another default; a class that no catalog has."""

    period: int = 3
    haste: float = 0.5


@dataclass(slots=True)
class Asking(farflock.DiLoCo):
    """One that cannot be made without arguments."""

    must: float = field(kw_only=True)


def terms(given, **options):
    name, spelled = spelt(given, options)
    return founded(wish(MODEL, name, {}, spelled))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_each_method_s_class_is_public_and_its_instance_is_its_name(name):
    kind = getattr(farflock, METHODS[name].__name__)
    assert kind is METHODS[name]
    assert isinstance(kind(), type(method(name)))
    assert spelt(kind(), {}) == (name, {})
    assert terms(kind()).canonical() == terms(name).canonical()


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (farflock.DiLoCo(period=7), {"period": 7}),
        (farflock.DiLoCo(codec="int8", deadline_s=9.0), {"codec": "int8", "deadline_s": 9.0}),
        (
            farflock.DiLoCo(outer=farflock.OuterSGD(lr=0.5)),
            {"outer": {"name": "sgd", "lr": 0.5}},
        ),
        (
            farflock.DiLoCo(codec="topk:64/4096", feedback=0.9),
            {"codec": "topk:64/4096", "feedback": 0.9},
        ),
    ],
)
def test_an_instance_gives_the_terms_of_its_name_with_what_differs(given, options):
    assert spelt(given, {}) == ("diloco", options)
    assert terms(given).canonical() == terms("diloco", **options).canonical()


def test_options_of_exchanges_stay_keywords_and_a_codec_may_be_an_object():
    beside = terms(farflock.DiLoCo(period=7), codec=farflock.codec("int8:128"), view_s=2.0)
    named = terms("diloco", period=7, codec="int8:128", view_s=2.0)
    assert beside.canonical() == named.canonical()


def test_an_instance_with_defaults_agrees_with_any_run_of_its_method():
    run = terms("diloco", period=7)
    for given in (farflock.DiLoCo(), farflock.DiLoCo(period=7)):
        require_agreed(run, wish(MODEL, *_named(given)))
    with pytest.raises(RefusedByRun, match=r"period: it is 8 here and 7 in the run"):
        require_agreed(run, wish(MODEL, *_named(farflock.DiLoCo(period=8))))


def _named(given):
    name, options = spelt(given, {})
    return name, {}, options


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        (farflock.DiLoCo(), {"period": 5}, r"period: .*; write DiLoCo\(period=...\)"),
        (farflock.DiLoCo(codec="int8"), {"codec": "fp32"}, r"codec: .*DiLoCo"),
        (farflock.DiLoCo, {}, r"it is a class; give an instance: DiLoCo\(\)"),
        (farflock.OuterSGD(), {}, "a OuterSGD is neither"),
        (3, {}, "a int is neither"),
        (Asking(must=1.0), {}, "Asking has an option without a default"),
        ("dilocko", {}, "did you mean 'diloco'"),
    ],
)
def test_what_is_no_method_is_refused_in_one_sentence(given, options, says):
    with pytest.raises(Usage, match=says) as caught:
        spelt(given, options)
    assert "\n" not in str(caught.value)


def test_a_class_of_the_program_s_own_trains_under_its_dotted_name():
    name = f"{Eager.__module__}.Eager"

    async def work(member):
        for step in range(6):
            x = torch.full((4, 8), float(step + member.rank))
            await member.step(lambda model, x=x: (model(x) - 1).square().mean())
        return member.here, member.model.weight.detach().clone(), member.rounds

    given, options = spelt(Eager(haste=0.25), {})
    (here, one, rounds), (there, other, _) = train_together(
        2, given, model_of, work, lambda entries: torch.optim.SGD(entries, lr=1e-3), **options
    )
    assert type(here.loop.driver.method) is type(there.loop.driver.method) is Eager
    assert (here.terms.method.name, here.terms.method.options["haste"]) == (name, 0.25)
    assert [each["status"] for each in rounds] == ["ok", "ok"]
    assert torch.equal(one, other)


TAKEN = {"lr", "seed"}  # the optimizer's own arguments
OTHERWISE = {"codec", "return_codec", "outer", "delay"}  # as an object or a table; two kinds of one


@pytest.mark.parametrize("name", METHODS)
def test_type_checkers_know_each_option_of_a_method_beside_its_name(name):
    known, own = get_type_hints(RunOptions), get_type_hints(METHODS[name])
    assert options_of(name).keys() - TAKEN <= known.keys()
    for option in options_of(name).keys() - TAKEN - OTHERWISE:
        assert set(as_tuple(own[option])) <= set(as_tuple(known[option])), option


def as_tuple(annotation):
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def test_type_checkers_know_no_option_that_there_is_not():
    of_methods = {option for name in METHODS for option in options_of(name)}
    of_runs = {"codec", "return_codec", "deadline_s", "view_s", "frozen", "buffers"}
    assert RunOptions.__optional_keys__ == of_methods - TAKEN | of_runs
    assert get_type_hints(RunOptions)["codec"] == str | Codec


def test_no_option_of_a_run_is_one_of_the_own_machine_and_the_docstring_names_all_of_these():
    own = OwnOptions.__optional_keys__
    assert SwarmOptions.__optional_keys__ - own == RunOptions.__optional_keys__
    assert all(f"`{name}" in farflock.SwarmOptimizer.__doc__ for name in own)


def test_an_optimizer_takes_an_instance_of_an_own_class():
    optimizer = virtual_optimizer.alone(nn.Linear(2, 1), Eager(haste=0.25))
    assert optimizer.method == f"{Eager.__module__}.Eager"
    optimizer.close(patient=False)


def test_a_program_without_the_class_is_told_so_and_a_name_imports_nothing():
    @dataclass(slots=True)
    class Elsewhere(farflock.Local):
        """A class of another program."""

    text = terms(Elsewhere()).canonical().decode()
    with pytest.raises(RefusedByRun, match=r"'os\.Elsewhere'; join with an instance"):
        parse(text.replace(METHODS.add(Elsewhere), "os.Elsewhere"), UserModel)
    assert parse(text, UserModel).canonical().decode() == text


def test_the_catalog_has_its_own_methods_only():
    before = list(METHODS)
    METHODS.add(Eager)
    assert list(METHODS) == before
    assert len(METHODS) == len(before)
    assert METHODS.add(farflock.Lean) == "lean"
