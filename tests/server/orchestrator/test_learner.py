"""What an orchestrator learns from its store in another process, keeps, and publishes."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from nesa_node.cli.views.decisions import print_decision
from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.ids import ModelId
from nesa_node.routing.chain_request import CostWeights
from nesa_node.routing.search.greedy import GreedyParameters
from nesa_node.routing.succession import LeaseTerms
from nesa_node.routing.tuner import SHIPPED_TUNING, Tuning
from nesa_node.server.orchestrator import learner as learner_module
from nesa_node.server.orchestrator.history import History
from nesa_node.server.orchestrator.learner import LearnedExponents, Learner
from nesa_node.server.orchestrator.orchestrator import Orchestrator, OrchestratorIntervals
from nesa_node.server.orchestrator.planner import Rebalancer
from nesa_node.server.orchestrator.snapshot_store import SnapshotStore
from nesa_node.server.orchestrator.study import StudyRequest, StudyResult
from nesa_node.swarm.dht.sealing import PlacementNotice, TunedExponents
from nesa_node.swarm.notice_store import LeaseKeeper
from nesa_node.topology.changes.triggers import HistoryEntry
from nesa_node.topology.simulation.world import make_world
from tests.swarm.local_swarm import eventually, local_swarm
from tests.swarm.record_fields import MODEL_ID, make_status
from tests.topology.simulation.churn import simulate_churn

MODEL = ModelId(MODEL_ID)
BETTER = Tuning(rule=GreedyParameters(gamma=0.5)).published()


def _store(path: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    store = SnapshotStore(path)
    for each in simulate_churn(make_world(12, 8, rng), count, rng):
        snapshot = each.snapshot
        look = HistoryEntry(
            at=snapshot.taken_at, digest=snapshot.digest(), nodes=len(snapshot.nodes)
        )
        assert store.add(look, snapshot, always=True)
    return path


def _learner(tmp_path: Path, count: int = 30, seconds: float = 2.0) -> Learner:
    return Learner(
        MODEL,
        _store(tmp_path / "model.db", count),
        goal="latency",
        replicas=1,
        decisions=DecisionLog(tmp_path / "decisions.db"),
        seconds=seconds,
        wall_clock=lambda: 1e9,
    )


async def test_a_study_says_what_it_found_and_most_often_changes_nothing(tmp_path: Path) -> None:
    # A library needs 16 snapshots, and a loaded machine may need 0.3 s for each.
    learner = _learner(tmp_path, seconds=8.0)
    found = await learner.learn()
    assert found is not None
    assert found.candidates > 0
    assert learner.tuned == LearnedExponents()
    assert "nothing changes" in found.tuning
    library = learner.library()
    assert library is not None, found.schemas
    assert library.num_blocks == 8
    (entry,) = DecisionLog(tmp_path / "decisions.db").recent(5)
    assert (entry.kind, entry.body["published"]) == ("tuning", False)
    assert entry.body["reason"] == found.tuning
    again = _learner(tmp_path / "other", 1)
    again._store = learner._store  # the file is beside the store
    again.load()
    restored = again.library()
    assert restored is not None
    assert [kind.schemas for kind in restored.clusters] == [
        kind.schemas for kind in library.clusters
    ]
    decision = Rebalancer(replicas=1, library=learner.library).decide(
        SnapshotStore(learner._store).snapshots(1)[0]
    )
    assert decision.schema_name in {schema.name for schema in library.schemas}


async def test_a_study_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = _learner(tmp_path, 1)
    learner._store.write_bytes(b"no store")
    assert await learner.learn() is None
    learner.path.write_bytes(b"{")
    learner.load()
    assert learner.tuned == LearnedExponents()

    async def lie(_: bytes) -> bytes:
        return msgspec.json.encode(
            StudyResult(exponents=BETTER | {"gamma": 1e9}, tuning="more", schemas="none")
        )

    monkeypatch.setattr(learner_module, "_run_study", lie)
    assert await learner.learn() is not None
    assert learner.tuned == LearnedExponents()


async def test_what_gains_is_published_signed_and_shown_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def better(_: bytes) -> bytes:
        return msgspec.json.encode(
            StudyResult(exponents=BETTER, tuning="3% gained", gain=0.03, schemas="none")
        )

    monkeypatch.setattr(learner_module, "_run_study", better)
    async with local_swarm(tmp_path, 2) as (boss, node):
        await node.directory.publish(make_status())
        learner, history = _learner(tmp_path, 1), History()
        lease = LeaseKeeper(
            boss.notices, boss.identity.peer_id, MODEL, clock=time.time, terms=LeaseTerms(3.0, 1.5)
        )
        orchestrator = Orchestrator(
            boss.notices,
            lease,
            MODEL,
            lambda: boss.directory.fetch(MODEL),
            Rebalancer(),
            decisions=None,
            history=history,
            learner=learner,
            intervals=OrchestratorIntervals(placement_ttl_s=60.0),
            rng=random.Random(1),
        )

        async def leads() -> bool:
            await lease.step()
            return lease.is_leader

        await eventually(leads)
        assert await orchestrator.step() is None
        await learner.learn()
        told = await orchestrator.step()
        assert told is not None
        assert told.moves == ()
        assert told.exponents is not None
        assert (told.exponents.version, told.exponents.values) == (1, BETTER)
        assert await orchestrator.step() is None  # it is told already
        (read,) = await node.notices.fetch(PlacementNotice, MODEL)
        assert read.exponents == TunedExponents(version=1, at=1e9, values=BETTER, why="3% gained")
        seen = history.document()
        assert seen is not None
        assert seen["exponents"]["now"] == BETTER
        assert [each["why"] for each in seen["exponents"]["history"]] == ["as shipped", "3% gained"]


async def test_weights_of_the_default_cost_are_learnt_and_published_beside_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed = Tuning(weights=CostWeights(failure=2.0, stability=0.5)).published()

    async def weigh(_: bytes) -> bytes:
        return msgspec.json.encode(
            StudyResult(exponents=weighed, tuning="no", cost_tuning="2% gained", schemas="none")
        )

    monkeypatch.setattr(learner_module, "_run_study", weigh)
    learner = _learner(tmp_path, 1)
    await learner.learn()
    assert learner.tuned.values == weighed
    assert learner.tuned.why == "default cost: 2% gained"
    again = _learner(tmp_path, 1)
    again.load()
    assert again.tuned == learner.tuned


def test_a_study_reads_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = _learner(tmp_path, 1)
    learner._save(
        StudyResult(
            exponents=SHIPPED_TUNING.published(),
            tuning="0.10% +- 0.20% gained on 90 held-out sessions: nothing changes",
            learnt_from=180,
            held_out=90,
            candidates=90,
            schemas="1.2% above the best schema",
            regret=0.012,
        ),
        changed=False,
    )
    (entry,) = DecisionLog(tmp_path / "decisions.db").recent(1)
    print_decision(entry)
    text = capsys.readouterr().out
    assert "nothing was changed" in text
    assert "gamma 1" in text
    assert entry.name.startswith("tuning-0-")


def test_a_study_ends_with_whoever_asked_for_it() -> None:
    """Also where that was killed, and could not end it."""
    asking = """
