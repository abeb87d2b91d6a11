"""Places and doors are numbers in one form, and nothing else passes for them."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.addresses import is_door, is_place, parse_place
from farflock.swarm.identity import Identity

A, B = (Identity.from_seed(bytes([number]) * 32).peer for number in (1, 2))


@given(st.ip_addresses(), st.integers(1, 65535))
def test_a_place_comes_back_as_its_address_and_port(address, port):
    text = f"/ip{address.version}/{address}/tcp/{port}"
    assert parse_place(text) == (address, port)
    assert is_place(text)
    assert is_door(f"{text}/p2p/{A}", A)
    assert not is_door(f"{text}/p2p/{A}", B)
    assert not is_door(text, A)


@given(st.text(max_size=80) | st.text("/ip46tcp.:0123456789abcdef\n%", max_size=60))
def test_any_text_is_a_place_in_its_one_form_or_refused(text):
    try:
        address, port = parse_place(text)
    except ValueError as error:
        assert str(error).isprintable()
        assert str(error).isascii()
        assert not is_place(text)
    else:
        assert text.isascii()
        assert text.isprintable()
        assert 0 < port < 65536
        assert address == ipaddress.ip_address(text.split("/")[2])


@pytest.mark.parametrize("end", ["\n", " ", "\x00", "/", "/p2p/"])
def test_nothing_may_follow(end):
    assert not is_place(f"/ip4/192.0.2.7/tcp/4001{end}")
    assert not is_door(f"/ip4/192.0.2.7/tcp/4001/p2p/{A}{end}", A)
