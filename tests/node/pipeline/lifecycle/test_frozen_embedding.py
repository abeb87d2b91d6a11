"""The seam of the frozen embedding, and what a run has in its place where one version lasts."""

import asyncio

from farflock.node.pipeline.contrib.table_keeper import TableKeeper
from farflock.node.pipeline.lifecycle.frozen_embedding import FixedEmbedding, FrozenEmbedding

FUNCTIONS = {"at_first", "founded", "before", "begun", "run"}


def test_the_seam_has_five_functions_and_both_sides_of_it_have_them_all():
    assert {name for name in vars(FrozenEmbedding) if not name.startswith("_")} == FUNCTIONS
    for kind in (FixedEmbedding, TableKeeper):
        assert all(callable(getattr(kind, name)) for name in FUNCTIONS)


def test_where_one_version_lasts_books_stay_as_they_are_and_nothing_is_brought():
    async def main():
        books, embedding = object(), FixedEmbedding()
        assert embedding.at_first(books, None, lambda: 3) is books
        embedding.founded()
        await embedding.before(3)
        await embedding.begun(anew=True)
        await embedding.run()

    asyncio.run(main())
