"""Microbatches as their trainer draws, numbers and keeps them."""

import pytest
import torch

from farflock.compression.activation_catalog import activation_codec
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import Forward, Version
from farflock.node.pipeline.trainer.in_flight import (
    LIVES,
    NUMBERS,
    MicrobatchSource,
    PassWeights,
    WholeInput,
    WholeInputs,
    first_number,
)
from farflock.node.pipeline.trainer.stage_directory import ServerLife
from farflock.swarm.peer.payloads import Left

ORDER, TOKENS, LANE = (0, 2, 1, 3), 4, 5


class Text:
    """A stream of batches, and a policy with one order of stages for all microbatches."""

    def __init__(self):
        self.drawn, self.seen = [], []

    def batch(self, number):
        self.drawn.append(number)
        return torch.full((1, TOKENS), number), torch.full((1, TOKENS), number + 1)

    def stage_order(self, microbatch):
        self.seen.append(microbatch)
        return ORDER


def source_of(text, **options):
    edges = Edges(activation_codec("raw"), 1, TOKENS, 2, 16, 0)
    return MicrobatchSource(text, edges, text, LANE, **options)


def test_numbers_are_those_of_the_life_and_batches_go_on_where_it_begins():
    text = Text()
    source = source_of(text, first=first_number(3) + 7)
    flights = [source.draw(epoch) for epoch in (1, 1, 2)]
    assert [flight.number for flight in flights] == [3 * NUMBERS + n for n in (7, 8, 9)]
    assert text.drawn == [7, 8, 9]
    assert [flight.epoch for flight in flights] == [1, 1, 2]
    assert source.begun == 3
    assert {microbatch.lane for microbatch in text.seen} == {LANE}


def test_what_rounds_have_counted_is_told_up_to_the_lowest_number_that_is_kept():
    source, told = source_of(Text(), first=first_number(3) + 7), []
    source.counted = told.append
    numbers = [source.draw(0).number for _ in range(5)]
    source.settle(numbers)
    assert told == [], "none counts"
    source.settle(numbers[:1] + numbers[2:])
    assert told == [], "one before it does not"
    source.settle(numbers[2:])
    source.settle(numbers[2:4])
    source.settle([])
    assert told == [9, 12]


def test_lives_far_apart_have_the_same_numbers_and_no_nearer_ones():
    assert first_number(LIVES + 1) == first_number(1)
    assert len({first_number(life) for life in range(100)}) == 100


def test_a_microbatch_knows_its_neighbours_in_its_own_order_and_begins_with_its_targets():
    flight = source_of(Text()).draw(0)
    assert [flight.source(stage) for stage in ORDER] == [-1, 0, 2, 1]
    assert [flight.after(stage) for stage in ORDER] == [2, 1, 3, None]
    assert flight.gradients == {3: bytes([1]) * TOKENS}
    assert flight.tokens == bytes(TOKENS)


def test_a_walk_that_begins_again_keeps_nothing_of_the_last_one_but_what_was_refused():
    flight = source_of(Text(), gone="drop").draw(0)
    request = Forward(0, 0, -1, 0)
    flight.inputs[2] = WholeInputs().expect(flight, 0).read(b"out of 0", request)
    flight.codecs[0], flight.trip_s = None, 1.0
    flight.weights.used(0, Version(4))
    flight.origins.made((2, "input"), "maker")
    flight.origins.refused((2, "input"), "server", 3)
    flight.set_out_again(6)
    assert (flight.epoch, flight.inputs, flight.codecs, flight.trip_s) == (6, {}, {}, 0.0)
    assert flight.weights.named(0) is None
    assert flight.gradients.keys() == {3}
    assert flight.origins.refusers(2) == {"server"}


def test_without_a_memory_an_input_stays_the_payload_that_it_came_as():
    flight, inputs = source_of(Text()).draw(0), WholeInputs()
    expected = inputs.expect(flight, 0)
    kept = expected.read(b"payload", Forward(0, 0, -1, 0))
    assert expected.visit is inputs.backward_visit(flight) is None
    servers = ServerLife("a", 1), ServerLife("b", 1)
    assert {kept.payload(server) for server in servers} == {b"payload"}
    assert kept.taken(servers[0], b"payload", (0,)), "as often as the server likes"
    assert inputs.counts == {}


def test_a_walk_goes_on_where_its_last_known_input_is():
    flight, payload = source_of(Text()).draw(0), WholeInput(b"payload")
    dues = [flight.due()]
    for stage in ORDER[1:]:
        assert flight.lacks_input(stage)
        flight.inputs[stage] = payload
        dues.append(flight.due())
    assert dues == [0, 2, 1, None]
    assert not any(map(flight.lacks_input, ORDER))
    for stage, due in ((3, 1), (1, 2), (2, 0)):
        flight.replace(stage, payload.raw, None)
        assert flight.due() == due
    flight.inputs[3] = payload
    assert flight.due() is None, "what is lost before it is needed no more"


def test_a_payload_is_replaced_unless_it_was_made_again():
    flight, old = source_of(Text()).draw(0), Left((), ("maker",), 1)
    new = Left((), ("other",), 1)
    flight.inputs[2], flight.gradients[2] = WholeInput(old), new
    flight.replace(2, old, b"fetched")
    assert flight.inputs[2].raw == b"fetched"
    flight.replace(2, old, None)
    assert (flight.inputs[2].raw, flight.gradients[2]) == (b"fetched", new)
    flight.replace(2, new, None)
    assert 2 not in flight.gradients


def test_a_server_that_has_read_an_input_is_one_more_holder():
    left = Left(((bytes(32), 300_000),), ("maker",), 3)
    kept = WholeInputs().read(left, Forward(0, 0, -1, 0))
    assert kept.taken(ServerLife("reader", 1), left)
    assert kept.payload(ServerLife("other", 1)).holders == ("maker", "reader")


def test_where_servers_keep_no_versions_no_pass_names_one():
    weights = PassWeights()
    weights.used(1, Version(4))
    assert weights.named(1) is None
    assert not weights.is_ahead(1, 3)
    assert not weights.give_up(1)


@pytest.mark.parametrize(("gone", "another"), [("drop", False), ("newest", True)])
def test_a_pass_names_the_version_that_it_used_last_until_it_is_given_up(gone, another):
    weights = PassWeights(gone)
    assert not weights.give_up(1), "there is none"
    weights.used(1, Version(4))
    weights.used(1, None)
    assert weights.named(1) == Version(4)
    assert weights.named(2) is None
    assert [weights.is_ahead(1, round) for round in (3, 4, 5)] == [True, False, False]
    assert weights.give_up(1) == another
    assert weights.named(1) == (None if another else Version(4))
