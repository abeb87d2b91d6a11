"""The number of members of a view that decides for all of them."""

from collections.abc import Collection


def is_quorum(members: Collection[int], size: int) -> bool:
    """True if these distinct members decide for `size`: more than half, or half with index 0."""
    # Half suffices with index 0, as two disjoint halves cannot both have it: of two members, the
    # senior can go on alone.
    return 2 * len(members) > size or (2 * len(members) == size and 0 in members)
