"""One seam says where a peer listens, which addresses it publishes, and who can reach it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.addresses import (
    MAX_PUBLISHED,
    AddressScope,
    BadHost,
    LinkAddress,
    Whereabouts,
    hosts_of,
    invited,
    is_elsewhere,
    published,
    reach_of,
    scope_of,
)

INTERFACES = {
    "lo": ("127.0.0.1", "::1"),
    "eth0": ("10.0.0.5", "fe80::1", "2001:db8::5"),
    "eth1": ("203.0.113.9",),
    "down0": (),
}
OWNED = [address for each in INTERFACES.values() for address in each]
PORTS = (4002, 4003)
OUTSIDE = LinkAddress("198.51.100.7", 30402, 30403)


def resolve(name):
    known = {
        "here.example": ["203.0.113.9", "198.51.100.7"],
        "nat.example": ["198.51.100.7"],
        "localhost": ["::1", "127.0.0.1"],
    }
    return known.get(name, [])


def listener(*hosts, **more):
    return Whereabouts(hosts, PORTS, OWNED, **more)


def hosts(found):
    return [each.host for each in found]


@pytest.mark.parametrize(
    ("host", "scope"),
    [
        ("0.0.0.0", AddressScope.NOWHERE),
        ("::", AddressScope.NOWHERE),
        ("169.254.1.1", AddressScope.NOWHERE),
        ("fe80::1", AddressScope.NOWHERE),
        ("224.0.0.1", AddressScope.NOWHERE),
        ("127.0.0.3", AddressScope.MACHINE),
        ("[::1]", AddressScope.MACHINE),
        ("172.31.0.1", AddressScope.NETWORK),
        ("100.64.0.1", AddressScope.NETWORK),
        ("fd00::1", AddressScope.NETWORK),
        ("::ffff:192.168.0.1", AddressScope.NETWORK),
        ("172.32.0.1", AddressScope.EVERYWHERE),
        ("2001:db8::1", AddressScope.EVERYWHERE),
    ],
)
def test_an_address_has_a_scope(host, scope):
    assert scope_of(host) == scope


@pytest.mark.parametrize(
    ("said", "bound"),
    [
        ("127.0.0.1", ("127.0.0.1",)),
        ("127.0.0.3", ("127.0.0.3",)),
        ("0.0.0.0", ("0.0.0.0",)),
        ("::", ("::",)),
        ("10.0.0.5", ("10.0.0.5",)),
        ("2001:DB8::5", ("2001:db8::5",)),
        ("eth0", ("10.0.0.5", "2001:db8::5")),
        ("here.example", ("203.0.113.9",)),
        ("localhost", ("::1", "127.0.0.1")),
    ],
)
def test_a_host_is_an_address_all_of_them_an_interface_or_a_name(said, bound):
    assert hosts_of(said, INTERFACES, resolve) == bound


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("198.51.100.7", "198.51.100.7 is not an address of this machine"),
        ("nat.example", "nat.example is 198.51.100.7, which is not an address of this machine"),
        ("fe80::1", "fe80::1 is not an address of this machine, or not one that others can dial"),
        ("999.1.1.1", "'999.1.1.1' is no address, no interface and no known name"),
        ("down0", "'down0' is no address"),
        ("", "'' is no address"),
    ],
)
def test_a_host_that_nobody_can_dial_here_is_refused_with_those_that_can(said, why):
    with pytest.raises(BadHost) as error:
        hosts_of(said, INTERFACES, resolve)
    assert error.value.why.startswith(why)
    assert "10.0.0.5, 2001:db8::5, 203.0.113.9" in error.value.remedy
    assert "127.0.0.1" not in error.value.remedy


def test_one_address_that_is_bound_is_published():
    assert published(listener("10.0.0.5")) == (LinkAddress("10.0.0.5", *PORTS),)


def test_all_addresses_are_published_from_the_widest_scope_to_the_narrowest():
    assert hosts(published(listener("::"))) == ["203.0.113.9", "2001:db8::5", "10.0.0.5"]
    assert hosts(published(listener("0.0.0.0"))) == ["203.0.113.9", "10.0.0.5"]


def test_one_network_does_not_crowd_out_the_others():
    many = Whereabouts(["::"], PORTS, [f"2001:db8::{n}" for n in range(1, 9)] + ["10.0.0.5"])
    assert hosts(published(many)) == ["2001:db8::1", "10.0.0.5", "2001:db8::2", "2001:db8::3"]


def test_what_is_advertised_comes_first_with_ports_of_its_own():
    found = published(listener("0.0.0.0", advertised=[OUTSIDE]))
    assert found[0] == OUTSIDE
    assert found[0].endpoints == ("/ip4/198.51.100.7/tcp/30402", "/ip4/198.51.100.7/tcp/30403")
    assert hosts(found[1:]) == ["203.0.113.9", "10.0.0.5"]


def test_what_a_member_confirmed_is_published_before_private_addresses():
    seen = LinkAddress("198.51.100.8", *PORTS)
    assert hosts(published(listener("10.0.0.5", confirmed=[seen]))) == ["198.51.100.8", "10.0.0.5"]
    several = published(listener("0.0.0.0", confirmed=[seen]))
    assert hosts(several) == ["203.0.113.9", "198.51.100.8", "10.0.0.5"]


@pytest.mark.parametrize(
    ("one", "other", "elsewhere"),
    [
        ("203.0.113.9", "203.0.113.200", False),
        ("203.0.113.9", "203.0.114.9", True),
        ("2001:db8::1", "2001:db8::ffff:1", False),
        ("2001:db8::1", "2001:db8:0:1::1", True),
        ("203.0.113.9", "2001:db8::1", True),
        ("::ffff:203.0.113.9", "203.0.113.1", False),
    ],
)
def test_networks_are_told_apart(one, other, elsewhere):
    assert is_elsewhere(one, other) == elsewhere


def test_loopback_is_published_only_in_a_run_that_lives_there():
    assert hosts(published(listener("127.0.0.1"))) == ["127.0.0.1"]
    assert published(listener("127.0.0.1", leaves_machine=True)) == ()
    assert hosts(published(listener("127.0.0.1", advertised=[OUTSIDE]))) == ["198.51.100.7"]
    alone = Whereabouts(["0.0.0.0"], PORTS, ["127.0.0.1", "::1"])
    assert hosts(published(alone)) == ["127.0.0.1"]


def test_an_invite_has_the_widest_scope_and_both_versions():
    assert invited(hosts(published(listener("::")))) == ["203.0.113.9", "2001:db8::5"]
    assert invited(["10.0.0.5", "10.0.0.6", "fd00::1"]) == ["10.0.0.5", "fd00::1"]
    assert invited([]) == []


def test_who_can_reach_a_peer_is_said():
    def said(*chosen, by=None, **more):
        return reach_of(published(listener(*chosen, **more)), by and ("203.0.113.9", by))

    peer = "12D3KooWabcdefgh"
    assert said("127.0.0.1") == "only this machine"
    assert said("127.0.0.1", leaves_machine=True) == "nobody: this node only dials out"
    assert said("10.0.0.5") == "this network (10.0.0.5)"
    assert said("0.0.0.0") == "unknown until somebody joins (203.0.113.9)"
    assert said("0.0.0.0", by=peer) == "confirmed from outside by abcdefgh (203.0.113.9)"
    outside = said("10.0.0.5", advertised=[OUTSIDE])
    assert outside == "unknown until somebody joins (198.51.100.7)"


addresses = st.ip_addresses().map(str)


@given(st.lists(addresses, max_size=12), st.sampled_from(["::", "0.0.0.0"]), st.booleans())
def test_whatever_the_machine_has_what_is_published_can_be_dialled(owned, host, leaves_machine):
    found = published(Whereabouts([host], PORTS, owned, leaves_machine=leaves_machine))
    scopes = {scope_of(each.host) for each in found}
    assert len(found) <= MAX_PUBLISHED
    assert AddressScope.NOWHERE not in scopes
    assert len(scopes) <= 1 or AddressScope.MACHINE not in scopes
    assert len(set(found)) == len(found)
