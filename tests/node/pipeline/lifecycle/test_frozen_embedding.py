"""The seam of the frozen embedding, and what a run has in its place where one version lasts."""

import asyncio

from farflock.node.pipeline.contrib.embedding_sync import EmbeddingSync
from farflock.node.pipeline.lifecycle.frozen_embedding import FrozenEmbedding

FUNCTIONS = {"at_first", "founded", "before", "begun", "run"}


def test_the_seam_has_five_functions_and_both_sides_of_it_have_them_all():
    assert {name for name in vars(FrozenEmbedding) if not name.startswith("_")} == FUNCTIONS
    assert vars(EmbeddingSync).keys() >= FUNCTIONS


def test_where_one_version_lasts_books_stay_as_they_are_and_nothing_is_brought():
    async def main():
        contributions, embedding = object(), FrozenEmbedding()
        assert embedding.at_first(contributions, None, lambda: 3) is contributions
        embedding.founded()
        await embedding.before(3)
        await embedding.begun(anew=True)
        await embedding.run()

    asyncio.run(main())
