"""What `nesa-node explain PLACEMENT` prints."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from nesa_node.cli.app import run_command
from nesa_node.client.routing.planner import ChainPlan, describe_decision
from nesa_node.client.verification.audit_record import AuditRecord
from nesa_node.core.decision_log import DecisionLog, LoggedDecision
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import ChainRequest, CostWeights
from nesa_node.routing.chains import Hop
from nesa_node.routing.strategies import LatencyStrategy
from nesa_node.server.orchestrator.history import decision_entry
from nesa_node.server.orchestrator.planner import Rebalancer
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.swarm.notice_fields import PEERS

NAME = "7.1800000000000@abcdefgh"


def _snapshot(*spans: tuple[int, int], at: float = 1_800_000_000.0) -> Snapshot:
    nodes = tuple(
        NodeState(
            PeerId(PEERS[i]), Span(*span), decode_tokens_per_s=10.0, max_blocks=10, movable=True
        )
        for i, span in enumerate(spans)
    )
    return Snapshot(ModelId("tiny@01"), 20, nodes, taken_at=at)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DecisionLog:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return DecisionLog(tmp_path / "nesa-node" / "decisions.db")


def _explain(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run_command(["explain", *argv]) == 0
    return capsys.readouterr().out


def test_a_placement_says_why_what_and_at_what_cost(
    log: DecisionLog, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = _snapshot((0, 10), (0, 10), (0, 10), (10, 20))
    rebalancer = Rebalancer()
    rebalancer.decide(_snapshot((0, 10), (0, 10), (0, 10), (10, 20), (10, 20), at=1.0))
    decision = rebalancer.decide(snapshot)
    log.add(decision_entry(NAME, decision, snapshot, epoch=7))
    text = _explain(capsys, NAME[:6])
    assert max(map(len, text.splitlines())) <= 100
    for words in (
        "published",
        "because of missing replicas",
        f"…{decision.moves[0].peer[-6:]}",
        "10:20",
        "a gain of at least 10%",
        snapshot.digest(),
        "blocks lost holders",
        "rebalance-latency",
        "planned: replicas are missing, and spans have changed",
    ):
        assert words in text, words
    (told,) = json.loads(_explain(capsys, NAME, "--json"))
    assert told["moves"][0]["load_s"] > 0
    assert NAME in _explain(capsys)


def test_a_swarm_without_a_chain_is_told_in_words(
    log: DecisionLog, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = _snapshot((0, 10), (0, 10))
    log.add(decision_entry(NAME, Rebalancer().decide(snapshot), snapshot, epoch=7))
    text = _explain(capsys, NAME)
    assert "because of unserved blocks" in text
    assert "no chain" in text


def test_what_was_refused_is_told(log: DecisionLog, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = _snapshot((0, 10))
    snapshot = replace(snapshot, nodes=tuple(replace(n, movable=False) for n in snapshot.nodes))
    log.add(decision_entry(None, Rebalancer().decide(snapshot), snapshot, epoch=7))
    text = _explain(capsys, "none-")
    assert "nothing was published" in text
    assert "no node that may move has memory to spare" in " ".join(text.split())


@pytest.mark.parametrize("hostile", ["[bold]x[/bold]", "[link=http://x]y[/link]"])
def test_a_hostile_model_name_stays_plain_text(
    hostile: str, log: DecisionLog, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot: Any = replace(_snapshot((0, 10), (10, 20)), model_id=ModelId(hostile))
    log.add(decision_entry(None, Rebalancer().decide(snapshot), snapshot, epoch=7))
    assert hostile in _explain(capsys, "none-")


def test_a_session_says_what_failures_stability_and_queueing_cost(
    log: DecisionLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1 of a failure takes 5 ms of each of 200 tokens, and so on; a weight of 0 has no line."""
    snapshot = _snapshot((0, 20))
    nodes = tuple(replace(node, reliability=0.9, load=0.5) for node in snapshot.nodes)
    snapshot = replace(snapshot, nodes=nodes)
    peer = nodes[0].peer_id
    plan = ChainPlan(
        (Hop(peer, Span(0, 20)),), ChainRequest(span=Span(0, 20), stability={peer: 0.5})
    )
    tuned = CostWeights(failure=2.0, stability=0.5, load=1.5)
    for name, weights in (("aa", CostWeights()), ("bb", tuned)):
        strategy = LatencyStrategy(failures=True, weights=weights)
        body = describe_decision(snapshot, plan, strategy, "opened")
        log.add(LoggedDecision("session", name * 16, 1.8e9, body))
    shipped = _explain(capsys, "aaaa")
    assert "failures are expected to cost 5.0 ms more per token" in shipped
    assert "unstable" not in shipped
    assert "queueing" not in shipped.split("failures are expected")[1]
    assert "own cost" not in shipped
    text = _explain(capsys, "bbbb")
    assert "failures are expected to cost 10.0 ms more per token" in text
    assert "unstable places in the network are expected to cost 12.5 ms more per token" in text
    assert "tuned weights count queueing 25.0 ms more per token" in text


