"""The seam of the frozen embedding, and what a run has in its place where one version lasts."""

from farflock.node.pipeline.lifecycle.frozen_embedding import FrozenEmbedding
from farflock.swarm.sim.virtual_time import run_virtual


def test_where_one_version_lasts_books_stay_as_they_are_and_nothing_is_brought():
    async def main():
        contributions, embedding = object(), FrozenEmbedding()
        assert embedding.at_first(contributions, None, lambda: 3) is contributions
        embedding.founded()
        await embedding.before(3)
        await embedding.begun(anew=True)
        await embedding.run()

    run_virtual(main())
