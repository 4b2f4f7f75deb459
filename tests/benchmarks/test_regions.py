from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.emulator.namespaces import why_unavailable
from benchmarks.options import Options
from benchmarks.regions.bench import show
from benchmarks.regions.traffic import record_growth, summarize
from benchmarks.regions.world import LOST, REGIONS, make_world, region
from nesa_node.core.ids import Span

REASON = why_unavailable()


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_every_region_holds_the_model_and_its_loss_leaves_too_few_replicas_and_room(
    nodes: int,
) -> None:
    world = make_world(8, nodes)
    for name in REGIONS:
        assert min(_holders(world.spans, [name])) >= 1
    kept = [name for name in REGIONS if name != LOST]
    assert min(_holders(world.spans, REGIONS)) >= world.replicas
    assert nodes == 2 or min(_holders(world.spans, kept)) < world.replicas
    held = sum(len(span) for site, span in world.spans.items() if region(site) in kept)
    assert held >= world.replicas * world.num_blocks


def _holders(spans: Mapping[str, Span], regions: Sequence[str]) -> list[int]:
    counts = Counter(
        block
        for site, span in spans.items()
        if region(site) in regions
        for block in range(span.start, span.end)
    )
    return [counts[block] for block in range(8)]


def test_world_without_halves_is_refused() -> None:
    with pytest.raises(ValueError, match="no halves"):
        make_world(7, 4)
    with pytest.raises(ValueError, match="no halves"):
        make_world(8, 1)


def test_measuring_is_what_more_is_carried_than_without_pings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on = {"a1": (500.0, 400.0), "b1": (700.0, 900.0)}
    off = {"a1": (300.0, 300.0), "b1": (400.0, 400.0)}
    row = summarize(on, off, record_growth(132, 60.0), 60.0)
    assert row["measuring_bytes_per_s"] == pytest.approx(250)
    assert row["measuring_both_ways_bytes_per_s"] == pytest.approx(550)
    assert row["measuring_worst_node_bytes_per_s"] == pytest.approx(800)
    assert row["record_growth_bytes_per_s"] == pytest.approx(66)
    assert row["passed"]
    assert not summarize({"a1": (900.0, 900.0)}, {"a1": (100.0, 100.0)}, 0.0, 60.0)["passed"]
    show([row | {"took_s": 61.0}], Options(nodes=(4,)))
    assert "traffic" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_quick_form_passes_all_its_phases(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    main(["regions", "--quick", "--json", str(path)])
    rows = {row["phase"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    assert list(rows) == [
        "settle",
        "jitter",
        "region lost",
        "hostile orchestrator",
        "liar",
        "traffic",
    ]
    # Few cores measure round trips of 2 ms only roughly; half a minute of traffic is much noise.
    failed = {name for name, row in rows.items() if not row["passed"]}
    assert failed <= {"settle", "traffic"}, [rows[name] for name in failed]
    assert rows["settle"]["ratio_median"] < 2
