"""The tables of states: all states can be reached, and real machines make all transitions and no
others."""

import ast
import collections
import inspect
import itertools

import pytest
from worlds.collective import ExchangeWorld, offering_world, unlucky_world
from worlds.decisions import Schedule
from worlds.pair_rounds import KEY, Round, lead

from farflock.swarm.messages import PairRefuse
from farflock.swarm.protocol import pair
from farflock.swarm.protocol.agreement import proposer
from farflock.swarm.protocol.agreement.proposer import PROPOSER_TABLE, Proposer
from farflock.swarm.protocol.agreement.transitions import after
from farflock.swarm.protocol.exchange import closing, mean
from farflock.swarm.protocol.exchange.closing import CLOSING_TABLES, Closing
from farflock.swarm.protocol.exchange.mean import BUNDLE_TABLE, Mean
from farflock.swarm.protocol.pair import PAIR_TABLES, Pair

TABLES = {
    "closing, contributor": (CLOSING_TABLES["contributor"], "open", {"complete"}),
    "closing, voter": (CLOSING_TABLES["voter"], "open", {"complete"}),
    "bundle": (BUNDLE_TABLE, "idle", set()),
    "proposer": (PROPOSER_TABLE, "idle", {"decided"}),
    "pair, leader": (PAIR_TABLES["leader"], "open", {"done"}),
    "pair, follower": (PAIR_TABLES["follower"], "open", {"done"}),
}
MACHINES = [
    (closing, Closing, "state"),
    (mean, Mean, "_states"),
    (proposer, Proposer, "state"),
    (pair, Pair, "stage"),
]


def states(table):
    return {state for state, _ in table} | set(table.values())


@pytest.mark.parametrize(("table", "first", "last"), TABLES.values(), ids=TABLES)
def test_every_state_can_be_reached_and_only_the_last_ones_have_no_way_on(table, first, last):
    reached, fresh = set(), {first}
    while fresh:
        reached |= fresh
        fresh = {to for (state, _), to in table.items() if state in reached} - reached
    assert reached == states(table)
    assert {state for state in reached if not any(state == begin for begin, _ in table)} == last


@pytest.mark.parametrize(("table", "first", "last"), TABLES.values(), ids=TABLES)
def test_what_the_table_does_not_hold_does_not_happen(table, first, last):
    events = {event for _, event in table}
    for state, event in itertools.product(states(table), events):
        if (state, event) in table:
            assert after(table, state, event) == table[state, event]
        else:
            with pytest.raises(AssertionError, match="is not in the table"):
                after(table, state, event)


def assigned(cls, attribute):
    """The methods of a class that set an attribute of its instances, or one of the attribute's
    places."""
    tree = ast.parse(inspect.getsource(cls))
    for function in ast.walk(tree):
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            target = node.value if isinstance(node, ast.Subscript) else node
            is_set = isinstance(getattr(node, "ctx", None), ast.Store)
            if is_set and isinstance(target, ast.Attribute) and target.attr == attribute:
                yield function.name


@pytest.mark.parametrize(
    ("module", "cls", "attribute"), MACHINES, ids=[cls.__name__ for _, cls, _ in MACHINES]
)
def test_a_machine_changes_its_state_in_one_method_alone(module, cls, attribute):
    assert set(assigned(cls, attribute)) - {"__init__"} == {"_move"}
    tree = ast.parse(inspect.getsource(module))
    own = {
        id(node)
        for node in ast.walk(
            next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
        )
    }
    outside = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.ctx, ast.Store)
        and id(node) not in own
    ]
    assert not outside, f"{module.__name__} sets it from outside"


def recorded(monkeypatch, cls, who, place):
    """The transitions that real machines make while a test runs, by kind of machine."""
    made = collections.defaultdict(set)
    move = cls._move

    def noting(self, *args):
        before = place(self, *args)
        move(self, *args)
        made[who(self)].add((before, args[-1], place(self, *args)))

    monkeypatch.setattr(cls, "_move", noting)
    return made


def rows(table):
    return {(state, event, to) for (state, event), to in table.items()}


def test_real_exchanges_of_each_kind_make_every_transition_of_closing_and_no_other(monkeypatch):
    made = recorded(
        monkeypatch, Closing, lambda self: type(self._content).__name__, lambda self, *_: self.state
    )
    for kind in ("mean", "gather"):
        for seed in range(16):
            unlucky_world(seed, kind, staged=seed % 2 == 0).run(until_s=60.0)
        for seed in range(60):  # over lines so long that a proposer has to begin again
            offering_world(seed, n=7, kind=kind, voters=4, witnessed=True, trip_s=2.0).run(
                until_s=300.0
            )
    assert made == {
        "Mean": rows(CLOSING_TABLES["contributor"]),
        "Gather": rows(CLOSING_TABLES["contributor"]),
        "Voter": rows(CLOSING_TABLES["voter"]),
    }


def test_real_means_make_every_transition_of_a_bundle_and_no_other(monkeypatch):
    made = recorded(
        monkeypatch, Mean, lambda self: "bundle", lambda self, bundle, _: self._states[bundle]
    )
    spoilt = ExchangeWorld(7)
    for me in range(3):
        spoilt.offer_at(0.1, me, broken=True)
    spoilt.run()
    for step in range(0, 40, 2):
        narrowed = offering_world(2, n=4, kind="uniform")
        narrowed.crash_after[1] = step + 1
        narrowed.run()
    assert made["bundle"] == rows(BUNDLE_TABLE)


def test_real_proposers_make_every_transition_and_no_other(monkeypatch):
    made = recorded(monkeypatch, Proposer, lambda self: "proposer", lambda self, *_: self.state)
    for seed in range(60):
        Schedule(seed).disturb(150)
    assert made["proposer"] == rows(PROPOSER_TABLE)


def test_real_pairs_make_every_transition_of_their_role_and_no_other(monkeypatch):
    made = recorded(
        monkeypatch,
        Pair,
        lambda self: "leader" if self.leader else "follower",
        lambda self, *_: self.stage,
    )
    for seed in range(400):
        Round(seed, faults=True).run()
    lead().receive(0.1, PairRefuse(KEY, 7))
    assert made == {role: rows(table) for role, table in PAIR_TABLES.items()}
