"""Rare features of pipelines, each behind one seam: what a run's terms ask for is imported then,
and never before.

A feature is named here by the module that has it. The core knows its seam alone, and the
implementation for a run that does without it.

| asked for by | seam | without it |
|---|---|---|
| a codec that remembers samples | node/pipeline/server/edge_ends.py | `PlainEnds` |
| `[pipeline.asynchronous]` | node/pipeline/versions/versions.py | `SingleVersion` |
| `pipeline.constrain = "pipelines"` | node/pipeline/lifecycle/frozen_embedding.py | `FixedEmbedding` |
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from farflock.compression.activation import ActivationCodec
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.assembly.node import Compute
from farflock.node.model.llama import ModelConfig
from farflock.node.pipeline.lifecycle.frozen_embedding import FixedEmbedding, FrozenEmbedding
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.server.edge_ends import EdgeEnds, PlainEnds
from farflock.node.pipeline.versions.versions import SingleVersion, WeightVersions
from farflock.node.run.terms import Asynchronous, Turns
from farflock.node.train.driver import Driver
from farflock.swarm.peer.peer import Peer

MAKERS = {
    "sample memory": "farflock.node.pipeline.memory.samples:ServerMemory",
    "weight versions": "farflock.node.pipeline.versions.kept_versions:versions_of",
    "embedding versions": "farflock.node.pipeline.lifecycle.table_keeper:keeper_of",
}


def edge_ends(edges: Edges) -> EdgeEnds:
    """Make a stage server's ends of its edges."""
    if not edges.remembers:
        return PlainEnds(edges)
    made: EdgeEnds = _maker("sample memory")(edges)
    return made


def weight_versions(
    terms: Asynchronous | None,
    bound: int,
    module: nn.Module,
    inner: torch.optim.Optimizer,
    driver: Driver,
    *,
    applied: Callable[[], int],
    marks: Callable[[], dict[str, int]],
    summing: bool,
    report: Callable[[dict[str, object]], None],
) -> WeightVersions:
    """Make the versions of a stage's weights at one server; the arguments are those of
    `kept_versions.versions_of`."""
    if terms is None:
        return SingleVersion()
    made: WeightVersions = _maker("weight versions")(
        terms, bound, module, inner, driver, applied=applied, marks=marks, summing=summing, report=report
    )
    return made


def frozen_embedding(
    turns: Turns | None,
    codec: ActivationCodec,
    peer: Peer,
    config: ModelConfig,
    stages: int,
    stream: str,
    compute: Compute,
) -> FrozenEmbedding:
    """Make a node's versions of the frozen embedding; `stream` is that of the first of so many
    `stages`."""
    if turns is None or not isinstance(codec, SubspaceVersions):
        return FixedEmbedding()
    made: FrozenEmbedding = _maker("embedding versions")(codec, turns, peer, config, stages, stream, compute)
    return made


def _maker(feature: str) -> Callable[..., Any]:
    module, _, name = MAKERS[feature].partition(":")
    maker: Callable[..., Any] = getattr(import_module(module), name)
    return maker
