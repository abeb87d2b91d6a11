"""What a user asks for is checked before a node is in its run; a wrong wish is one sentence."""

import sys

import pytest

from farflock.node.errors import Usage
from farflock.node.sinks import choice
from farflock.node.sinks.choice import Endpoint, LogOptions, feeds, parse_address, parse_logs


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("tensorboard", ("tensorboard",)),
        ("tensorboard,wandb", ("tensorboard", "wandb")),
        (" wandb , wandb", ("wandb",)),
    ],
)
def test_names_are_separated_by_commas(text, names):
    assert parse_logs(text) == names


@pytest.mark.parametrize("text", ["", ",", "tensorboard,", "csv", "tensorbord"])
def test_an_unknown_name_is_refused(text):
    with pytest.raises(Usage, match=r"--log: '.*' is not known; (did you mean|choose from)"):
        parse_logs(text)


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


@pytest.mark.parametrize("name", choice.LOGS)
def test_a_missing_extra_is_one_sentence_with_the_line_that_installs_it(monkeypatch, name):
    monkeypatch.delitem(sys.modules, choice.LOGS[name], raising=False)
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for known in [known for known in sys.modules if known.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, known)
    says = rf"--log {name}: .*; run `pip install 'farflock\[{name}\]'`"
    with pytest.raises(Usage, match=says), feeds(LogOptions((name,)), print):
        pytest.fail("the node began")


def test_nothing_is_opened_before_a_node_has_measures():
    with feeds(LogOptions(), pytest.fail):
        pass
