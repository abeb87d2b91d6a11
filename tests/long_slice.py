"""A slice of the long tests that changes with the commit, so that in time every one of them runs
before a release, and none of them has to run before every commit.
"""

import hashlib

SHARE = 0.1
LONGEST_S = 3600  # a test that may take longer is run with all the others alone, before a release


def is_in_slice(seed, test_id, share=SHARE):
    """True for about `share` of the test ids; another seed (a commit) draws others."""
    digest = hashlib.sha256(f"{seed}:{test_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def is_over_an_hour(item):
    """True if a test may take so long that nobody would wait for it at a commit."""
    timeout = item.get_closest_marker("timeout")
    return bool(timeout) and timeout.args[0] > LONGEST_S


def select(seed, items):
    """Return (kept, dropped): of the tests that are marked long, the slice is kept."""
    kept, dropped = [], []
    for item in items:
        is_drawn = is_in_slice(seed, item.nodeid) and not is_over_an_hour(item)
        is_kept = not item.get_closest_marker("long") or is_drawn
        (kept if is_kept else dropped).append(item)
    return kept, dropped
