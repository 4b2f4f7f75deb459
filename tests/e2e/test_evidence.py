"""A node that contradicts itself is left by clients that never audited it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.errors import WrongActivationsError
from nesa_node.core.ids import PeerId
from nesa_node.core.settings.choices import RouteName
from nesa_node.server.evidence.opening_server import OpeningServer
from nesa_node.server.session.sealing import SessionSealer
from nesa_node.swarm import evidence
from nesa_node.swarm.dht.sealing import EvidenceNotice, FailureReport, Notice
from nesa_node.swarm.protocol.seal_messages import Seal
from tests.client.local_models import random_ids
from tests.e2e.joining import ROUTES, joined
from tests.e2e.liars import calibrate_tiny_models, lie, peer_of, scale
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import assert_same_tokens
from tests.swarms import in_process_swarm, thirds

OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
WAIT_S = 30.0


def contradict(monkeypatch: pytest.MonkeyPatch, liar: PeerId) -> None:
    """Have `liar` sign, when asked, another seal with the number of its last one."""
    make_seal = SessionSealer.make_seal

    def make_another(sealer: SessionSealer, epoch: int, *, requested: bool = False) -> Seal:
        if requested and sealer._identity.peer_id == liar:
            sealer._number -= 1
        return make_seal(sealer, epoch, requested=requested)

    monkeypatch.setattr(SessionSealer, "make_seal", make_another)


def fetch(model: DistributedModelForCausalLM, kind: type[Notice]) -> list[Any]:
    connection: Any = model._ensure_connection()
    fetching = connection.swarm.notices.fetch(kind, connection._request.model_id)
    found: list[Any] = model._loop.run(fetching)
    return found


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("route", ROUTES)
def test_a_node_that_contradicts_itself_is_left_by_clients_that_audit_nothing(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: RouteName
) -> None:
    """And nodes report it; its own operator reads why."""
    calibrate_tiny_models(monkeypatch)
    monkeypatch.setattr(evidence, "EVIDENCE_INTERVAL_S", 0.5)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "finder"))
    first, second, third = thirds(BLOCKS)
    llama, prompt = tiny("llama"), random_ids(1, 8)
    with (
        structlog.testing.capture_logs() as logs,
        in_process_swarm(llama, [first, second, second, third], tmp_path) as addresses,
    ):
        liar, honest = (peer_of(tmp_path / f"node-{number}.key") for number in (1, 2))
        contradict(monkeypatch, liar)
        with joined(llama, addresses, route, audit=1.0) as finder:
            connection: Any = finder._ensure_connection()
            connection._planner.barred = {honest}
            with (
                pytest.raises(
                    WrongActivationsError, match=r"contradicts itself: two seals"
                ) as error,
                finder.inference_session(max_length=60) as session,
            ):
                finder.generate(prompt, session=session, **OPTIONS)
            assert error.value.peer == liar
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "reader"))
        with joined(llama, addresses, route) as reader:
            connection = reader._ensure_connection()
            barred = connection._auditor.history.barred
            eventually(lambda: barred)
            assert barred.keys() == {liar}
            assert "contradicts itself" in barred[liar]
            tokens = reader.generate(prompt, **OPTIONS)

            def reporters() -> set[str]:
                return {
                    report.peer_id
                    for report in fetch(reader, FailureReport)
                    for each in report.failures
                    if (each.peer, each.kind) == (liar, "wrong")
                }

            nodes = {peer_of(tmp_path / f"node-{number}.key") for number in (0, 2, 3)}
            eventually(lambda: nodes <= reporters())
            accused = [each.accused for each in fetch(reader, EvidenceNotice)[0].contradictions]
            assert accused == [liar]
            eventually(lambda: any(e["event"] == "evidence_against_this_node" for e in logs))
    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


@pytest.mark.parametrize("route", ROUTES)
def test_wrong_work_is_computed_again_by_nodes_if_its_client_shows_it(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: RouteName
) -> None:
    """The one with the same blocks reports the liar then, in its own name."""
    calibrate_tiny_models(monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first, second, third = thirds(BLOCKS)
    lie(monkeypatch, second, scale)
    handle, offers = OpeningServer.handle, []

    async def note_offer(server: OpeningServer, peer: PeerId, *pipes: Any) -> None:
        offers.append(peer)
        await handle(server, peer, *pipes)

    monkeypatch.setattr(OpeningServer, "handle", note_offer)
    with in_process_swarm(tiny("llama"), [first, second, second, third], tmp_path) as addresses:
        liar, honest = (peer_of(tmp_path / f"node-{number}.key") for number in (1, 2))
        for shows in (False, True):
            options = {"audit": 1.0, "publish_evidence": shows}
            with joined(tiny("llama"), addresses, route, **options) as model:
                connection: Any = model._ensure_connection()
                connection._auditor.history = AuditHistory(None)
                connection._planner.barred = {honest}

                def accused_by_the_honest_node() -> bool:
                    return any(
                        each.peer == liar and each.kind == "wrong"
                        for report in fetch(model, FailureReport)
                        if report.peer_id == honest
                        for each in report.failures
                    )

                with (
                    pytest.raises(WrongActivationsError),
                    model.inference_session(max_length=60) as session,
                ):
                    model.generate(random_ids(1, 8), session=session, **OPTIONS)
                if shows:
                    eventually(accused_by_the_honest_node)
                else:

                    def is_idle(auditor: Any = connection._auditor) -> bool:
                        return not auditor._tasks

                    eventually(is_idle)
                assert bool(offers) == shows
