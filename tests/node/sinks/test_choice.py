"""What a user asks for is checked before a node is in its run; a wrong wish is one sentence."""

import pytest

from farflock.node.errors import Usage
from farflock.node.sinks.choice import Endpoint, LogOptions, feeds, parse_address


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("9464", Endpoint("127.0.0.1", 9464), "127.0.0.1:9464"),
        ("127.0.0.1:0", Endpoint("127.0.0.1", 0), "127.0.0.1:0"),
        ("0.0.0.0:65535", Endpoint("0.0.0.0", 65535), "0.0.0.0:65535"),
        ("[::1]:9464", Endpoint("::1", 9464), "[::1]:9464"),
    ],
)
def test_an_address_is_a_port_of_this_machine_or_both(text, address, shown):
    assert parse_address(text) == address
    assert str(parse_address(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["", ":", ":9464", "here:9464", "localhost:1", "::1:9464", "[127.0.0.1]:1", "1.2.3.4",
     "1.2.3.4:", "1.2.3.4:65536", "1.2.3.4:-1", "1.2.3.4:٣", "9" * 5000],
)  # fmt: skip
def test_what_is_no_address_is_refused(text):
    with pytest.raises(Usage, match=r"is no address; write a port, or both as in 127\.0\.0\.1:"):
        parse_address(text)


def test_nothing_is_opened_before_a_node_has_measures():
    with feeds(LogOptions(), pytest.fail):
        pass
