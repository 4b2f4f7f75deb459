"""Who holds which blocks, and when blocks lose their last holder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.ids import Span
from nesa_node.dashboard.node_tracker import NodeTracker
from nesa_node.dashboard.views import (
    MAX_MODELS,
    HoleTracker,
    ModelSummary,
    coverage_runs,
    pool_entries,
    summarize_models,
)
from nesa_node.swarm.dht.pool_notices import Offer
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.topology.snapshot import count_holders, zero_runs
from tests.dashboard.records import BLOCKS, record
from tests.swarm.notice_fields import make_notice

START = 1000.0


def models_of(records: Sequence[NodeRecord], now: float = START) -> list[ModelSummary]:
    sightings = NodeTracker()
    sightings.update_records(records, START)
    sightings.advance_time(now)
    return summarize_models(sightings.nodes)


SPANS = st.lists(
    st.tuples(st.integers(0, 19), st.integers(1, 20)).filter(lambda span: span[0] < span[1])
)


@given(SPANS)
def test_runs_say_what_counting_block_by_block_says(spans: list[tuple[int, int]]) -> None:
    runs = coverage_runs(spans, 20)
    counts = [0] * 20
    for start, end in spans:
        for block in range(start, end):
            counts[block] += 1
    assert [held for start, end, held in runs for _ in range(start, end)] == counts
    assert all(one[2] != other[2] for one, other in itertools.pairwise(runs))


def test_only_serving_nodes_that_are_there_hold_blocks() -> None:
    records = [
        record("a", (0, 4)),
        record("b", (4, 8), state="joining"),
        record("c", (8, 12), state="draining"),
    ]
    (model,) = models_of(records)
    assert model.holes == (Span(4, 12),)
    assert (model.nodes, model.serving, model.lost) == (3, 1, 0)
    (later,) = models_of(records, START + 60)
    assert later.holes == (Span(0, BLOCKS),)
    assert (later.nodes, later.serving, later.lost) == (0, 0, 3)


def test_who_speaks_of_another_number_of_blocks_does_not_count() -> None:
    honest = [record(str(number), (0, 12)) for number in range(2)]
    (model,) = models_of([*honest, record("liar", (0, 5000), num_blocks=10_000)])
    assert (model.num_blocks, model.runs) == (BLOCKS, ((0, BLOCKS, 2),))


def test_sessions_and_tokens_are_weighted_by_the_share_of_blocks() -> None:
    # One session through three nodes of a third each, another through the one that holds all.
    thirds = [record(str(at), (at, at + 4), sessions=1) for at in (0, 4, 8)]
    (model,) = models_of([*thirds, record("all", (0, 12), sessions=1)])
    assert model.sessions == pytest.approx(2)


def test_models_of_most_nodes_come_first_and_there_are_not_too_many() -> None:
    strangers = [record(f"s{n}", model_id=f"model-{n}@1") for n in range(500)]
    models = models_of([*strangers, record("a"), record("b")])
    assert len(models) == MAX_MODELS
    assert models[0].model_id == "tiny@1"


def test_a_machine_that_is_away_says_why(tmp_path: Path) -> None:
    reason = "--pool-hours 20-8"
    offer = make_notice(
        Offer, Identity.ephemeral(tmp_path), 1e9, models=(), away_reason=reason, held=()
    )
    assert isinstance(offer, Offer)
    _, machines = pool_entries([offer], [])
    [machine] = machines.values()
    assert (machine["state"], machine["away_reason"]) == ("away", reason)


def test_holes_are_told_when_they_open_and_when_all_are_closed() -> None:
    holes, sightings = HoleTracker(), NodeTracker()
    whole = [record("a", (0, 6)), record("b", (6, 12))]
    sightings.update_records(whole, START)
    assert holes.update_models(summarize_models(sightings.nodes), START) == []
    sightings.update_records([record("b", (6, 12), at=START + 1, state="withdrawn")], START + 1)
    (opened,) = holes.update_models(summarize_models(sightings.nodes), START + 1)
    assert (opened.kind, opened.text) == ("hole", "Blocks 6:12 of tiny have no holder")
    assert holes.update_models(summarize_models(sightings.nodes), START + 2) == []
    sightings.update_records([record("c", (6, 12), at=START + 3)], START + 3)
    (closed,) = holes.update_models(summarize_models(sightings.nodes), START + 3)
    assert closed.kind == "healed"


def test_holes_are_those_that_a_snapshot_has() -> None:
    records = [record("a", (2, 5)), record("b", (7, 9))]
    (model,) = models_of(records)
    assert model.holes == zero_runs(count_holders([r.node_state() for r in records], BLOCKS))
