"""What `--host`, `--advertise` and `--up` say becomes addresses and rates, or a sentence before any
socket opens."""

import socket
from types import SimpleNamespace

import pytest

from farflock.node.errors import Usage
from farflock.node.process.host import (
    OwnPlace,
    advertised,
    bound_hosts,
    default_host,
    line_rate,
    rate_bits,
)
from farflock.swarm.addresses import LinkAddress

OUTSIDE = LinkAddress("203.0.113.7", 4002, 4003)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with two addresses, a bridge that is down, and two names that it knows."""

    def entry(family, address):
        return SimpleNamespace(family=family, address=address)

    addresses = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "eth0": [entry(17, "00:00:00:00:00:01"), entry(socket.AF_INET, "10.0.0.5")],
        "eth1": [entry(socket.AF_INET6, "fe80::1%eth1"), entry(socket.AF_INET6, "2001:db8::5")],
        "down0": [entry(socket.AF_INET, "172.17.0.1")],
    }
    up = {name: SimpleNamespace(isup=name != "down0") for name in addresses}
    names = {"nat.example": "203.0.113.7", "localhost": "127.0.0.1"}

    def resolve(name, *_, **__):
        if name not in names:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (names[name], 0))]

    monkeypatch.setattr("psutil.net_if_addrs", lambda: addresses)
    monkeypatch.setattr("psutil.net_if_stats", lambda: up)
    monkeypatch.setattr("socket.getaddrinfo", resolve)


@pytest.mark.parametrize(
    ("said", "hosts"),
    [
        ("localhost", ("127.0.0.1",)),
        ("0.0.0.0", ("0.0.0.0",)),
        ("eth1", ("2001:db8::5",)),
        ("10.0.0.5", ("10.0.0.5",)),
    ],
)
def test_every_form_of_a_host_is_taken(said, hosts):
    assert bound_hosts(said, "--host") == hosts


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("example.invalid", "--host: 'example.invalid' is no address, no interface and no known"),
        ("nat.example", "--host: nat.example is 203.0.113.7, which is not an address of this"),
        ("172.17.0.1", "--host: 172.17.0.1 is not an address of this machine"),
        ("x" * 300, "--host: '" + "x" * 64 + "' is no address"),
    ],
)
def test_any_other_host_is_refused_with_what_to_write(said, sentence):
    with pytest.raises(Usage) as error:
        bound_hosts(said, "--host")
    assert str(error.value).startswith(sentence)
    assert "(10.0.0.5, 2001:db8::5)" in str(error.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("203.0.113.7:4002", OUTSIDE),
        ("nat.example:4002", OUTSIDE),
        ("[2001:db8::7]:65534", LinkAddress("2001:db8::7", 65534, 65535)),
    ],
)
def test_an_advertised_address_has_the_next_port_for_bulk(text, address):
    assert advertised([text], "--advertise") == (address,)


@pytest.mark.parametrize(
    "text",
    [
        *("", "203.0.113.7", "203.0.113.7:", ":4002", "203.0.113.7:0", "203.0.113.7:65535"),
        *(
            "a:4",
            "::1",
            "0.0.0.0:4002",
            "203.0.113.7:" + "9" * 5000,
            "203.0.113.7:0655340",
            "203.0.113.7:²",
        ),
    ],
)
def test_nothing_else_can_be_advertised(text):
    with pytest.raises(Usage, match="--advertise"):
        advertised([text], "--advertise")


def test_more_addresses_than_a_peer_publishes_are_refused_and_not_cut():
    texts = [f"203.0.113.{number}:4002" for number in range(1, 6)]
    assert len(advertised(texts[:4] + texts[:1], "--advertise")) == 4
    with pytest.raises(Usage, match="these are 5 addresses, and a peer publishes 4; name those"):
        advertised(texts, "--advertise")


def test_a_machine_behind_an_advertised_address_listens_everywhere():
    assert default_host(()) == "127.0.0.1"
    assert default_host([OUTSIDE]) == "0.0.0.0"
    assert default_host([OUTSIDE, LinkAddress("2001:db8::7", 1, 2)]) == "::"
    outside = OwnPlace(advertise=(OUTSIDE,))
    assert (outside.hosts(), outside.ports) == (("0.0.0.0",), (4002, 0))
    inside = OwnPlace("localhost", 4012, 4001, advertise=(OUTSIDE,))
    assert (inside.hosts(), inside.ports) == (("127.0.0.1",), (4012, 4001))


def test_interfaces_that_are_up_are_known_to_who_listens():
    where = OwnPlace("0.0.0.0", 4002, 4001, advertise=(OUTSIDE,)).listening()
    assert (where.hosts, where.port, where.dht_port) == (("0.0.0.0",), 4002, 4001)
    assert set(where.interfaces) == {"127.0.0.1", "::1", "10.0.0.5", "2001:db8::5"}
    assert where.advertised == (OUTSIDE,)
    passive = OwnPlace("nobody asks", 4002, client_mode=True)
    assert passive.listening().client_mode
    assert (passive.hosts(), passive.ports) == ((), ())


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 1e8), ("1gbit", 1e9), ("512 kbit", 512e3), ("2.5Mbit", 2.5e6), (" 10mbit ", 1e7)],
)
def test_rates_are_bits_a_second(text, bits):
    assert rate_bits(text) == bits


@pytest.mark.parametrize(
    "text", ["", "100", "mbit", "-1mbit", "0mbit", "1e9gbit", "100mbyte", "100000gbit", "nanmbit"]
)
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="such as 100mbit"):
        rate_bits(text)


def test_a_line_has_a_rate_in_bytes_or_all_of_it_or_what_is_remembered():
    assert [line_rate(text, "up") for text in ("8mbit", "all", None)] == [1e6, 0.0, None]
    with pytest.raises(Usage, match=r"^up: '5' is not a rate; write .*100mbit, or all$"):
        line_rate("5", "up")
