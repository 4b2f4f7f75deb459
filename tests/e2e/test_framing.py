"""A node that is hostile to the next one of a chain has audits blame no honest node."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.compression.tensors import HiddenStates, decode, encode
from nesa_node.core.errors import ProtocolError, RefusedError, WrongActivationsError
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.cache.pages import PagePool
from nesa_node.server.scheduler.session_queue import FinishedStep
from nesa_node.server.session.output_sender import OutputSender
from nesa_node.server.session.sealing import SessionSealer
from nesa_node.swarm.protocol.messages import RowSlice
from nesa_node.swarm.protocol.seal_messages import Disclosed, Seal
from nesa_node.swarm.protocol.stream import Stream
from tests import swarms
from tests.audit_outcomes import audit_outcomes
from tests.client.local_models import random_ids
from tests.e2e.joining import joined
from tests.e2e.liars import calibrate_tiny_models, peer_of
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import assert_same_tokens
from tests.swarms import NodeThread, in_process_swarm, thirds

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
SESSIONS = 300
Disclosures = list[tuple[Disclosed, bytes]]


@pytest.fixture(autouse=True)
def _no_other_tests_liars_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Framer:
    """The node of the blocks `at`, which does something else in each session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: Span) -> None:
        self.trick: str = "nothing"
        self.peer: PeerId | None = None
        """None: all nodes of these blocks."""
        self._at = at
        self._patch = monkeypatch
        self._kept: Disclosures = []
        self._old_seal: Seal | None = None
        self._rng = random.Random(0)
        self._wrap(OutputSender, "disclose", self._disclose)
        self._wrap(OutputSender, "emit", self._emit)
        self._wrap(SessionSealer, "add_outputs", self._seal_outputs)
        self._wrap(SessionSealer, "make_seal", self._make_seal)

    def _wrap(self, owner: type, name: str, change: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def method(own: Any, *args: Any, **kwargs: Any) -> Any:
            sealer: SessionSealer = own if owner is SessionSealer else own._state.sealer
            is_other = self.peer not in (None, sealer._identity.peer_id)
            if is_other or Span(*sealer._opened.blocks) != self._at:
                return original(own, *args, **kwargs)
            return change(lambda *again: original(own, *(again or args), **kwargs), own, *args)

        self._patch.setattr(owner, name, method)

    async def _disclose(self, original: Any, sender: OutputSender, rows: Any) -> None:
        sent: Disclosures = []

        async def keep(_: Stream, message: Disclosed, payload: Any = b"") -> None:
            sent.append((message, bytes(payload)))

        send = Stream.send
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sender._client, "send", keep.__get__(sender._client), raising=False)
            await original()
        before, self._kept = self._kept, sent
        for message, payload in self._change(sent, before):
            await send(sender._client, message, payload)

    def _change(self, sent: Disclosures, before: Disclosures) -> Disclosures:
        if self.trick == "disclose nothing":
            raise ProtocolError("not_kept", "it is lost")
        if self.trick == "disclose less":
            return sent[1:]
        if self.trick == "disclose another session's":
            return before or sent
        if self.trick == "disclose twice":
            return sent[:-1] + sent
        return [
            (message, payload) if not message.rows else self._altered(message, payload)
            for message, payload in sent
        ]

    def _altered(self, message: Disclosed, payload: bytes) -> tuple[Disclosed, bytes]:
        values_TD = decode(message.tensor, payload, max_bytes=message.tensor.max_nbytes).clone()
        rows = message.rows
        if self.trick == "disclose zeros":
            values_TD.zero_()
        elif self.trick == "disclose noise":
            values_TD *= 1 + 1e-3 * torch.randn_like(values_TD)
        elif self.trick == "disclose in another order":
            values_TD = values_TD.flip(0)
        elif self.trick == "disclose other positions":
            rows = tuple(RowSlice(part.row, part.position + 1, part.count) for part in rows)
        elif self.trick == "two faces":
            values_TD *= 0.5
        meta, changed = encode(values_TD.contiguous())
        return Disclosed(rows=rows, tensor=meta), bytes(changed)

    def _emit(self, original: Any, _: OutputSender, finished: FinishedStep) -> Any:
        """With two faces: the next node gets twice what is sealed and disclosed."""
        if self.trick != "two faces":
            return original()
        step, hidden, output = finished
        meta, payload = output.meta, output.payload
        doubled_TD = 2 * decode(meta, payload, max_bytes=meta.max_nbytes)
        return original(FinishedStep(step, hidden, HiddenStates.from_tensor(doubled_TD)))

    def _seal_outputs(self, original: Any, _: Any, rows: Any, meta: Any, payload: Any) -> Any:
        if self.trick != "two faces":
            return original()
        halved_TD = 0.5 * decode(meta, payload, max_bytes=meta.max_nbytes)
        return original(rows, *encode(halved_TD))

    def _make_seal(self, original: Any, *_: Any) -> Seal:
        made: Seal = original()
        old, self._old_seal = self._old_seal, made
        return old if self.trick == "seal of an earlier session" and old is not None else made


