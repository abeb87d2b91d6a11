"""A node takes the ports again on which it listened, unless it was told others."""

import pytest

from farflock.node.assembly import kept_ports
from farflock.node.assembly.kept_ports import KeptPorts, port_in
from farflock.swarm.dht.files import PortTaken

TAKEN = 20_100


@pytest.fixture
def ports(tmp_path, monkeypatch):
    """Ports of a machine on which one is taken."""

    def refuse(listen):
        if any(address.endswith(f"/tcp/{TAKEN}") for address in listen):
            raise PortTaken("another program uses it")

    monkeypatch.setattr(kept_ports, "refuse_taken_ports", refuse)
    return KeptPorts(tmp_path / "ports")


def test_ports_that_nobody_named_are_the_last_ones(ports):
    assert ports.wanted("127.0.0.1", 0, 0) == (0, 0)
    links, directory = 20_011, 20_021
    ports.keep(links=links)
    ports.keep(directory=directory)
    assert ports.wanted("127.0.0.1", 0, 0) == (links, directory)
    assert ports.wanted("127.0.0.1", 4001, 4003) == (4001, 4003)
    ports.keep(links=links + 2)
    assert ports.wanted("127.0.0.1", 0, 0) == (links + 2, directory)


def test_a_port_that_another_program_has_now_is_not_waited_for(ports):
    ports.keep(links=TAKEN - 1, directory=TAKEN)
    assert ports.wanted("127.0.0.1", 0, 0) == (0, 0), "the links' bulk would need the same port"
    ports.keep(links=TAKEN - 2)
    assert ports.wanted("::1", 0, 0) == (TAKEN - 2, 0)


@pytest.mark.parametrize("content", [b"", b"junk", b'{"links": 70000}', b"x" * 2000])
def test_a_file_that_cannot_be_read_names_no_port(ports, content):
    ports.path.write_bytes(content)
    assert ports.wanted("127.0.0.1", 0, 0) == (0, 0)


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
