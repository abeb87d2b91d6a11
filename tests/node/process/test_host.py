"""A host that no peer could dial is refused with a clear message before any socket is opened."""

import pytest

from farflock.node.errors import Usage
from farflock.node.process.host import is_loopback, require_host


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.7"])
def test_an_address_that_can_be_dialled_is_taken(host):
    assert require_host(host, "--host") == host


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("localhost", "--host: 'localhost' is not an IP address; write 127.0.0.1"),
        ("example.invalid", "--host: 'example.invalid' is not an IP address; write the address"),
        ("999.1.1.1", "--host: '999.1.1.1' is not an IP address"),
        ("::1", "--host: ::1 is an IPv6 address, and nodes listen on IPv4"),
        ("0.0.0.0", "--host: 0.0.0.0 means every address of this machine"),
    ],
)
def test_any_other_host_is_refused_with_the_reason(host, sentence):
    with pytest.raises(Usage) as error:
        require_host(host, "--host")
    assert str(error.value).startswith(sentence)


def test_a_loopback_address_is_known():
    assert is_loopback("127.0.0.1")
    assert not is_loopback("192.0.2.7")


def test_for_every_address_the_machines_own_ones_are_offered(monkeypatch):
    address = type("Address", (), {"family": 2, "address": "192.0.2.7"})
    loopback = type("Address", (), {"family": 2, "address": "127.0.0.1"})
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [loopback], "eth0": [address]})
    with pytest.raises(Usage, match=r"reach \(this machine has 192\.0\.2\.7\)"):
        require_host("0.0.0.0", "host")