def test_a_session_says_how_long_its_prompt_was(
    log: DecisionLog, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = _snapshot((0, 20))
    hops = (Hop(snapshot.nodes[0].peer_id, Span(0, 20)),)
    for name, prompt in (("aa", 0), ("bb", 300)):
        plan = ChainPlan(hops, ChainRequest(span=Span(0, 20), prompt_tokens=prompt))
        body = describe_decision(snapshot, plan, LatencyStrategy(), "opened")
        log.add(LoggedDecision("session", name * 16, 1.8e9, body))
    assert "\na step was expected" in _explain(capsys, "aaaa")
    assert "share of a prompt of 300 tokens" in _explain(capsys, "bbbb")


def test_an_audit_says_what_it_found_and_how_soon_a_liar_is_found(
    log: DecisionLog, capsys: pytest.CaptureFixture[str]
) -> None:
    record = AuditRecord(
        peer=PeerId(PEERS[0]), blocks=(3, 5), outcome="failed", drawn_with=0.1, tokens=64
    )
    measured = replace(record, worst=0.05, mean=0.04, of_allowed=4.0, scheme="jl-32", excused=3)
    for body in (measured, replace(record, outcome="not audited", reason="no weights here")):
        log.add(LoggedDecision("audit", "cc" * 16, 1.8e9, asdict(body)))
    text = _explain(capsys, "cccc")
    assert f"audit of …{PEERS[0][-6:]}, blocks 3:5, by the client" in text
    assert "64 tokens: worst error 0.05, mean 0.04, 4 of what is allowed (jl-32)" in text
    assert "3 tokens were not judged" in text
    assert "found within 29 of them" in text
    assert "no weights here" in text
    assert f"…{PEERS[0][-6:]} 3:5 not audited" in _explain(capsys)


def test_a_chain_that_was_outvoted_is_told_as_a_whole(
    log: DecisionLog, capsys: pytest.CaptureFixture[str]
) -> None:
    record = AuditRecord(
        peer=PeerId(""),
        chain=(PeerId(PEERS[0]), PeerId(PEERS[1])),
        blocks=(0, 5),
        outcome="outvoted",
        auditor="cdv",
        drawn_with=0.1,
        reason="2 of 3 chains agree on something else",
    )
    log.add(LoggedDecision("audit", "dd" * 16, 1.8e9, asdict(record)))
    names = f"…{PEERS[0][-6:]} → …{PEERS[1][-6:]}"
    assert f"audit of {names}, blocks 0:5, by the cdv" in _explain(capsys, "dddd")
    assert f"{names} 0:5 outvoted" in _explain(capsys)


def test_a_speculation_says_what_was_drafted_and_gained(
    log: DecisionLog, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {
        "model": "tiny@01",
        "steps": 40,
        "tokens": 100,
        "seconds": 5.0,
        "gain": 2.25,
        "drafted": {"lookup": 80, "model": 20},
        "accepted": {"lookup": 60},
    }
    log.add(LoggedDecision("speculation", "ee" * 16, 1.8e9, body))
    text = _explain(capsys, "eeee")
    assert "100 tokens in 40 steps, 2.25 times as fast as one by one" in " ".join(text.split())
    assert "drafted by lookup: 80 tokens, 60 accepted (75%)" in text
    assert "drafted by model: 20 tokens, 0 accepted (0%)" in text
    listed = _explain(capsys)
    assert "eeeeeeeeeeee" in listed
    assert "100 tokens in 40 steps" in " ".join(listed.split())
