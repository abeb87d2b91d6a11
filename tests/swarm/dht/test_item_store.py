from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.dht.item_store import ItemStore, StoredItem


def item(owner=b"a", value=b"v", expires_s=10.0):
    return StoredItem(owner, value, expires_s)


def test_what_was_put_is_there_until_it_expires():
    shelf = ItemStore()
    assert shelf.put(b"k", item(expires_s=10.0), now_s=0.0)
    assert shelf.items(b"k", now_s=9.9) == [item(expires_s=10.0)]
    assert shelf.items(b"k", now_s=10.0) == []
    assert shelf.items(b"other", now_s=0.0) == []


def test_a_later_expiry_replaces_an_earlier_one():
    shelf = ItemStore()
    shelf.put(b"k", item(value=b"old", expires_s=10.0), now_s=0.0)
    assert shelf.put(b"k", item(value=b"new", expires_s=11.0), now_s=0.0)
    assert [each.value for each in shelf.items(b"k", now_s=0.0)] == [b"new"]


def test_a_replayed_older_item_neither_replaces_nor_shortens_the_newer_one():
    shelf = ItemStore()
    shelf.put(b"k", item(value=b"new", expires_s=11.0), now_s=0.0)
    assert not shelf.put(b"k", item(value=b"old", expires_s=10.0), now_s=0.0)
    assert not shelf.put(b"k", item(value=b"same age", expires_s=11.0), now_s=0.0)
    assert [each.value for each in shelf.items(b"k", now_s=10.5)] == [b"new"]


def test_an_expired_item_is_not_taken():
    assert not ItemStore().put(b"k", item(expires_s=1.0), now_s=1.0)


def test_a_full_key_refuses_new_owners_and_still_serves_the_known_ones():
    shelf = ItemStore(max_items_per_key=1)
    assert shelf.put(b"k", item(b"a"), now_s=0.0)
    assert not shelf.put(b"k", item(b"b"), now_s=0.0)
    assert shelf.put(b"k", item(b"a", expires_s=20.0), now_s=0.0)
    assert shelf.put(b"other", item(b"b"), now_s=0.0)


def test_a_full_shelf_makes_room_of_what_has_expired():
    shelf = ItemStore(max_items=2)
    shelf.put(b"k", item(b"a", expires_s=5.0), now_s=0.0)
    shelf.put(b"k", item(b"b", expires_s=50.0), now_s=0.0)
    assert not shelf.put(b"k", item(b"c"), now_s=4.0)
    assert shelf.put(b"k", item(b"c"), now_s=6.0)
    assert {each.subkey for each in shelf.items(b"k", now_s=6.0)} == {b"b", b"c"}


def test_bytes_are_bounded_also_when_an_owner_grows():
    shelf = ItemStore(max_bytes=10)
    assert shelf.put(b"k", item(b"a", b"x" * 6), now_s=0.0)
    assert not shelf.put(b"k", item(b"b", b"x" * 5), now_s=0.0)
    assert not shelf.put(b"k", item(b"a", b"x" * 11, expires_s=20.0), now_s=0.0)
    assert shelf.put(b"k", item(b"a", b"x" * 10, expires_s=20.0), now_s=0.0)
    assert shelf.bytes_stored == 10


puts = st.tuples(
    st.sampled_from([b"k", b"l", b"m"]),
    st.builds(
        StoredItem,
        st.sampled_from([b"a", b"b", b"c", b"d"]),
        st.binary(max_size=8),
        st.floats(0, 30),
    ),
    st.floats(0, 3),
)


@given(st.lists(puts, max_size=60))
def test_the_books_are_right_and_the_bounds_hold_after_any_history(history):
    shelf, now_s, newest = ItemStore(max_items_per_key=3, max_items=6, max_bytes=30), 0.0, {}
    for key, each, wait_s in history:
        now_s += wait_s
        if shelf.put(key, each, now_s):
            assert (
                each.expires_s > newest.get((key, each.subkey), 0.0)
                or newest[key, each.subkey] <= now_s
            )
            newest[key, each.subkey] = each.expires_s
        stored = [each for items in shelf.contents.values() for each in items]
        assert shelf.items_stored == len(stored) <= 6
        assert shelf.bytes_stored == sum(len(each.value) for each in stored) <= 30
        assert all(1 <= len(items) <= 3 for items in shelf.contents.values())
        for (key, owner), expires_s in newest.items():
            live = [each for each in shelf.items(key, now_s) if each.subkey == owner]
            assert len(live) == (1 if expires_s > now_s else 0)
