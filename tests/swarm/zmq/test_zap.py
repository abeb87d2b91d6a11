"""Admission of connections: the gate's table, and libzmq's own handshake against the handler."""

import asyncio

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from worlds.waiting import LIMIT_S
from zmq.utils import z85

from farflock.swarm.identity import Identity
from farflock.swarm.record import BadRecord, Record, seal
from farflock.swarm.zmq import zap
from farflock.swarm.zmq.zap import Gate, ZapHandler

SOON_S = 0.5  # for what must not come
ME, A, B = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3))


def curve(identity: Identity) -> bytes:
    return identity.session_key().public_key().public_bytes_raw()


def record(identity: Identity, run: str = "run", key: bytes | None = None) -> bytes:
    return seal(identity, Record(run, identity.peer, 1, 1, key or curve(identity)))


def gate(refuse=()) -> Gate:
    return Gate("run", ME.peer, refuse)


def test_a_record_binds_the_key_that_the_connection_uses():
    assert gate().prove(curve(A), record(A)).peer == A.peer


def test_another_peers_record_binds_nothing():
    with pytest.raises(BadRecord, match="another CURVE key"):
        gate().prove(curve(B), record(A))


def test_a_record_that_claims_anothers_key_binds_nothing_without_that_key():
    stolen = record(B, key=curve(A))
    with pytest.raises(BadRecord, match="another CURVE key"):
        gate().prove(curve(B), stolen)


def test_a_record_of_another_run_or_of_myself_binds_nothing():
    with pytest.raises(BadRecord, match="run"):
        gate().prove(curve(A), record(A, run="other"))
    with pytest.raises(BadRecord, match="this peer's own identity"):
        gate().prove(curve(ME), record(ME))


@given(junk=st.binary(max_size=5000))
def test_no_invented_record_binds_anything(junk):
    with pytest.raises(BadRecord):
        gate().prove(curve(A), junk)


def test_a_refused_identity_is_turned_away_and_its_key_is_banned():
    table = gate(refuse=[A.peer])
    assert table.admits(curve(A))
    with pytest.raises(BadRecord, match="refused"):
        table.prove(curve(A), record(A))
    assert not table.admits(curve(A))
    assert table.admits(curve(B))


def test_the_list_of_banned_keys_is_bounded_and_keeps_the_newest():
    table = gate()
    keys = [number.to_bytes(32, "big") for number in range(zap.MAX_BANNED_KEYS + 10)]
    for key in keys:
        table.ban(key)
    assert not table.admits(keys[-1])
    assert table.admits(keys[0])
    assert len(table.banned) == zap.MAX_BANNED_KEYS


def test_a_key_of_another_length_is_not_admitted():
    assert not gate().admits(b"")
    assert not gate().admits(bytes(31))


async def deliver(table: Gate, configure, within_s: float = LIMIT_S) -> zmq.Frame | None:
    """The message that a CURVE server with this gate gets from a client."""
    context, loop = zmq.Context(), asyncio.get_running_loop()
    handler = ZapHandler(context, table, lambda: None)
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        for socket in (server, client):
            socket.linger = 0
        server.curve_server = True
        server.curve_secretkey = z85.encode(ME.session_key().private_bytes_raw())
        port = server.bind_to_random_port("tcp://127.0.0.1")
        configure(client)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"hello")
        until_s = loop.time() + within_s
        while loop.time() < until_s:
            await asyncio.sleep(0.01)
            if server.poll(0):
                return server.recv_multipart(copy=False)[1]
        return None
    finally:
        handler.close()
        client.close()
        server.close()
        context.term()


def as_client(identity: Identity, server: Identity = ME):
    def configure(client):
        client.curve_secretkey = z85.encode(identity.session_key().private_bytes_raw())
        client.curve_publickey = z85.encode(curve(identity))
        client.curve_serverkey = z85.encode(curve(server))

    return configure


@pytest.mark.net
def test_any_key_gets_in_and_is_named_in_each_frame():
    frame = asyncio.run(deliver(gate(), as_client(A)))
    assert frame.bytes == b"hello"
    assert frame.get("User-Id") == curve(A).hex()


@pytest.mark.net
def test_a_banned_key_a_plain_client_and_a_wrong_server_key_get_nowhere():
    table = gate()
    table.ban(curve(A))
    assert asyncio.run(deliver(table, as_client(A), SOON_S)) is None
    assert asyncio.run(deliver(gate(), lambda client: None, SOON_S)) is None
    assert asyncio.run(deliver(gate(), as_client(A, server=B), SOON_S)) is None


@pytest.mark.net
def test_a_request_of_another_form_is_answered_with_a_refusal():
    async def main():
        context = zmq.Context()
        handler = ZapHandler(context, gate(), lambda: None)
        asker = context.socket(zmq.DEALER)
        try:
            asker.connect("inproc://zeromq.zap.01")
            replies = []
            for request in (
                [b"1.0", b"7", b"d", b"a", b"r", b"NULL"],
                [b"1.0"],
                [b"1.0", b"8"] + [b"CURVE"] * 5,
            ):
                asker.send_multipart([b"", *request])
                await asyncio.to_thread(asker.poll, int(1000 * LIMIT_S))
                replies.append(asker.recv_multipart()[3])
            return replies
        finally:
            handler.close()
            asker.close(0)
            context.term()

    assert asyncio.run(main()) == [b"400"] * 3
