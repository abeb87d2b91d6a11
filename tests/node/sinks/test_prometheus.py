"""Prometheus' own parser reads what we serve, under the names that are everywhere."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from worlds.measured import measured
from worlds.waiting import until_real

from farflock.node.errors import Failure
from farflock.node.sinks import prometheus
from farflock.node.sinks.choice import LOOPBACK, Endpoint, LogOptions, feeds
from farflock.node.sinks.measures import COUNTERS, MEANINGS, NAMES, prometheus_name
from farflock.node.sinks.prometheus import MAX_CLIENTS, PrometheusServer

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


def answer(port, request):
    """The first line of the answer to these bytes; none if the server breaks off."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=60) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            return client.makefile("rb").readline()
    except OSError:  # of a connection that is over already, too
        return b""


def test_clients_that_say_nothing_take_a_few_threads_and_no_more(server, monkeypatch):
    monkeypatch.setattr(prometheus, "CLIENT_TIMEOUT_S", 600.0)
    fetch = b"GET /metrics HTTP/1.0\r\n\r\n"
    silent = [socket.create_connection((LOOPBACK, server.port)) for _ in range(MAX_CLIENTS)]
    until_real(lambda: answer(server.port, fetch) == b"", "a client that is turned away")
    for client in silent:
        client.close()
    until_real(lambda: b"200" in answer(server.port, fetch), "room for a client")


def test_a_client_that_says_nothing_is_left(server, monkeypatch):
    monkeypatch.setattr(prometheus, "CLIENT_TIMEOUT_S", 0.01)
    with socket.create_connection((LOOPBACK, server.port), timeout=60) as silent:
        assert silent.recv(1) == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\0\xff\n",
        b"G" * 70_000,
        b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"GET /?name[]=%ff&%%= HTTP/1.0\r\nContent-Length: -1\r\n\r\n",
        b"POST /metrics HTTP/1.0\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET / HTTP/1.0\r\nAccept: application/openmetrics-text; version=x.y\r\n\r\n",
    ],
)
def test_a_hostile_request_harms_no_other_and_prints_nothing(server, request_bytes, capfd):
    server.write(measured(1))
    answer(server.port, request_bytes)
    assert prometheus_name("step") in fetched(server.port)
    assert capfd.readouterr() == ("", "")


def test_it_listens_where_it_was_told_to_and_nowhere_else(server):
    """All of 127.0.0.0/8 is this machine."""
    with (
        pytest.raises(OSError, match="refused"),
        socket.create_connection(("127.0.0.2", server.port), timeout=60),
    ):
        pass


def test_a_port_that_is_taken_is_refused_in_a_sentence_before_anything_begins(server):
    taken = LogOptions(metrics=Endpoint(LOOPBACK, server.port))
    says = "cannot be used: address already in use; choose another port"
    with pytest.raises(Failure, match=says), feeds(taken, print):
        pytest.fail("the node began")


def test_an_address_of_another_machine_is_refused_too():
    elsewhere = LogOptions(metrics=Endpoint("192.0.2.1", 0))
    says = r"cannot be used: .*; choose another port, or an address"
    with pytest.raises(Failure, match=says), feeds(elsewhere, print):
        pytest.fail("the node began")


def test_the_address_is_free_again_when_the_node_has_ended(server):
    said = []
    with feeds(LogOptions(metrics=Endpoint(LOOPBACK, 0)), said.append):
        (sentence,) = said
        port = int(sentence.removesuffix("/metrics").rpartition(":")[2])
        assert fetched(port) == {}
    with pytest.raises(OSError, match="refused"):
        fetched(port)
