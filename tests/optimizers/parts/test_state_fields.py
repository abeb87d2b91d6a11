"""A state that is declared field by field: its names, what is refused, and what is forgotten."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.parts.round_book import RoundBook
from farflock.optimizers.parts.state import WrongState
from farflock.optimizers.parts.state_fields import (
    become,
    forget,
    loaded,
    nested,
    own,
    saved,
    shared,
)

SHAPES = {"x": (2,), "y": ()}


@dataclass(slots=True)
class Piece:
    names: tuple[str, ...]
    residual: dict[str, Tensor] = own(dict, stays=True)


@dataclass(slots=True)
class Whole:
    period: int = 3
    _phi: dict[str, Tensor] = shared(dict)
    moved: int = shared(0)
    book: RoundBook = nested(lambda: RoundBook(suffix=".a"))
    pieces: list[Piece] = nested(lambda: [Piece(("x",)), Piece(("y",))])
    steps: int = own(0, "untaken", stays=True)
    asked: bool = own(False)
    lead: dict[str, Tensor] = own(dict)


def some():
    made = Whole(_phi={"x": torch.tensor([1.0, 2.0]), "y": torch.tensor(3.0)}, moved=4)
    made.book.number, made.book.since, made.book.pending = 5, 6, True
    made.pieces[1].residual = {"y": torch.tensor(7.0)}
    made.steps, made.asked = 8, True
    return made


def test_what_is_shared_and_what_is_own_have_the_declared_names():
    shared_part, own_part = saved(some(), "shared"), saved(some(), "own")
    assert list(shared_part) == ["phi.x", "phi.y", "moved", "round.a"]
    assert list(own_part) == ["since.a", "pending.a", "residual.y", "untaken", "asked"]
    assert all(x.dtype == torch.int64 for name, x in own_part.items() if name != "residual.y")


def test_what_was_saved_is_loaded_into_a_copy():
    made, state = Whole(), saved(some(), "shared") | saved(some(), "own")
    new = loaded(made, state, SHAPES, "shared", "own")
    assert saved(made, "own") == saved(Whole(), "own")
    assert saved(made, "shared")["round.a"] == 0
    assert [piece.residual for piece in new.pieces] == [{}, {"y": torch.tensor(7.0)}]
    become(made, new)
    assert (made.moved, made.book, made.steps, made.asked) == (
        4,
        RoundBook(5, 6, True, ".a"),
        8,
        True,
    )


@pytest.mark.parametrize("missing", ["phi.x", "phi.y", "moved", "round.a"])
def test_a_state_that_lacks_something_shared_is_refused(missing):
    state = {name: x for name, x in saved(some(), "shared").items() if name != missing}
    made = Whole()
    with pytest.raises(WrongState, match=f"{missing} must be"):
        loaded(made, state, SHAPES, "shared")
    assert made == Whole()


@pytest.mark.parametrize("carried", [True, False])
def test_what_is_own_is_forgotten_unless_it_stays_with_work_that_is_carried(carried):
    made = some()
    forget(made, carried=carried)
    assert (made.steps, made.pieces[1].residual) == (
        (8, {"y": torch.tensor(7.0)}) if carried else (0, {})
    )
    assert (made.asked, made.book) == (False, RoundBook(5, 0, False, ".a"))
    assert (made.moved, len([key for key in saved(made, "shared") if key.startswith("phi.")])) == (
        4,
        2,
    )


@pytest.mark.parametrize("name", METHODS)
def test_no_two_fields_of_a_method_have_one_name(name):
    made = method(name)
    assert not saved(made, "shared").keys() & saved(made, "own").keys()
