"""A method's state, declared field by field; only this module reads and writes it.

    _book: RoundBook = nested(RoundBook)           the fields that the object declares
    _members: int = shared(1)                      in every snapshot, as the int64 scalar `members`
    _lead: dict[str, Tensor] = own(dict)           this peer's: `lead.NAME`, or nothing while empty
    _steps: int = own(0, "untaken", stays=True)    as `untaken`; `carry` keeps it

Taking over a snapshot resets own fields to their defaults, except `stays` fields if work is
carried. A key may name attributes of its owner, as `round{0.suffix}`. The `names` of a nested
object limit its tensors to these parameters.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor

from farflock.optimizers.method import State
from farflock.optimizers.parts.state import Shapes, counter, kept, named, numbers, unnamed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Whose = Literal["shared", "own"]
_METADATA = "state"
Owner = TypeVar("Owner", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Kind:
    """Conversion of a value to named tensors under a key, and back; `read` raises `WrongState`."""

    write: Callable[[str, Any], State]
    read: Callable[[str, State, Shapes], Any]


COUNT = Kind(
    lambda key, value: numbers({key: value}), lambda key, state, shapes: counter(key, state)
)
FLAG = Kind(COUNT.write, lambda key, state, shapes: bool(counter(key, state)))
TENSORS = Kind(named, unnamed)
SOME_TENSORS = Kind(named, kept)  # of all the owner's parameters, or of none


@dataclass(frozen=True, slots=True)
class _Place:
    whose: Whose | None  # None: nested
    make: Callable[[], object] = dict
    key: str = ""
    kind: Kind = COUNT
    stays: bool = False


NESTED = {_METADATA: _Place(None)}


def shared(default: object, key: str = "", kind: Kind | None = None) -> Any:  # noqa: ANN401 - as dataclasses.field
    """Declare a field that all members have in common: a counter, a flag, or tensors of all
    parameters, if `kind` does not say otherwise."""
    return _declared(default, key, "shared", kind or _usual(default, TENSORS))


def own(default: object, key: str = "", kind: Kind | None = None, *, stays: bool = False) -> Any:  # noqa: ANN401
    """Declare a field of this peer alone: a counter, a flag, or tensors of all parameters or none,
    if `kind` does not say otherwise."""
    return _declared(default, key, "own", kind or _usual(default, SOME_TENSORS), stays)


def nested(make: Callable[[], object] | None = None) -> Any:  # noqa: ANN401
    """Declare an object with such fields, or a list of them; None: the constructor sets it."""
    if make is None:
        return dataclasses.field(init=False, metadata=NESTED)
    return dataclasses.field(default_factory=make, metadata=NESTED)


def saved(owner: "DataclassInstance", whose: Whose) -> State:
    """Return the shared fields, or this peer's own, as named tensors: the fields themselves, not
    copies."""
    state: State = {}
    for name, place in _places(owner):
        if place.whose is None:
            for one in _nested(owner, name):
                state |= saved(one, whose)
        elif place.whose == whose:
            state |= place.kind.write(place.key.format(owner), getattr(owner, name))
    return state


def loaded(owner: Owner, state: State, shapes: Shapes, *whose: Whose) -> Owner:
    """Return a copy of `owner` with these fields from a state; `WrongState` unless all fit."""
    new, names = copy.copy(owner), getattr(owner, "names", shapes)
    shapes = {name: shapes[name] for name in names}
    for name, place in _places(owner):
        if place.whose is None:
            read = [loaded(one, state, shapes, *whose) for one in _nested(owner, name)]
            setattr(new, name, read if isinstance(getattr(owner, name), list) else read[0])
        elif place.whose in whose:
            setattr(new, name, place.kind.read(place.key.format(owner), state, shapes))
    return new


def relocated(owner: Owner, allocate: Callable[[Sequence[int]], Tensor]) -> Owner:
    """Move the tensors of all parameters to allocated memory, one at a time; return the owner."""
    for name, place in _places(owner):
        if place.whose is None:
            for one in _nested(owner, name):
                relocated(one, allocate)
        elif place.kind in (TENSORS, SOME_TENSORS):
            tensors: dict[str, Tensor] = getattr(owner, name)
            for key, x in tensors.items():
                tensors[key] = allocate(x.shape).copy_(x)
    return owner


def dropped(owner: "DataclassInstance") -> None:
    """Let go of the shared tensors, which others are about to replace."""
    for name, place in _places(owner):
        if place.whose is None:
            for one in _nested(owner, name):
                dropped(one)
        elif place.whose == "shared" and place.kind in (TENSORS, SOME_TENSORS):
            setattr(owner, name, {})


def forget(owner: "DataclassInstance", *, carried: bool) -> None:
    """Reset own fields to their defaults, except fields that stay while work is carried."""
    for name, place in _places(owner):
        if place.whose is None:
            for one in _nested(owner, name):
                forget(one, carried=carried)
        elif place.whose == "own" and not (carried and place.stays):
            setattr(owner, name, place.make())


def become(owner: Owner, new: Owner) -> None:
    """Copy all declared fields of another owner."""
    for name, _ in _places(owner):
        setattr(owner, name, getattr(new, name))


def _usual(default: object, tensors: Kind) -> Kind:
    return tensors if callable(default) else FLAG if isinstance(default, bool) else COUNT


def _declared(default: object, key: str, whose: Whose, kind: Kind, stays: bool = False) -> object:
    make = default if callable(default) else lambda: default
    return dataclasses.field(
        default_factory=make, metadata={_METADATA: _Place(whose, make, key, kind, stays)}
    )


def _places(owner: "DataclassInstance") -> tuple[tuple[str, _Place], ...]:
    return _places_of(type(owner))


@functools.cache
def _places_of(kind: "type[DataclassInstance]") -> tuple[tuple[str, _Place], ...]:
    return tuple(
        (each.name, dataclasses.replace(place, key=place.key or each.name.lstrip("_")))
        for each in dataclasses.fields(kind)
        if (place := each.metadata.get(_METADATA))
    )


def _nested(owner: "DataclassInstance", name: str) -> list[Any]:
    held = getattr(owner, name)
    return held if isinstance(held, list) else [held]
