"""Whose shape is watched over time, and whose is forgotten."""

from __future__ import annotations

import json
from typing import Any

from nesa_node.core.ids import ModelId
from nesa_node.dashboard.observer import MAX_WATCHED_MODELS, ModelTopologies
from nesa_node.topology.snapshot import Snapshot
from tests.dashboard.records import BLOCKS, record

NODES = tuple(record(peer).node_state() for peer in "ab")


async def _looks(shapes: ModelTopologies, model: str) -> int:
    body = await shapes.encode_json(model)
    report: dict[str, Any] = {} if body is None else json.loads(body)
    return len(report["history"]["at"]) if "history" in report else 0


async def test_models_that_come_and_go_do_not_take_the_history_of_one_that_stays() -> None:
    shapes = ModelTopologies()
    for at in range(2 * MAX_WATCHED_MODELS):
        for model in ("ours", f"stranger-{at}"):
            shapes.observe_snapshot(Snapshot(ModelId(model), BLOCKS, NODES, 1000.0 + at), None)
    assert await _looks(shapes, "ours") == 2 * MAX_WATCHED_MODELS
    assert await _looks(shapes, f"stranger-{2 * MAX_WATCHED_MODELS - 1}") == 1
    assert await shapes.encode_json("stranger-0") is None
