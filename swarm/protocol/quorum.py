"""The number of members of a view that decides for all of them."""

from collections.abc import Collection


def is_quorum(members: Collection[int], size: int) -> bool:
    """True if these distinct member indices may decide for a view of `size` members."""
    return 2 * len(members) > size or (2 * len(members) == size and 0 in members)
