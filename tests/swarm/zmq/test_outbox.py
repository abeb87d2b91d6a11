"""Queues never hold more than their limits, whichever senders fill them and whichever tasks
wait."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.zmq import outbox
from farflock.swarm.zmq.outbox import (
    BULK,
    CONTROL,
    FRAME_COST_BYTES,
    INBOX_BYTES,
    Inbox,
    Outbox,
    Pool,
)

KB256 = bytes(256 * 1024)


def fill(box: Outbox, lane: int, frame: bytes) -> int:
    count = 0
    while box.put(lane, frame):
        count += 1
    return count


def test_each_peer_has_its_own_limit_for_each_class():
    pool = Pool()
    one, other = Outbox(pool), Outbox(pool)
    assert fill(one, BULK, KB256) == outbox.MAX_BULK_BYTES // (len(KB256) + FRAME_COST_BYTES)
    assert one.put(CONTROL, b"x")
    assert other.put(BULK, KB256)


def test_all_peers_together_have_a_limit():
    pool = Pool()
    frames = sum(fill(Outbox(pool), BULK, KB256) for _ in range(20))
    assert frames * len(KB256) <= outbox.MAX_TOTAL_BYTES
    assert pool.used[BULK] <= pool.limits[BULK]


def test_empty_frames_are_not_free():
    assert fill(Outbox(Pool()), CONTROL, b"") == outbox.MAX_CONTROL_BYTES // FRAME_COST_BYTES


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 300_000), st.booleans()),
        max_size=80,
    )
)
def test_the_counts_add_up_whatever_is_put_taken_and_cleared(steps):
    pool = Pool()
    boxes = [Outbox(pool) for _ in range(3)]
    held: list[list[list[int]]] = [[[], []] for _ in boxes]
    for who, lane, size, put in steps:
        if put:
            if boxes[who].put(lane, bytes(size)):
                held[who][lane].append(size)
        elif held[who][lane]:
            assert len(boxes[who].head(lane) or b"") == held[who][lane].pop(0)
            boxes[who].pop(lane)
        else:
            assert boxes[who].clear() == len(held[who][0]) + len(held[who][1])
            held[who] = [[], []]
    for lane in (0, 1):
        assert pool.used[lane] == sum(size + FRAME_COST_BYTES for box in held for size in box[lane])
    assert [bool(box) for box in boxes] == [bool(lanes[0] or lanes[1]) for lanes in held]


def test_waiters_for_room_get_it_in_order_of_arrival():
    async def main():
        box = Outbox(Pool())
        full = fill(box, BULK, KB256)
        waiting = [
            asyncio.create_task(box.put_bulk(bytes([number]) + KB256[1:], 5.0)) for number in (1, 2)
        ]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        for _ in range(full):
            box.pop(BULK)
        assert await asyncio.gather(*waiting) == [True, True]
        assert box.head(BULK)[0] == 1
        box.pop(BULK)
        assert box.head(BULK)[0] == 2

    run_virtual(main())


def test_a_full_peer_does_not_hold_up_waiters_for_another():
    async def main():
        pool = Pool()
        stuck = Outbox(pool)
        fill(stuck, BULK, KB256)
        boxes = [Outbox(pool) for _ in range(7)]
        for box in boxes:
            fill(box, BULK, KB256)
        first = asyncio.create_task(stuck.put_bulk(KB256, 5.0))
        second = asyncio.create_task(boxes[0].put_bulk(KB256, 5.0))
        await asyncio.sleep(0)
        boxes[0].pop(BULK)
        await asyncio.sleep(0.01)
        assert second.done()
        assert not first.done()
        stuck.clear()
        assert await first is False

    run_virtual(main())


def test_waiting_ends_with_the_time_and_leaves_nothing_behind():
    async def main():
        pool = Pool()
        box = Outbox(pool)
        fill(box, BULK, KB256)
        assert await box.put_bulk(KB256, 0.01) is False
        task = asyncio.create_task(box.put_bulk(KB256, 5.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pool.waiters

    run_virtual(main())


def test_the_number_of_waiting_callers_is_bounded():
    async def main():
        pool = Pool()
        box = Outbox(pool)
        fill(box, BULK, KB256)
        tasks = [
            asyncio.create_task(box.put_bulk(KB256, 5.0)) for _ in range(outbox.MAX_WAITERS + 1)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [False] * outbox.MAX_WAITERS + [True]
        box.clear()
        assert not any(await asyncio.gather(*tasks))

    run_virtual(main())


def test_control_is_received_before_bulk_and_each_class_fills_alone():
    async def main():
        inbox = Inbox()
        while not inbox.full(BULK):
            inbox.put(BULK, "peer", KB256)
        assert not inbox.full(CONTROL)
        inbox.put(CONTROL, "peer", b"x")
        assert await inbox.get() == (CONTROL, "peer", b"x")
        assert not inbox.half_empty(BULK)
        taken = 0
        while not inbox.half_empty(BULK):
            taken += len((await inbox.get())[2])
        assert taken >= INBOX_BYTES[BULK] // 2 - len(KB256)

    run_virtual(main())


def test_closing_an_inbox_wakes_a_waiting_task():
    async def main():
        inbox = Inbox()
        task = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        inbox.close()
        with pytest.raises(ConnectionError):
            await task

    run_virtual(main())
