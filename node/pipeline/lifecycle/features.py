"""Rare features of pipelines, each behind one seam and imported only when a run's terms ask for it.

Only this module names the features' modules in contrib/. The core knows only the seam: a run
without the feature uses the seam's own class, and contrib/ has a subclass or an implementation.

| terms | seam in node/pipeline | without the feature |
|---|---|---|
| a codec that remembers samples | server/edge_ends.py | `EdgeEnds` |
| the same, at a trainer | `StageInputs` in trainer/in_flight.py | `WholeInputs` |
| `[pipeline.asynchronous]` | server/weight_versions.py | `WeightVersions` |
| `pipeline.constrain = "pipelines"` | lifecycle/frozen_embedding.py | `FrozenEmbedding` |
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from farflock.compression.activation import ActivationCodec
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.model.data import Batches
from farflock.node.model.llama import ModelConfig
from farflock.node.pipeline.lifecycle.frozen_embedding import FrozenEmbedding
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.server.edge_ends import EdgeEnds
from farflock.node.pipeline.server.weight_versions import WeightVersions
from farflock.node.pipeline.trainer.in_flight import StageInputs, WholeInputs
from farflock.node.run.terms import Asynchronous, EmbeddingSchedule
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import Peer

MAKERS = {
    "sample memory": "farflock.node.pipeline.contrib.sample_memory:ServerMemory",
    "sample inputs": "farflock.node.pipeline.contrib.sample_inputs:SampleInputs",
    "weight versions": "farflock.node.pipeline.contrib.kept_versions:versions_of",
    "embedding versions": "farflock.node.pipeline.contrib.embedding_sync:EmbeddingSync",
}


def edge_ends(edges: Edges) -> EdgeEnds:
    """Make a stage server's ends of its edges."""
    if not edges.remembers:
        return EdgeEnds(edges)
    made: EdgeEnds = _maker("sample memory")(edges)
    return made


def stage_inputs(edges: Edges, batches: Batches) -> StageInputs:
    """Make a trainer's store of stage inputs, of the kind that the run's codec needs."""
    if not edges.remembers:
        return WholeInputs()
    made: StageInputs = _maker("sample inputs")(edges, batches)
    return made


def weight_versions(terms: Asynchronous | None) -> Callable[..., WeightVersions]:
    """Return the factory of a server's weight versions; it takes the arguments of
    `contrib.kept_versions.versions_of` after the terms."""
    if terms is None:
        return lambda *given, **named: WeightVersions()
    return partial(_maker("weight versions"), terms)


def frozen_embedding(
    turns: EmbeddingSchedule | None,
    codec: ActivationCodec,
    peer: Peer,
    config: ModelConfig,
    stages: int,
    stream: str,
    compute: Compute,
) -> FrozenEmbedding:
    """Make a node's versions of the frozen embedding; `stream` is that of the first stage."""
    if turns is None or not isinstance(codec, SubspaceVersions):
        return FrozenEmbedding()
    made: FrozenEmbedding = _maker("embedding versions")(
        codec, turns, peer, config, stages, stream, compute
    )
    return made


def _maker(feature: str) -> Callable[..., Any]:
    module, _, name = MAKERS[feature].partition(":")
    maker: Callable[..., Any] = getattr(import_module(module), name)
    return maker
