"""The seam between a pipeline's stages and the frozen part of the embedding, which the subspace
codec's two ends share.

Where all peers keep to the subspace it follows from the run's seed and stays: every peer makes it by
itself, and nothing is to be brought. Where full replicas are free it has a new version every so many
rounds (docs/decisions/019); the assembly then hands in a keeper of versions (node/pipeline/contrib/embedding_sync.py)."""

from collections.abc import Callable

from farflock.node.train.driver import ContributionLog, Driver


class FrozenEmbedding:
    """The versions of the frozen embedding at one node, of which there is one here. Five functions.

    Law:

    1. A version is the same table at all peers that hold it, bit by bit, and follows from the
       rounds of the first stage.
    2. After `before` and `begun` this node's codec holds the version in effect after the round that
       its stage is at, if anybody has it; a node that lacks it refuses payloads in it by name, and
       decodes nothing.
    3. Weights that this node writes are projected by the version that its codec speaks.
    4. `at_first` is called once, before anything else, at a node that serves the first stage. One
       of `founded` and `begun` is called for each life; `before` comes before `begun`, where a
       stage is begun anew. `run` may be cancelled at any time.
    """

    def at_first(self, contributions: ContributionLog, driver: Driver, applied: Callable[[], int]) -> ContributionLog:
        """This node serves the first stage, whose weights are of round `applied()`: return its
        books, through which versions are made and followed."""
        return contributions

    def founded(self) -> None:
        """This node has founded the run, with initial weights or those of its last checkpoint."""

    async def before(self, after: int) -> None:
        """A stage is about to be begun anew, after this round of its own: bring what its weights
        are written with."""

    async def begun(self, *, anew: bool) -> None:
        """A stage has its state, its own or (`anew` is False) that of others."""

    async def run(self) -> None:
        """Bring new versions, and hand them on, for as long as there may be any."""
