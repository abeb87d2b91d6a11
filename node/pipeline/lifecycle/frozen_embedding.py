"""The seam for the frozen part of the embedding, which both ends of the subspace codec share.

If all peers are constrained to the subspace, it follows from the run's seed and never changes:
every peer computes it, and nothing is exchanged. If full replicas are free, it gets a new
version at a fixed interval of rounds (docs/decisions/019); the assembly then passes in
`EmbeddingSync` (node/pipeline/contrib/embedding_sync.py)."""

from collections.abc import Callable

from farflock.node.train.driver import ContributionLog, Driver


class FrozenEmbedding:
    """The versions of the frozen embedding at one node. This class has a single version.

    Law:

    1. A version is the same table at all peers that hold it, bit for bit, and follows from the
       rounds of the first stage.
    2. After `before` and `begun` this node's codec holds the version in effect after its stage's
       round, if any peer has it. A node that lacks a version refuses payloads in it by name and
       decodes nothing.
    3. Weights that this node writes are projected by the version that its codec speaks.
    4. `at_first` is called once, before anything else, at a node that serves the first stage. One
       of `founded` and `begun` is called for each life; `before` comes before `begun` where a stage
       starts over. `run` may be cancelled at any time."""

    def at_first(
        self, contributions: ContributionLog, driver: Driver, applied: Callable[[], int]
    ) -> ContributionLog:
        """Note that this node serves the first stage, whose weights are of round `applied()`.
        Return its contribution log, through which versions are made and followed."""
        return contributions

    def founded(self) -> None:
        """Note that this node has started the run, from initial weights or a checkpoint."""

    async def before(self, after: int) -> None:
        """Fetch the version for projecting a stage that is about to start over after this round."""

    async def begun(self, *, anew: bool) -> None:
        """Note that a stage has its state: a newly made one (`anew`), or that of other servers."""

    async def run(self) -> None:
        """Download new versions and serve them, for as long as there may be any."""
