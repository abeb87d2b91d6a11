"""Rare features of pipelines are looked up by the terms that need them, and imported only then."""

import pytest

from farflock.compression.activation_catalog import activation_codec
from farflock.node.pipeline.contrib.sample_memory import ServerMemory
from farflock.node.pipeline.lifecycle.features import MAKERS, _maker, edge_ends, weight_versions
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.server.edge_ends import EdgeEnds
from farflock.node.pipeline.server.weight_versions import WeightVersions


@pytest.mark.parametrize("feature", MAKERS)
def test_each_feature_is_where_the_registry_says(feature):
    assert callable(_maker(feature))


@pytest.mark.parametrize(
    ("codec", "kind"), [("int8", EdgeEnds), ("raw", EdgeEnds), ("aqsgd4", ServerMemory)]
)
def test_a_codec_that_remembers_samples_has_ends_that_do(codec, kind):
    edges = Edges(activation_codec(codec), 2, 8, 8, 16, 9)
    made = edge_ends(edges)
    assert type(made) is kind
    assert made.edges is edges


def test_a_run_that_waits_has_its_newest_weights_alone():
    made = weight_versions(None)(
        1, None, None, None, applied=None, marks=None, summing=True, report=None
    )
    assert type(made) is WeightVersions
