"""A node takes the ports again on which it listened, unless it was told others."""

import pytest

from farflock.node.assembly import kept_ports
from farflock.node.assembly.kept_ports import KeptPorts, port_in
from farflock.node.assembly.own_addresses import Listening
from farflock.swarm.dht.files import PortTaken

TAKEN, TAKEN_V6 = 20_100, 20_200


@pytest.fixture
def ports(tmp_path, monkeypatch):
    """Ports of a machine on which one is taken, and another one at its IPv6 hosts."""

    def refuse(listen):
        for address in listen:
            if address.endswith(f"/tcp/{TAKEN}") or address == f"/ip6/::1/tcp/{TAKEN_V6}":
                raise PortTaken("another program uses it")

    monkeypatch.setattr(kept_ports, "refuse_taken_ports", refuse)
    return KeptPorts(tmp_path / "ports")


def again(ports, links=0, directory=0, hosts=("127.0.0.1",)):
    where = ports.again(Listening(hosts, links, directory, interfaces=("10.0.0.5",)))
    assert (where.hosts, where.interfaces) == (hosts, ("10.0.0.5",))
    return where.port, where.dht_port


def test_ports_that_nobody_named_are_the_last_ones(ports):
    assert again(ports) == (0, 0)
    links, directory = 20_011, 20_021
    ports.keep(links=links)
    ports.keep(directory=directory)
    assert again(ports) == (links, directory)
    assert again(ports, 4001, 4003) == (4001, 4003)
    ports.keep(links=links + 2)
    assert again(ports) == (links + 2, directory)


def test_a_port_that_another_program_has_now_is_not_waited_for(ports):
    ports.keep(links=TAKEN - 1, directory=TAKEN)
    assert again(ports) == (0, 0), "the links' bulk would need the same port"
    ports.keep(links=TAKEN - 2)
    assert again(ports, hosts=("::1",)) == (TAKEN - 2, 0)


def test_a_port_is_taken_again_only_if_it_is_free_at_all_hosts(ports):
    ports.keep(links=TAKEN_V6, directory=TAKEN_V6)
    assert again(ports) == (TAKEN_V6, TAKEN_V6)
    assert again(ports, hosts=("127.0.0.1", "::1")) == (0, 0)


@pytest.mark.parametrize("content", [b"", b"junk", b'{"links": 70000}', b"x" * 2000])
def test_a_file_that_cannot_be_read_names_no_port(ports, content):
    ports.path.write_bytes(content)
    assert again(ports) == (0, 0)


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("/ip4/127.0.0.1/tcp/4001", 4001),
        ("/ip6/::1/tcp/4001/p2p/12D3", 4001),
        ("/ip4/127.0.0.1/udp/4001/quic", 0),
        ("/ip4/127.0.0.1/tcp", 0),
        ("", 0),
    ],
)
def test_the_port_in_an_address(address, port):
    assert port_in(address) == port
