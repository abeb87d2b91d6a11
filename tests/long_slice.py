"""A slice of the long tests that changes with the commit, so that in time every one of them runs
before a release, and none of them has to run before every commit.
"""

import hashlib

SHARE = 0.1


def is_in_slice(seed, test_id, share=SHARE):
    """True for about `share` of the test ids; another seed (a commit) draws others."""
    digest = hashlib.sha256(f"{seed}:{test_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def select(seed, items):
    """Return (kept, dropped): of the tests that are marked long, the slice is kept."""
    kept, dropped = [], []
    for item in items:
        is_kept = not item.get_closest_marker("long") or is_in_slice(seed, item.nodeid)
        (kept if is_kept else dropped).append(item)
    return kept, dropped
