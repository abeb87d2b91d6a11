"""Two peers in network namespaces that cannot see each other, and a relay that both see."""

import asyncio
import os
import shutil
import subprocess

import pytest
from worlds.fleet import run
from worlds.waiting import completed

pytestmark = pytest.mark.net


def ip(*words: str) -> None:
    completed(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def islands():
    """Namespaces a and b, each linked to r alone; r does not route between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    names = {side: f"ff{os.getpid()}{side}" for side in "abr"}
    made = []
    try:
        for name in names.values():
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        for number, side in enumerate("ab", start=1):
            inner, outer = f"v{os.getpid()}{side}", f"w{os.getpid()}{side}"
            ip(
                "link",
                "add",
                inner,
                "netns",
                names[side],
                "type",
                "veth",
                "peer",
                "name",
                outer,
                "netns",
                names["r"],
            )
            for name, link, host in ((names[side], inner, 1), (names["r"], outer, 2)):
                ip("-n", name, "address", "add", f"10.77.{number}.{host}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in made:
            completed(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_peers_on_two_islands_talk_through_the_relay_between_them(islands):
    async def main(fleet):
        def inside(side):
            return ("ip", "netns", "exec", islands[side])

        relay = await fleet.process(
            3, inside("r"), listen="tcp://0.0.0.0:7000", advertise=["10.77.1.2", "10.77.2.2"]
        )
        a = await fleet.process(1, inside("a"), listen="tcp://10.77.1.1:7000", relays=[relay.peer])
        b = await fleet.process(2, inside("b"), listen="tcp://10.77.2.1:7000", relays=[relay.peer])
        for one, other in ((a, b), (b, a)):
            one.tell("learn", relay.record.hex())
            one.tell("learn", other.record.hex())
        assert await asked(a, "send", b.peer, b"echo over the water".hex()) == ["True"]
        assert await a.answer("got") == [b.peer, b"echo over the water".hex()]
        assert await asked(a, "road", b.peer) == ["forwarded", "alive"]
        assert await asked(a, "road", relay.peer) == ["direct", "alive"]
        assert int((await asked(relay, "relayed", a.peer))[0]) > 0

        relay.child.kill()
        while (await asked(a, "road", b.peer))[1] == "alive":  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.1)

    async def asked(process, word, *rest):
        process.tell(word, *rest)
        return await process.answer({"send": "sent"}.get(word, word))

    run(main)
