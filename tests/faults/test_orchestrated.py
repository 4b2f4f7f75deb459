"""Daemons with an orchestrator among them: what is thin is mended, and nothing else moves."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from transformers import PreTrainedModel

from nesa_node.cli.app import run_command
from nesa_node.core.ids import Span
from nesa_node.routing.search.greedy import SHIPPED_PARAMETERS
from tests.client.local_models import random_ids
from tests.faults.bed import Bed, Node
from tests.faults.runs import Blow, join_bed, run_with_blow
from tests.faults.waiting import span_of, wait_until

LOW, HIGH = Span(0, 3), Span(3, 6)
SOON = (
    "--record-ttl-s",
    "3",
    "--follow-every-s",
    "0.5",
    "--lease-ttl-s",
    "3",
    # Steps of a tiny model on a busy machine differ too much for the other goal.
    "--placement-goal",
    "throughput",
)


def _moves(bed: Bed) -> int:
    """How often a placement has moved a node."""
    lines = [line for node in bed.nodes for line in node.log().splitlines()]
    return sum("placement_followed" in line and "answer=moved" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_second_holder_is_restored_while_a_session_runs(alone: PreTrainedModel, bed: Bed) -> None:
    """Three hold the lower blocks and three the upper ones, of which two die.

    Moving for a gain, which speeds that were measured on a busy machine may promise, takes five
    looks at least: more than there are before the nodes die, or after it.
    """
    last, *victims = bed.start([HIGH] * 3, *SOON)
    spares = [bed.wait_for(bed.launch(3, *SOON)) for _ in range(2)]
    boss = bed.wait_for(bed.launch(3, "--orchestrator", "--orchestrate-every-s", "3", *SOON))
    spares.append(boss)
    assert [span_of(node) for node in spares] == [LOW] * 3
    time.sleep(5.0)
    assert _moves(bed) == 0
    with join_bed(bed, "chain") as model, model.inference_session(128) as session:
        blow = Blow(after=5, strike=lambda: bed.kill(*victims))
        run_with_blow(alone, model, session, random_ids(1, 20), blow, "two of three killed")
        wait_until(lambda: any(span_of(node) == HIGH for node in spares))
    time.sleep(5.0)
    assert Counter(map(span_of, (*spares, last))) == {LOW: 2, HIGH: 2}
    assert "placement_published" in boss.log()
    assert _moves(bed) == 1


def _topology(node: Node) -> Any:
    """What a daemon says of its swarm over HTTP."""
    return json.loads(_page(node, "topology.json"))


def _shown_nodes(node: Node) -> Any:
    return json.loads(_page(node, "dashboard/state.json"))["sections"]["nodes"]


def _page(node: Node, path: str) -> bytes:
    found = re.search(r"http_server_started +url=(http://[0-9.:]+/)", node.log())
    assert found is not None, node.log()
    with urlopen(found[1] + path, timeout=10) as response:
        body: bytes = response.read()
        return body


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_topology_of_a_live_swarm_can_be_read_over_http_and_replayed(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of four daemons has a page; then one of the others dies."""
    *others, victim = bed.start([LOW, HIGH, HIGH], "--ping-every-s", "0.3", *SOON)
    snapshots = tmp_path / "snapshots"
    kept = ("--snapshots-dir", str(snapshots), "--decisions-path", str(tmp_path / "decisions.db"))
    page = ("--http", "127.0.0.1:0", "--ping-every-s", "0.3")
    plans = ("--orchestrator", "--orchestrate-every-s", "0.5")
    boss = bed.wait_for(bed.launch(LOW, *page, *plans, *kept, *SOON))
    everyone = {node.peer_id for node in (*others, victim, boss)}
    wait_until(lambda: {n["peer"] for n in _topology(boss).get("nodes", ())} == everyone)
    # Its own ways to the others, at least.
    wait_until(lambda: len(_topology(boss)["links"]["pairs"]) >= 3 and _topology(boss)["leads"])
    before = _topology(boss)
    assert before["coverage"] == [2] * 6
    bars = before["shapes"]["round_trips"]["h0"]["bars"]
    assert len(bars) <= 4
    assert bars[0] == [0, None]
    assert before["links"]["median_rtt_ms"] < 1000
    assert b"<title>nesa swarm</title>" in _page(boss, "")
    wait_until(lambda: set(_shown_nodes(boss)) == everyone)
    bed.kill(victim)
    wait_until(lambda: len(_topology(boss)["nodes"]) == 3)
    wait_until(lambda: any(e["trigger"] == "replicas" for e in _topology(boss)["events"]))
    after = _topology(boss)
    assert after["strategy"] == "rebalance-throughput"
    assert after["exponents"]["now"]["gamma"] == SHIPPED_PARAMETERS.gamma
    figures = after["history"]["triggers"]["shift"]["figure"]
    assert len(figures) == len(after["history"]["at"]) >= 3
    assert "secret" not in json.dumps(after)
    (store,) = snapshots.glob("*.db")  # it is being written: its journal may lie beside it
    assert run_command(["simulate", "--replay", str(store), "--json"]) == 0
    assert {row["nodes"] for row in json.loads(capsys.readouterr().out)} >= {3, 4}
