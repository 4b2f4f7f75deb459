"""`status --watch`: moves and nodes that have gone, on wide and narrow screens."""

from __future__ import annotations

import io

import pytest

from nesa_node.cli.app import fill_optional_values, run_command
from nesa_node.cli.views.swarm import (
    SHOW_DEPARTED_S,
    DepartedNode,
    DepartureTracker,
    group_by_model,
    render_models,
)
from nesa_node.cli.views.text_parts import make_console
from nesa_node.swarm.dht.records import NodeRecord
from tests.cli.test_views import NOW, record


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def shown(records: list[NodeRecord], gone: list[DepartedNode], width: int) -> list[str]:
    console = make_console(io.StringIO(), 120)
    console.width = width
    with console.capture() as captured:
        console.print(render_models(group_by_model(records), width=width, departed=gone))
    return captured.get().splitlines()


def test_a_node_whose_record_expired_is_lost_and_one_that_withdrew_has_left() -> None:
    clock = Clock()
    goings = DepartureTracker(clock)
    crashed = record("crashed", (0, 4), expires_at=NOW + 10)
    leaver = record("leaver", (4, 8), expires_at=NOW + 60)
    stays = record("stays", (0, 8), expires_at=NOW + 60)
    assert goings.update([crashed, leaver, stays]) == []
    clock.now += 20
    assert {(gone.record.public_name, gone.departure) for gone in goings.update([stays])} == {
        ("crashed", "lost"),
        ("leaver", "left"),
    }
    clock.now += 5
    assert [gone.ago_s for gone in goings.update([stays])] == [5, 5]


def test_who_returns_or_went_long_ago_is_not_among_them() -> None:
    clock = Clock()
    goings = DepartureTracker(clock)
    one, other = record("one", (0, 4)), record("other", (4, 8))
    goings.update([one, other])
    goings.update([])
    clock.now += SHOW_DEPARTED_S - 1
    assert len(goings.update([])) == 2
    assert [gone.record.public_name for gone in goings.update([one])] == ["other"]
    clock.now += 2
    assert goings.update([one]) == []


@pytest.mark.parametrize("width", [80, 120])
def test_moves_and_lost_nodes_are_visible_within_the_width(width: int) -> None:
    moving = record(
        "a node with a long and telling name", (0, 3), state="draining", next_span=(3, 8)
    )
    lost = DepartedNode(record("lost-node", (3, 8)), 42.0, "lost")
    lines = shown([moving, record("b", (0, 3))], [lost], width)
    assert max(map(len, lines)) <= width
    assert any("draining → 3:8" in line for line in lines)
    assert any("lost-node" in line and "lost 42 s ago" in line for line in lines)
    assert any("a node with a l…" in line for line in lines) == (width == 80)


def test_lost_nodes_of_a_model_that_nobody_serves_any_more_are_shown() -> None:
    lines = shown([], [DepartedNode(record("last", (0, 8)), 3.0, "left")], 80)
    assert any("last" in line and "left 3 s ago" in line for line in lines)


def test_watch_needs_no_number_but_a_sensible_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert fill_optional_values(["status", "--watch", "--json"]) == [
        "status",
        "--watch",
        "2",
        "--json",
    ]
    assert fill_optional_values(["status", "--watch", "0.5"]) == ["status", "--watch", "0.5"]
    peer = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    assert run_command(["status", "--watch", "0.01", "--initial-peers", peer]) == 2
    assert "--watch 0.01" in capsys.readouterr().err


def test_a_cache_in_8_bits_is_shown_with_the_weights() -> None:
    records = [record("a", (0, 4)), record("b", (4, 8), cache_dtype="int8")]
    lines = shown(records, [], 160)
    assert sum("float32, cache int8" in line for line in lines) == 1
