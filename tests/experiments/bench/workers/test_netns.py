"""Hosts on one machine: they see each other at the rate they were given,
and nothing of them stays."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.waiting import completed, line_of, output_of, until_real

from farflock.experiments.bench.workers import netns
from farflock.experiments.bench.workers.netns import NoHosts, hosts

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.net

ANSWER = (
    "import socket; s = socket.create_server(('{}', 7)); "
    "c, _ = s.accept(); c.sendall(b'here'); c.close()"
)
ASK = "import socket; c = socket.create_connection(('{}', 7), 5); print(c.recv(4).decode())"


def links() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def spaces() -> set[str]:
    """The network namespaces that any process of this machine is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(process))
        except OSError:
            continue
    return found


@pytest.fixture
def able():
    try:
        with hosts(1, 1e8):
            pass
    except NoHosts as why:
        pytest.skip(str(why))


def test_hosts_talk_to_each_other(able):
    with hosts(2, 1e8) as (a, b):
        server = subprocess.Popen([*a.prefix, sys.executable, "-c", ANSWER.format(a.address)])
        try:
            asked = [*b.prefix, sys.executable, "-c", ASK.format(a.address)]

            def said():
                return completed(asked, capture_output=True, text=True).stdout

            assert until_real(said, "the answer of the other host") == "here\n"
        finally:
            server.kill()
            server.wait()


def test_each_end_of_a_cable_has_the_limit(able):
    with hosts(1, 25e6) as (host,):
        command = [*host.prefix, "tc", "qdisc"]
        shown = completed(command, capture_output=True, text=True, check=True).stdout
        assert "tbf" in shown
        assert "25Mbit" in shown


def test_tcp_has_the_default_congestion_control_whatever_that_of_this_machine_is(able):
    code = (
        "import socket; c = socket.socket(); c.setblocking(False); "
        "c.connect_ex(('10.78.0.2', 9)); "
        "print(c.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())"
    )
    with hosts(2, 1e8) as (host, _):
        command = [*host.prefix, sys.executable, "-c", code]
        used = completed(command, capture_output=True, text=True, check=True)
    assert used.stdout.strip() == netns.congestion_control()


def test_a_machine_without_cubic_lends_its_own_congestion_control(tmp_path, monkeypatch):
    monkeypatch.setattr(netns, "TCP", tmp_path)
    (tmp_path / "tcp_congestion_control").write_text("bbr\n")
    for available, used in (("reno bbr cubic\n", "cubic"), ("reno bbr\n", "bbr")):
        (tmp_path / "tcp_available_congestion_control").write_text(available)
        assert netns.congestion_control() == used


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError])
def test_nothing_stays_however_the_block_is_left(able, end):
    before, links_before, inside = spaces(), links(), set()
    try:
        with hosts(3, 1e8):
            inside = spaces() - before
            if end:
                raise end
    except (KeyboardInterrupt, RuntimeError):
        pass
    assert len(inside) == 4
    assert not inside & spaces()
    assert links() == links_before


def test_nothing_stays_when_the_owner_is_killed(able):
    code = (
        "import time\n"
        "from farflock.experiments.bench.workers.netns import hosts\n"
        "with hosts(2, 1e8):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(3600)\n"
    )
    before = spaces()
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    assert line_of(owner, "the hosts") == b"up\n"
    made = spaces() - before
    assert len(made) >= 3
    owner.send_signal(signal.SIGKILL)
    output_of(owner, "the owner")
    until_real(lambda: not made & spaces(), "the end of its hosts")


def test_without_root_or_tools_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    with pytest.raises(NoHosts, match="root"), hosts(2, 1e8):
        pass
    monkeypatch.setattr(netns.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert "tc" in netns.obstacle()
