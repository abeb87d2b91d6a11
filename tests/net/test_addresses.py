"""A founder in each kind of network, and a joiner from outside: in, or told before the first step.

Each host is a network namespace; the internet between them is one that routes. What is in front of
a founder, a provider's 1:1 NAT or a container's host, is a program that passes connections on.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from worlds.waiting import completed, ended, told, until_real

pytestmark = [pytest.mark.net, pytest.mark.long]

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "farflock.node.cli")
RUN = """
[run]
name = "addresses"
total_tokens = 1_000_000_000
[model]
preset = "tiny"
[train]
batch = 2
seq = 16
[method]
name = "diloco"
[method.options]
period = 10
[exchange]
view_s = 1.0
"""
PASS_ON = """
import asyncio, sys

async def main(front, back, *ports):
    async def copy(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    def to(port):
        async def serve(reader, writer):
            there = await asyncio.open_connection(back, port)
            await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))
        return serve

    for outside, inside in (map(int, pair.split(":")) for pair in ports):
        await asyncio.start_server(to(inside), front, outside)
    print("passes on", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass(frozen=True)
class Case:
    """Where the founder is, what it says, what `run` says before the first step, and from where the
    joiner comes."""

    address: str
    options: tuple[str, ...]
    said: str
    joiner: str | None = "198.51.100."  # its network; None: nobody can come
    passed_on: tuple[str, ...] = ()  # ports at 203.0.113.5, in front of it


CASES = {
    "nothing said": Case("203.0.113.5/24", (), "only this machine", None),
    "a plain LAN": Case(
        "192.168.1.5/24", ("--host", "uplink"), "this network (192.168.1.5)", "192.168.2."
    ),
    "a 1:1 NAT": Case(
        "10.0.0.5/24",
        ("--advertise", "203.0.113.5:4002"),
        "unknown until somebody joins (203.0.113.5)",
        passed_on=("4002:4002", "4003:4003"),
    ),
    "a bridge with two published ports": Case(
        "172.17.0.2/24",
        ("--advertise", "203.0.113.5:30402", "--port", "4002"),
        "unknown until somebody joins (203.0.113.5)",
        passed_on=("30402:4002", "30403:4003"),
    ),
    "IPv6 only": Case(
        "2001:db8:b::5/64",
        ("--host", "::"),
        "unknown until somebody joins (2001:db8:b::5)",
        "2001:db8:a::",
    ),
}


class Hosts:
    """Namespaces that route to each other as they are plugged together."""

    def __init__(self):
        self._names, self._started = {}, []

    def name(self, host):
        if host not in self._names:
            name = f"fa{os.getpid()}{host}"
            _ip("netns", "add", name)
            self._names[host] = name
            _ip("-n", name, "link", "set", "lo", "up")
            for family in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
                path = f"/proc/sys/net/{family}"
                completed([*self.inside(host), "sh", "-c", f"echo 1 > {path}"], check=True)
        return self._names[host]

    def inside(self, host):
        return ("ip", "netns", "exec", self.name(host))

    def plug(self, host, address, router, gateway):
        """Connect a host's `uplink` to a router, which is its way to everywhere else."""
        port, size = f"to-{host}", address.rpartition("/")[2]
        names = self.name(host), self.name(router)
        _ip("-n", names[1], "link", "add", port, "type", "veth", "peer", "name", "up0")
        _ip("-n", names[1], "link", "set", "up0", "netns", names[0], "name", "uplink")
        for name, link, place in (
            (names[0], "uplink", address),
            (names[1], port, f"{gateway}/{size}"),
        ):
            more = ("nodad",) if ":" in place else ()
            _ip("-n", name, "address", "add", place, "dev", link, *more)
            _ip("-n", name, "link", "set", link, "up")
        version = "-6" if ":" in gateway else "-4"
        _ip("-n", names[0], version, "route", "add", "default", "via", gateway)

    def start(self, host, *command, **more):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [*self.inside(host), *command], cwd=ROOT, env=environment, **more
        )
        self._started.append(process)
        return process

    def close(self):
        for process in self._started:
            process.kill()
            ended(process, "a program in a namespace")
        for name in self._names.values():
            completed(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*words):
    completed(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    made = Hosts()
    try:
        made.name("internet")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        yield made
    finally:
        made.close()


def build(hosts, case):
    """Put the founder, what is in front of it, and the joiner in their places."""
    network = case.address.rpartition("/")[0]
    cut = network.rindex(":" if ":" in network else ".") + 1
    gateway = network[:cut] + ("fe" if ":" in network else "254")
    front = "front" if case.passed_on else "internet"
    hosts.plug("founder", case.address, front, gateway)
    if case.passed_on:
        hosts.plug("front", "203.0.113.5/24", "internet", "203.0.113.254")
        passing = (sys.executable, "-c", PASS_ON, "203.0.113.5", network, *case.passed_on)
        assert hosts.start("front", *passing, stdout=subprocess.PIPE).stdout.readline()
    if case.joiner is not None:
        size, end = case.address.rpartition("/")[2], "fe" if ":" in case.joiner else "254"
        hosts.plug("joiner", f"{case.joiner}7/{size}", "internet", f"{case.joiner}{end}")


@pytest.mark.parametrize("name", CASES)
def test_a_joiner_from_outside_gets_in_or_the_founder_is_told_before_the_first_step(
    name, hosts, tmp_path
):
    case = CASES[name]
    build(hosts, case)
    (tmp_path / "run.toml").write_text(RUN)
    logs = {who: tmp_path / f"{who}.txt" for who in ("founder", "joiner")}

    def start(who, *words):
        folder = ("--folder", str(tmp_path / who))
        with logs[who].open("ab") as log:
            return hosts.start(who, *COMMAND, *words, *folder, stdout=log, stderr=log)

    def status(who):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((tmp_path / who / "status.json").read_text())
        return {}

    founder = start("founder", "run", str(tmp_path / "run.toml"), *case.options)
    invite = tmp_path / "founder" / "invite.txt"

    def trains():
        assert founder.poll() is None, told("the founder", founder, logs["founder"])
        return status("founder").get("step")

    until_real(trains, "the founder's first step", lambda: told("it", founder, logs["founder"]))
    words = logs["founder"].read_text()
    assert f"who can join: {case.said}" in words
    if case.joiner is None:
        return
    joiner = start("joiner", "join", invite.read_text().strip())

    def is_in():
        assert joiner.poll() is None, told("the joiner", joiner, logs["joiner"])
        return status("joiner").get("is_member")

    until_real(is_in, "the joiner's place", lambda: told("it", joiner, logs["joiner"]))
    if "unknown" in case.said:
        end = status("joiner")["peer"][-8:]
        until_real(
            lambda: f"confirmed from outside by {end}" in logs["founder"].read_text(),
            "the founder's confirmation",
            lambda: told("it", founder, logs["founder"]),
        )
        assert "nobody: this node only dials out" in logs["joiner"].read_text()
