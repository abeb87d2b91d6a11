"""A store keeps chunks while anybody pins them, and then as long as there is room."""

import pytest

from farflock.swarm import chunk_store as module
from farflock.swarm.chunk_store import Store, digest_of


def test_a_chunk_stays_while_anybody_pins_it_and_goes_when_room_is_short_oldest_first():
    store = Store(budget_bytes=250)
    a, b, c, d = (bytes([n]) * 100 for n in range(4))
    store.put(a, "one")
    store.put(a, "two")
    store.put(b, "one")
    store.put(c, "one")
    assert store.size_bytes == 300, "pinned chunks may exceed the budget"
    store.release("one")
    kept = [store.get(digest_of(data)) for data in (a, b, c)]
    assert kept[0] == a
    assert kept.count(None) == 1
    store.put(d, "three")
    assert [store.get(digest_of(data)) for data in (a, b, c, d)] == [a, None, None, d]
    store.release("two")
    store.release("three")
    assert store.size_bytes == 200


def test_nothing_is_left_of_pins_that_are_released():
    store = Store(budget_bytes=0)
    for number in range(100):
        store.put(bytes([number]) * 10, number)
        store.put(b"shared", number)
    for number in range(100):
        store.release(number)
        store.release(number)
    assert (store.size_bytes, len(store), store.pinned_chunks, store.pins) == (0, 0, 0, ())


def test_what_a_user_forgets_stays_only_if_another_has_pinned_it():
    store = Store(1000)
    own, common = (store.put(data, "a") for data in (b"own", b"common"))
    store.pin(common, "b")
    store.forget("a")
    assert (store.get(own), store.get(common), store.size_bytes) == (None, b"common", 6)
    store.forget("b")
    store.forget("nobody")
    assert (len(store), store.size_bytes, store.pins) == (0, 0, ())


def test_views_of_a_file_are_chunks_too():
    store, data = Store(1000), bytes(range(200))
    name = store.put(memoryview(data), "a")
    assert (store.get(name), store.view(name), store.size_bytes) == (data, data, 200)
    assert store.view(bytes(32)) is None


def test_the_same_content_is_kept_once():
    store = Store(1000)
    assert store.put(b"x" * 100, "a") == store.put(b"x" * 100, "b") == digest_of(b"x" * 100)
    assert store.size_bytes == 100


def test_what_was_verified_is_not_hashed_again(monkeypatch):
    store = Store(1000)
    name = digest_of(b"x" * 100)
    monkeypatch.setattr(module, "digest_of", lambda data: pytest.fail("hashed again"))
    assert store.put(b"x" * 100, "a", verified=name) == name
    assert store.get(name) == b"x" * 100


def test_a_full_store_drops_the_chunks_released_first_and_no_pinned_one():
    store = Store(budget_bytes=30)
    names = [store.put(bytes([number]) * 10, number) for number in range(3)]
    for pin in (1, 0):
        store.release(pin)
    store.pin(names[1], "again")
    store.put(b"x" * 10, "x")
    assert [name in store for name in names] == [False, True, True]
    store.release("again")
    store.put(b"y" * 10, "y")
    assert [name in store for name in names] == [False, False, True]
    assert store.size_bytes == 30