import os, signal, subprocess, sys
command = [sys.executable, "-P", "-m", "nesa_node.server.orchestrator.study", str(os.getpid())]
print(subprocess.Popen(command, start_new_session=True).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # Its question does not come, so that it waits for as long as it lives.
    with subprocess.Popen(
        [sys.executable, "-c", asking], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as asker:
        assert asker.stdout is not None
        study = int(asker.stdout.readline())
        try:
            ended, _, _ = select.select([asker.stdout], [], [], 40)
            assert ended
            assert asker.stdout.read() == b""  # nobody has it open for writing
        finally:
            with suppress(ProcessLookupError):
                os.kill(study, signal.SIGKILL)


def test_the_system_ends_a_study_that_takes_more_processor_time_than_it_may() -> None:
    program = """
import resource, sys
from nesa_node.server.orchestrator import study
def told(question):
    limits = str(resource.getrlimit(resource.RLIMIT_CPU))
    return study.StudyResult(exponents={}, tuning=limits, schemas="")
study.study = told
study.main()
"""
    question = StudyRequest(
        store="", goal="latency", replicas=1, seconds=10.0, seed=0, exponents={}
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(os.getpid())],
        input=msgspec.json.encode(question),
        capture_output=True,
        check=True,
    )
    assert msgspec.json.decode(said.stdout, type=StudyResult).tuning == "(50, 51)"
