"""Versions of the frozen embedding, for a run that constrains only pipelines.

Averaging with free replicas moves the embedding out of E_fix + span(U). At a fixed interval of
rounds of the first stage the averaged embedding, which all its servers hold with the same bits,
becomes the next E_fix (`drifted`). One round later the weights of pipelines change to it; meanwhile
the other nodes download it (node/pipeline/contrib/embedding_sync.py). The schedule is in
node/run/terms.py. A payload's version is that of the weights that made it, and the payload names
it: a late peer writes the old version, which stays readable for a while. No peer reads a version
that it does not hold.

Shapes: D model width, V vocabulary."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from farflock.compression.subspace import Basis
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.pipeline.passes.constraint import ConstrainedReplica
from farflock.node.run.terms import EmbeddingSchedule
from farflock.node.state.cut import OpenCuts
from farflock.node.train.driver import ContributionLog

log = logging.getLogger(__name__)


def drifted(basis: Basis, version: int, table_VD: Tensor) -> Basis:
    """Return a version of the basis whose E_fix is the averaged embedding, which free replicas have
    moved out of E_fix + span(U).

    T_⊥ <- T_⊥ + (T_S - Π T_S), T_S <- Π T_S (Heterogeneous SparseLoCo, arXiv:2601.02360, eq. 3
    and 4). Only their sum, the table, and T_⊥ + span(U) are ever used, and these are the same
    for T_⊥ = the whole table, T_S = 0. That choice needs no arithmetic, so it has the same bits
    everywhere. Raise `ValueError` for a table that is not finite."""
    fixed_VD = table_VD.detach().to("cpu", torch.float32, copy=True)
    return Basis(version, basis.columns_DK, fixed_VD, basis.fixed_LD)


class EmbeddingVersions:
    """The versions that one node holds, in its codec; only the compute thread uses them."""

    def __init__(self, codec: SubspaceVersions, turns: EmbeddingSchedule) -> None:
        self.codec, self.turns = codec, turns
        self.embeds = False  # True if this node's own weights are in some version

    def table(self, version: int) -> Tensor | None:
        """Return E_fix of a version (V, D), or None if the version is not here."""
        basis = self.codec.held.get(version)
        return None if basis is None else basis.fixed_VD

    def hold(self, version: int, table_VD: Tensor) -> bool:
        """Make a version readable. Return False if the table is not finite or has another
        model's shape."""
        try:
            self.codec.hold(drifted(self.codec.first.basis, version, table_VD))
        except ValueError as error:
            log.warning("discarded version %d of the frozen embedding: %s", version, error)
            return False
        return True

    def lacking(self, applied: int) -> list[int]:
        """Return the versions that are needed now or soon and are not here, the most urgent
        first."""
        turns, effect = self.turns, self.turns.in_effect(applied)
        wanted = range(turns.oldest(applied), turns.newest(applied) + 1)
        return sorted(
            (v for v in wanted if v not in self.codec.held),
            key=lambda version: (version != effect, -version),
        )

    def give_up(self, applied: int) -> None:
        """Drop the versions that are no longer read."""
        if not self.embeds:
            self.codec.speak(max(self.codec.held))
        self.codec.give_up(self.turns.oldest(applied))


class VersionedContributions:
    """The contribution log of the first stage, where rounds make versions and weights follow them.

    `embedding()` is the averaged one, as of the last round in the method's state; `replica` is None
    at a free replica. `cuts` are open cuts of the weights."""

    def __init__(
        self,
        contributions: ContributionLog,
        tables: EmbeddingVersions,
        embedding: Callable[[], Tensor],
        replica: ConstrainedReplica | None,
        cuts: OpenCuts,
    ) -> None:
        self._contributions, self._tables, self._cuts = contributions, tables, cuts
        self._embedding, self._replica = embedding, replica
        tables.embeds = replica is not None
        self._changed = False  # with the round that is being applied

    def brought(self, number: int) -> bytes:
        """As `ContributionLog.brought`."""
        return self._contributions.brought(number)

    def closing(self, number: int, noted: bytes) -> None:
        """As `ContributionLog.closing`; also follow the version that takes effect."""
        self._contributions.closing(number, noted)
        self._changed = self.follow(number)

    def closed(self, number: int, noted: bytes) -> None:
        """As `ContributionLog.closed`; the embedding may become the next version."""
        self._contributions.closed(number, noted)
        version = self._tables.turns.newest(number)
        if self._tables.turns.made(version) == number:
            self._tables.hold(version, self._embedding())
        if self._changed and self._replica is not None:
            self._replica.settle()  # no write has projected the local work that the round left out
        self._tables.give_up(number)

    def follow(self, applied: int) -> bool:
        """Switch to the version in effect if it is held here; return True if the version
        changed. A node that lacks it keeps its present version, which each payload names."""
        version, codec = self._tables.turns.in_effect(applied), self._tables.codec
        if self._replica is None or version == codec.spoken or version not in codec.held:
            return False
        self._replica.follow(self._replica.constraint.after(codec.held[version]))
        codec.speak(version)
        return True

    def follow_late(self, applied: int) -> None:
        """Follow between rounds, for a version that arrives late; this also projects the
        weights."""
        if self.follow(applied) and self._replica is not None:
            self._cuts.before_change()
            self._replica.settle()

    def begin_anew(self, applied: int) -> bool:
        """Replace versions after the stage began with a state that no other peer has.

        A version that was just made from the former state is made again from this one. If the
        version in effect is lost with all its holders, the present embedding replaces it and all
        missing versions that are to be read. Return True in that case."""
        turns, lacking = self._tables.turns, self._tables.lacking(applied)
        lost = turns.in_effect(applied) in lacking
        for version in lacking:
            if lost or turns.made(version) == applied:
                self._tables.hold(version, self._embedding())
        return lost


def finite_table(
    tensors: dict[str, Tensor], name: str, vocabulary: int, width: int
) -> Tensor | None:
    """Return another peer's table, (V, D) in float32, if it is finite; None for anything else."""
    table = tensors.get(name)
    if table is None or len(tensors) != 1:
        return None
    if table.shape != (vocabulary, width) or table.dtype != torch.float32:
        return None
    return table if bool(table.isfinite().all()) else None
