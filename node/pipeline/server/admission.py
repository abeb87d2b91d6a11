"""Which requests a stage server takes in, decided by the request and the sizes of its payloads
before those are fetched."""

from collections.abc import Callable

from farflock.node.pipeline.passes.requests import (
    Backward,
    Confirm,
    Foreign,
    Forward,
    Gone,
    Refused,
    Revoke,
    StageAnswer,
    StageRequest,
    Stale,
)
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.server.edge_ends import EdgeEnds
from farflock.node.pipeline.server.weight_versions import WeightVersions


class AdmissionRules:
    """The rules of one server of stage `index`. It changes nothing; whether there is room is not
    its question.

    A microbatch may be `staleness` rounds older than the stage when it comes; `applied` is the last
    round in the weights."""

    def __init__(
        self,
        index: int,
        stage: Stage,
        ends: EdgeEnds,
        versions: WeightVersions,
        applied: Callable[[], int],
        staleness: int,
    ) -> None:
        self._index, self._stage, self._ends, self._versions = index, stage, ends, versions
        self._applied, self._staleness = applied, staleness

    def refusal(self, asked: StageRequest, sizes: tuple[int, ...], *, known: bool) -> StageAnswer | None:
        """Return why a request is not taken in, or None. `known`: the pass runs already, or its
        gradient is put aside."""
        if asked.stage != self._index:
            return Refused(f"this peer serves stage {self._index}, not {asked.stage}")
        if isinstance(asked, Confirm | Revoke):
            return Refused("payloads with it") if sizes else None
        refused = self._misfit(asked) or self._oversize(asked, sizes)
        if refused is not None:
            return refused
        if isinstance(asked, Forward):
            late = self._applied() - asked.epoch > self._staleness
            return Stale(self._applied()) if late else None
        return None if known else self._lack(asked)

    def _misfit(self, asked: Forward | Backward) -> StageAnswer | None:
        """Return why this stage computes no such pass."""
        if (asked.source < 0) != self._stage.is_first or asked.source == self._index:
            return Refused(f"stage {self._index} takes no output of {asked.source}")
        if (unfit := self._ends.misfit(asked)) is not None:
            return Refused(unfit)
        edges = self._ends.edges
        return None if edges.knows(asked.came) and edges.knows(asked.sends) else Foreign(edges.reads)

    def _oversize(self, asked: Forward | Backward, sizes: tuple[int, ...]) -> StageAnswer | None:
        """Return why these are no payloads of such a request."""
        most = self._largest(asked)
        if len(sizes) == len(most) and all(size <= limit for size, limit in zip(sizes, most, strict=True)):
            return None
        return Refused(f"payloads of {sizes} bytes; at most {most} belong to it")

    def _largest(self, asked: Forward | Backward) -> tuple[int, ...]:
        """Return the most bytes of each payload that belongs to a request."""
        edges = self._ends.edges
        given = () if self._stage.is_first else (edges.max_bytes("forward", asked.came),)
        if isinstance(asked, Forward):
            return (edges.token_bytes, *given)
        if self._stage.is_last:
            return (edges.token_bytes, *given, edges.token_bytes)
        arrived = (edges.max_bytes("forward", asked.sends),) if edges.is_masked(asked.sends) else ()
        return (edges.token_bytes, *given, edges.max_bytes("backward", asked.sends), *arrived)

    def _lack(self, asked: Backward) -> Gone | None:
        """Return why a backward pass cannot be at the weights of its forward pass here."""
        lack = self._versions.lack(asked.version) if asked.version is not None else None
        return None if lack is None else Gone(self._applied(), lack == "late")
