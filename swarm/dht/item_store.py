"""The items that this peer stores for others: bounded in number and bytes, in total and per key.

hivemind's own storage has no such bounds, keeps a heap entry for every refused or repeated store,
and lets a replayed older item shorten the life of a newer one.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

MAX_ITEMS_PER_KEY = 128  # two cells full of peers
MAX_ITEMS = 4096
MAX_BYTES = 8 * 2**20


class StoredItem(NamedTuple):
    """One owner's value under a key; `expires_s` is wall-clock time, as everywhere in the DHT."""

    subkey: bytes
    value: bytes
    expires_s: float


@dataclass(slots=True)
class ItemStore:
    """A table of values by key and owner; only a later expiry replaces a value.

    A full store drops expired items, then refuses new owners but still serves known ones.
    """

    max_items_per_key: int = MAX_ITEMS_PER_KEY
    max_items: int = MAX_ITEMS
    max_bytes: int = MAX_BYTES
    items_stored: int = 0
    bytes_stored: int = 0
    _keys: dict[bytes, dict[bytes, StoredItem]] = field(default_factory=dict)

    @property
    def contents(self) -> dict[bytes, list[StoredItem]]:
        """The stored items by key, including expired ones that were not dropped yet."""
        return {key: list(items.values()) for key, items in self._keys.items()}

    def put(self, key: bytes, item: StoredItem, now_s: float) -> bool:
        """Keep the item; False if it has expired, is not newer than ours, or there is no room."""
        known = self._keys.get(key, {}).get(item.subkey)
        if item.expires_s <= now_s or (known is not None and item.expires_s <= known.expires_s):
            return False
        if not self._has_room(key, item, known):
            self._drop_expired(now_s)
            known = self._keys.get(key, {}).get(item.subkey)
            if not self._has_room(key, item, known):
                return False
        if known is not None:
            self._remove(key, known)
        self._keys.setdefault(key, {})[item.subkey] = item
        self.items_stored += 1
        self.bytes_stored += len(item.value)
        return True

    def items(self, key: bytes, now_s: float) -> list[StoredItem]:
        """Return the live items of a key."""
        return [item for item in self._keys.get(key, {}).values() if item.expires_s > now_s]

    def _has_room(self, key: bytes, item: StoredItem, known: StoredItem | None) -> bool:
        more_items = 0 if known is not None else 1
        more_bytes = len(item.value) - (len(known.value) if known is not None else 0)
        return (
            len(self._keys.get(key, {})) + more_items <= self.max_items_per_key
            and self.items_stored + more_items <= self.max_items
            and self.bytes_stored + more_bytes <= self.max_bytes
        )

    def _drop_expired(self, now_s: float) -> None:
        for key in list(self._keys):
            for item in list(self._keys[key].values()):
                if item.expires_s <= now_s:
                    self._remove(key, item)

    def _remove(self, key: bytes, item: StoredItem) -> None:
        del self._keys[key][item.subkey]
        if not self._keys[key]:
            del self._keys[key]
        self.items_stored -= 1
        self.bytes_stored -= len(item.value)
