"""Prometheus' own parser reads what we serve, under the names that are everywhere."""

import socket
import urllib.request

import pytest
from worlds.measured import measured

pytest.importorskip("prometheus_client", reason="pip install -c constraints.txt -e .")

from prometheus_client.parser import text_string_to_metric_families

from farflock.node.errors import Failure
from farflock.node.sinks.choice import LOOPBACK, Address, LogOptions, feeds
from farflock.node.sinks.measures import COUNTERS, MEANINGS, NAMES, prometheus_name
from farflock.node.sinks.prometheus import PrometheusServer

pytestmark = pytest.mark.net


@pytest.fixture
def server():
    made = PrometheusServer(LOOPBACK, 0)
    yield made
    made.close()


def fetched(port):
    """The samples that Prometheus would see, as {name: (value, type, help)}."""
    url = f"http://{LOOPBACK}:{port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        sample.name: (sample.value, family.type, family.documentation)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_newest_measures_are_served_with_type_and_meaning(server):
    assert fetched(server.port) == {}
    server.write(measured(1))
    server.write(measured(2))
    expected = {
        prometheus_name(name): (
            getattr(measured(2), name),
            "counter" if name in COUNTERS else "gauge",
            MEANINGS[name],
        )
        for name in NAMES
    }
    assert fetched(server.port) == expected


def test_what_is_not_known_is_not_served(server):
    server.write(measured(1, loss=None))
    assert prometheus_name("loss") not in fetched(server.port)
    assert prometheus_name("step") in fetched(server.port)


def test_it_listens_where_it_was_told_to_and_nowhere_else(server):
    """All of 127.0.0.0/8 is this machine."""
    with (
        pytest.raises(OSError, match="refused"),
        socket.create_connection(("127.0.0.2", server.port), timeout=60),
    ):
        pass


def test_a_port_that_is_taken_is_refused_in_a_sentence_before_anything_begins(server):
    taken = LogOptions(metrics=Address(LOOPBACK, server.port))
    says = "cannot be used: address already in use; choose another port"
    with pytest.raises(Failure, match=says), feeds(taken, print):
        pytest.fail("the node began")


def test_an_address_of_another_machine_is_refused_too():
    elsewhere = LogOptions(metrics=Address("192.0.2.1", 0))
    says = r"cannot be used: .*; choose another port, or an address"
    with pytest.raises(Failure, match=says), feeds(elsewhere, print):
        pytest.fail("the node began")


def test_the_address_is_free_again_when_the_node_has_ended(server):
    said = []
    with feeds(LogOptions(metrics=Address(LOOPBACK, 0)), said.append):
        (sentence,) = said
        port = int(sentence.removesuffix("/metrics").rpartition(":")[2])
        assert fetched(port) == {}
    with pytest.raises(OSError, match="refused"):
        fetched(port)
