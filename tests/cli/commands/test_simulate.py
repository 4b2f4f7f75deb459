"""`nesa-node simulate` on descriptions, without a swarm."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nesa_node.cli import simulation_input
from nesa_node.cli.app import run_command
from nesa_node.routing.strategies import STRATEGIES
from nesa_node.topology.simulation.world import make_world
from nesa_node.topology.snapshot_json import snapshot_to_json

SWARM: dict[str, Any] = {
    "num_blocks": 80,
    "quantization": "nf4",
    "nodes": [
        {"name": "attic", "device": "rtx3090", "region": "frankfurt", "span": "0:40"},
        {"name": "studio", "device": "rtx4090", "region": "frankfurt", "span": "40:80"},
        {"name": "lab", "device": "a10", "count": 3, "region": "london"},
        {"name": "old", "device": "gtx1080ti", "region": "paris", "span": "60:76"},
    ],
    "client": {"region": "paris"},
}


@pytest.fixture
def swarm(tmp_path: Path) -> Path:
    path = tmp_path / "swarm.json"
    path.write_text(json.dumps(SWARM))
    return path


def _told(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    assert run_command(["simulate", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert run_command(["simulate", *map(str, argv)]) == 2
    return capsys.readouterr().err


def test_a_newcomer_takes_a_span_and_adds_throughput(
    swarm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _told(capsys, "--nodes", swarm, "--add", "rtx3090@40ms")
    (span,) = told["joined"].values()
    assert span in told["changed"]["spans"].values()
    assert told["changed"]["tokens_per_s"] > told["now"]["tokens_per_s"]
    assert sum(told["changed"]["coverage"]) > sum(told["now"]["coverage"])


def test_holders_are_spread_over_regions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [
        {
            "name": f"{region}-{number}",
            "device": "rtx3090",
            "region": region,
            "span": span,
            "max_blocks": 4,
        }
        for number, (region, span) in enumerate(
            [("frankfurt", "0:4")] * 2 + [("frankfurt", "4:8")] + [("tokyo", "4:8")] * 2
        )
    ]
    path = tmp_path / "swarm.json"
    path.write_text(json.dumps({"num_blocks": 8, "quantization": "nf4", "nodes": nodes}))
    told = _told(capsys, "--nodes", path)
    assert told["moves"]["trigger"] == "spread"
    (move,) = told["moves"]["moves"]
    assert move["node"].startswith("tokyo")
    stages = [told[stage]["exposed"] for stage in ("now", "after_moves", "placed_anew")]
    assert stages == [4, 0, 0]
    assert run_command(["simulate", "--nodes", str(path)]) == 0
    text = capsys.readouterr().out
    assert "because of blocks that are exposed to a failure domain" in text
    assert "exposures" in text


def test_a_loss_that_leaves_a_hole_is_mended(
    swarm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _told(
        capsys, "--nodes", swarm, "--remove", "studio", "--remove", "lab-*", "--add", "h100@paris",
        "--add", "gtx1060@20ms", "--replicas", "1",
    )  # fmt: skip
    assert told["lost"] == ["studio", "lab-1", "lab-2", "lab-3"]
    assert told["changed"]["holes"] == []
    told = _told(capsys, "--nodes", swarm, "--remove", "studio", "--remove", "lab-*")
    assert told["changed"]["holes"]
    assert told["changed"]["latency_s"] is None
    assert told["moves"]["refused"] or told["moves"]["moves"]


def test_tables_fit_into_100_columns(swarm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--nodes", str(swarm), "--add", "2xa100@new-york", "--remove", "attic"]
    assert run_command(argv) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for word in ("latency of a token", "joins ", "lost ", "moves ", "chain ", "bound ", "changed"):
        assert word in text


def test_nothing_is_said_to_change_where_nothing_does(
    swarm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["simulate", "--nodes", str(swarm)]) == 0
    assert "changed" not in capsys.readouterr().out


def test_a_made_up_world_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    world = "regions=3,nodes=12,blocks=24,clients=2"
    first = _told(capsys, "--world", world, "--seed", 5)
    assert first == _told(capsys, "--world", world, "--seed", 5)
    assert first != _told(capsys, "--world", world, "--seed", 6)
    assert len(first["now"]["spans"]) == 12


@pytest.mark.timeout(180)
def test_many_thousand_nodes_are_planned_by_candidates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number in the place of a file; the limit is lowered, so that the test is quick."""
    monkeypatch.setattr(simulation_input, "MAX_DENSE_NODES", 200)
    told = _told(capsys, "--nodes", 300, "--remove", "n000*")
    assert len(told["lost"]) == 10
    assert len(told["now"]["spans"]) == 300
    assert len(told["changed"]["spans"]) == len(told["placed_anew"]["spans"]) == 290
    assert 0 < told["placed_anew"]["latency_s"] <= told["changed"]["latency_s"]
    assert "by branches" in told["placed_anew"]["method"]
    for argv, words in ((["--pareto"], "--pareto is for"), (["--add", "t4@40ms"], "--add is for")):
        assert words in _refused(capsys, "--nodes", 300, *argv)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_strategies_choose_the_chains(
    strategy: str, swarm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _told(capsys, "--nodes", swarm, "--strategy", strategy, "--goal", "throughput")
    assert told["now"]["chain"][0][1] == 0
    assert told["now"]["chain"][-1][2] == 80


def _recording(tmp_path: Path) -> Path:
    """Nine snapshots: calm, then everybody with the last blocks is lost."""
    snapshot = make_world(10, 24, np.random.default_rng(3)).snapshot
    ends = [node.peer_id for node in snapshot.nodes if node.span.end == 24]
    lines = []
    for at in range(9):
        seen = snapshot if at < 6 else snapshot.without_peers(*ends)
        lines.append(snapshot_to_json(replace(seen, taken_at=60.0 * at)).decode())
    path = tmp_path / "recorded.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_replay_shows_a_loss_and_what_would_have_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _told(capsys, "--replay", _recording(tmp_path), "--replicas", 1)
    assert isinstance(rows, list)
    assert [row["at_s"] for row in rows] == [60.0 * at for at in range(9)]
    assert all(row["latency_s"] is not None and row["holes"] == [] for row in rows[:6])
    assert all(row["latency_s"] is None and row["holes"] for row in rows[6:])
    assert {row["trigger"] for row in rows[6:]} <= {"hole", "none"}


def test_a_replay_is_a_table_of_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["simulate", "--replay", str(_recording(tmp_path))]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "9 snapshots" in text


def test_pictures_are_drawn(
    swarm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "swarm.svg"
    _told(capsys, "--nodes", swarm, "--add", "t4@frankfurt", "--plot", drawn)
    assert drawn.read_text().lstrip().startswith("<?xml")
    over_time = tmp_path / "replay.png"
    _told(capsys, "--replay", _recording(tmp_path), "--plot", over_time)
    assert over_time.read_bytes().startswith(b"\x89PNG")


def test_pareto_front_has_a_fast_a_reliable_and_a_cheap_chain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pymoo")
    kinds = {
        "fast": {"tokens_per_s": 4000, "reliability": 0.9, "price": 3.0},
        "sure": {"tokens_per_s": 1000, "reliability": 0.999, "price": 2.0},
        "cheap": {"tokens_per_s": 1000, "reliability": 0.9, "price": 0.5},
        "useless": {"tokens_per_s": 500, "reliability": 0.8, "price": 4.0},
    }
    nodes = [
        {"name": name, "region": "paris", "max_blocks": 80, "span": "0:80"} | kind
        for name, kind in kinds.items()
    ]
    path = tmp_path / "swarm.json"
    path.write_text(json.dumps({"nodes": nodes, "client": {"region": "paris"}}))
    told = _told(capsys, "--nodes", path, "--pareto")
    whole = [row for row in told if len(row["chain"]) == 1]
    assert {row["chain"][0][0]: row["price"] for row in whole} == {
        "fast": pytest.approx(240.0),
        "sure": pytest.approx(160.0),
        "cheap": pytest.approx(40.0),
    }
    assert told[0]["latency_s"] == min(row["latency_s"] for row in told)
    assert all(peer != "useless" for row in told for peer, *_ in row["chain"])
    assert run_command(["simulate", "--nodes", str(path), "--pareto", "--remove", "fast"]) == 0
    text = capsys.readouterr().out
    assert "sure 0:80" in text
    assert "fast" not in text
    everything = ["simulate", "--nodes", str(path), "--pareto"]
    assert run_command([*everything, "--plot", str(tmp_path / "front.svg")]) == 0
    assert (tmp_path / "front.svg").read_text().lstrip().startswith("<?xml")


def test_without_a_chain_the_pareto_front_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "swarm.json"
    node = {"name": "small", "region": "paris", "tokens_per_s": 10, "max_blocks": 3}
    path.write_text(json.dumps({"nodes": [node]}))
    assert _told(capsys, "--nodes", path, "--pareto") == []
    assert run_command(["simulate", "--nodes", str(path), "--pareto"]) == 0
    assert "none: some blocks are unserved" in capsys.readouterr().out


def test_without_matplotlib_the_extra_is_named(
    swarm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = _refused(capsys, "--nodes", swarm, "--plot", "x.svg")
    assert "pip install 'nesa-node[plan]'" in told


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give one of --nodes"),
        (["--world", "nodes=3", "--nodes", "x.json"], "give one of --nodes"),
        (["--nodes", "/no/such.json"], "No such file"),
        (["--world", "nodes=0"], "nodes=0: a whole number from 1"),
        (["--world", "people=3"], "give KEY=NUMBER of regions, nodes"),
        (["--world", "nodes=many"], "'many' is no number"),
        (["--world", "homes=2"], "a share from 0 to 1"),
        (["--world", "nodes=5", "--add", "rtx3090"], "--add: a newcomer looks like"),
        (["--world", "nodes=5", "--add", "abacus@40ms"], "no device is called"),
        (["--world", "nodes=5", "--add", "t4@atlantis"], "no region is called"),
        (["--world", "nodes=5", "--remove", "nobody"], "--remove nobody: no node is called that"),
        (["--world", "nodes=5", "--remove", "*"], "leaves no node at all"),
        (["--world", "nodes=50001"], "nodes=50001: a whole number from 1 to 50000"),
        (["--world", "nodes=5", "--replicas", "0"], "--replicas 0"),
        (["--world", "nodes=5", "--seed=-1"], "--seed -1"),
        (["--replay", "x.jsonl", "--pareto"], "--pareto is for one swarm"),
        (
            ["--world", "nodes=5", "--strategy", "luck"],
            'Choose from: "exact-latency", ',
        ),
        (["--world", "nodes=5", "--plot", "x.bmp"], "must end in one of .svg"),
        (["--world", "nodes=5", "--plot", "/no/such/x.svg"], "there is no folder"),
        (["--replay", "/no/such.jsonl"], "--replay /no/such.jsonl: No such file"),
        (["--replay", "/dev/null"], "no snapshot in it"),
        (["--replay", "/dev/null", "--add", "t4@40ms"], "leave out --add"),
    ],
)
def test_mistakes_are_told_with_what_would_be_right(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _refused(capsys, *argv)
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("flag", ["--nodes", "--replay"])
def test_a_file_without_an_end_is_refused(
    flag: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in (
        "cli.simulation_input.MAX_SNAPSHOT_BYTES",
        "cli.simulation_input.MAX_SWARM_FILE_BYTES",
        "topology.simulation.swarm_file.MAX_SWARM_FILE_BYTES",
    ):
        monkeypatch.setattr(f"nesa_node.{limit}", 1000)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    os.write(writer, b"x" * 30_000)  # the format is looked for in the first few thousand
    try:
        assert "1000" in _refused(capsys, flag, path)
    finally:
        os.close(writer)


def test_a_broken_line_of_a_recording_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _recording(tmp_path)
    path.write_text(path.read_text().replace('"version":1', '"version":9', 1))
    assert "line 1 has version 9" in _refused(capsys, "--replay", path)