TRICKS = (
    "disclose nothing", "disclose less", "disclose another session's", "disclose twice",
    "disclose zeros", "disclose noise", "disclose in another order", "disclose other positions",
    "two faces", "seal of an earlier session",
)  # fmt: skip


@pytest.mark.parametrize("sessions", [20, pytest.param(SESSIONS, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_a_hostile_neighbour_frames_no_honest_node(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: int
) -> None:
    calibrate_tiny_models(monkeypatch)
    spans, llama = thirds(BLOCKS), tiny("llama")
    framer = Framer(monkeypatch, spans[1])
    blamed: Counter[str] = Counter()
    with (
        in_process_swarm(llama, spans, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0, reuse_prefix=False) as model,
    ):
        # Its own audits would find it: in half of the sessions there is only the next one's.
        hostile = peer_of(tmp_path / "node-1.key")
        connection: Any = model._ensure_connection()
        for number in range(sessions):
            auditor = connection._auditor
            auditor.history = AuditHistory(None)
            connection._planner.barred = auditor.history.barred
            framer.trick = TRICKS[number // 2 % len(TRICKS)]
            is_audited = number % 2 == 0
            monkeypatch.setattr(
                auditor, "draws", lambda peer, own=is_audited: own or peer != hostile
            )
            with (
                suppress(WrongActivationsError, RefusedError),
                model.inference_session(max_length=32) as session,
            ):
                model.generate(
                    random_ids(1, 6, seed=number),
                    session=session,
                    max_new_tokens=4,
                    do_sample=False,
                )
            assert auditor.history.barred.keys() <= {hostile}, framer.trick
            blamed[framer.trick] += len(auditor.history.barred)
    # It is blamed itself for what it alone is responsible for.
    assert blamed["disclose zeros"] == sessions // len(TRICKS)
    assert blamed["seal of an earlier session"] == sessions // len(TRICKS) // 2


def test_a_node_with_two_faces_is_avoided(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends the next node something else than it seals. Which of the two lies is not known."""
    calibrate_tiny_models(monkeypatch)
    first, second, third = thirds(BLOCKS)
    llama, prompt = tiny("llama"), random_ids(1, 8)
    framer = Framer(monkeypatch, second)
    framer.trick = "two faces"
    with (
        in_process_swarm(llama, [first, second, second, third], tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        framer.peer, honest = (peer_of(tmp_path / f"node-{number}.key") for number in (1, 2))
        connection: Any = model._ensure_connection()
        connection._planner.barred = {honest}
        effects = connection._auditor.effects

        def avoid_now(peer: PeerId) -> None:
            connection._planner.barred = set()
            effects.avoid(peer)

        connection._auditor.effects = replace(effects, avoid=avoid_now)
        tokens = model.generate(prompt, **OPTIONS)
        model.close()
        assert audit_outcomes(model) == {"disputed": 2, "passed": 5}
        assert not connection._auditor.history.barred
    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


@pytest.mark.parametrize("place", range(3))
def test_a_donor_of_a_wrong_cache_frames_not_its_successor(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """A node that leaves hands its sessions over, with other keys and values than it computed."""
    calibrate_tiny_models(monkeypatch)
    threads: list[NodeThread] = []

    class NotedThread(NodeThread):
        def __enter__(self) -> NodeThread:
            threads.append(self)
            return super().__enter__()

    monkeypatch.setattr(swarms, "NodeThread", NotedThread)
    export = PagePool.export_tokens
    monkeypatch.setattr(PagePool, "export_tokens", lambda *args: 1.3 * export(*args))
    spans, llama = thirds(BLOCKS), tiny("llama")
    keys = {peer_of(tmp_path / f"node-{number}.key"): number for number in range(4)}
    with (
        in_process_swarm(llama, [*spans, spans[place]], tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
        suppress(WrongActivationsError),
        model.inference_session(max_length=128) as session,
    ):
        connection: Any = model._ensure_connection()
        prompt = random_ids(1, 40)
        tokens = model.generate(prompt, session=session, **OPTIONS)
        (thread,) = threads
        donor = session.hops[place].peer_id
        thread._loop.call_soon_threadsafe(thread._stopping[keys[donor]].set)
        while session.hops[place].peer_id == donor and tokens.shape[1] < 120:
            more = {"max_new_tokens": 1, "do_sample": False}
            tokens = model.generate(tokens, session=session, **more)
        model.generate(tokens, session=session, max_new_tokens=4, do_sample=False)
        assert session.hops[place].peer_id != donor
        session.finish()
    found = audit_outcomes(model)
    assert found["unclear"] == 1, found
    assert not connection._auditor.history.barred
