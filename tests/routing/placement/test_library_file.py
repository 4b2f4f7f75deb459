from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.errors import ConfigError
from nesa_node.routing.placement.schema_library import decode_library, encode_library
from nesa_node.routing.placement.schemas import CANDIDATE_SCHEMAS, SchemaLibrary, learn_library


def _library() -> SchemaLibrary:
    rng = np.random.default_rng(0)
    features = [{"x": float(rng.normal()), "y": float(rng.normal())} for _ in range(20)]
    return learn_library(
        rng.random((20, 4)) + 0.1, features, CANDIDATE_SCHEMAS[:4], rng, num_blocks=12
    )


def test_a_library_is_the_same_after_writing_and_reading() -> None:
    library = _library()
    again = decode_library(encode_library(library))
    assert again.schemas == library.schemas
    assert again.features == library.features
    features = {"x": 0.3, "y": -0.7}
    assert (
        again.expected_log_costs(features).tolist() == library.expected_log_costs(features).tolist()
    )
    assert again.nearest_cluster(features) == library.nearest_cluster(features)
    assert [kind.schemas for kind in again.clusters] == [kind.schemas for kind in library.clusters]
    assert encode_library(again) == encode_library(library)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("version", 2, "version 2"),
        ("mean", [0.0], "do not fit"),
        ("scale", [0.0, 1.0], "do not fit"),
        ("slope", [[0.0] * 4], "do not fit"),
        ("intercept", [0.0] * 5, "do not fit"),
        ("kinds", [], "cannot be read"),
        ("kinds", [{"centre": [0.0, 0.0], "schemas": [9], "snapshots": 1}], "do not fit"),
        ("goal", "glory", "cannot be read"),
        ("more", 1, "cannot be read"),
    ],
)
def test_what_is_no_library_is_refused(key: str, value: object, words: str) -> None:
    document = json.loads(encode_library(_library())) | {key: value}
    with pytest.raises(ConfigError, match=words):
        decode_library(json.dumps(document))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(ConfigError):
        decode_library(noise)
