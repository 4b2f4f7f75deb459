"""Work of nodes computed again by the client, at real nodes, some of which lie."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.session import hop_opening
from nesa_node.client.verification import auditor
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.client.verification.node_recomputation import NodeRecomputation
from nesa_node.client.verification.session_audit import HopWork
from nesa_node.compression.tensors import TensorMeta, encode
from nesa_node.core.errors import (
    ProtocolError,
    RefusedError,
    WrongActivationsError,
)
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import RouteName
from nesa_node.server.session import sealing, session_server
from nesa_node.server.session.message_loop import _SessionEnded
from nesa_node.server.session.output_sender import OutputSender
from nesa_node.server.session.sealing import SessionSealer
from nesa_node.swarm.dht.sealing import FailureReport
from nesa_node.swarm.protocol.messages import Opened, RowSlice
from nesa_node.swarm.protocol.seal_messages import Disclosed
from nesa_node.swarm.reputation import ReputationView
from nesa_node.verification import comparison
from nesa_node.verification.comparison import ComputationKind, Threshold
from tests.audit_outcomes import audit_outcomes
from tests.client.local_models import random_ids
from tests.e2e.joining import ROUTES, joined
from tests.e2e.liars import boast, calibrate_tiny_models, lie, peer_of, scale
from tests.engine.tiny_models import BLOCKS, HIDDEN, reference
from tests.same_tokens import assert_same_tokens
from tests.swarms import in_process_swarm, thirds

OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
JOIN_S = 60.0
"""For a client to learn of a new node."""
FOUR_TOKENS = {"max_new_tokens": 4}


def generate_once(
    model: DistributedModelForCausalLM, prompt: torch.Tensor
) -> WrongActivationsError | None:
    """What the end of a session that generates says of its audits."""
    try:
        with model.inference_session(max_length=prompt.shape[1] + 40) as session:
            model.generate(prompt, session=session, **OPTIONS)
    except WrongActivationsError as error:
        return error
    return None


@pytest.fixture(autouse=True)
def _small_models_are_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate_tiny_models(monkeypatch)


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.mark.parametrize("route", ROUTES)
def test_honest_nodes_pass(llama: Path, tmp_path: Path, route: RouteName) -> None:
    prompt = random_ids(2, 40)
    with (
        in_process_swarm(llama, thirds(BLOCKS), tmp_path) as addresses,
        joined(llama, addresses, route, audit=1.0) as model,
    ):
        tokens = model.generate(prompt, **OPTIONS)
        model.close()
        assert audit_outcomes(model) == {"passed": 3}
    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


@pytest.mark.parametrize("quality", ["int8", "blockwise8", "lossless"])
@pytest.mark.parametrize("route", ROUTES)
def test_honest_nodes_pass_with_compressed_links(
    llama: Path, tmp_path: Path, route: RouteName, quality: str
) -> None:
    """Of a prompt in several chunks, too, of whose outputs the client has the last one."""
    with (
        in_process_swarm(llama, thirds(BLOCKS), tmp_path) as addresses,
        joined(llama, addresses, route, audit=1.0, quality=quality) as model,
    ):
        model.generate(random_ids(1, 300), **OPTIONS)
        model.close()
        assert audit_outcomes(model) == {"passed": 3}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("route", ROUTES)
def test_the_node_that_lies_is_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: RouteName, place: int
) -> None:
    """And the token from which on it does."""
    spans, lies_now = thirds(BLOCKS), threading.Event()

    def scale_now(output_TD: torch.Tensor) -> None:
        if lies_now.is_set():
            scale(output_TD)

    lie(monkeypatch, spans[place], scale_now)
    with (
        in_process_swarm(llama, spans, tmp_path) as addresses,
        joined(llama, addresses, route, audit=1.0) as model,
    ):
        session = model.inference_session(max_length=60)
        first = model.generate(random_ids(1, 8), session=session, **OPTIONS | FOUR_TOKENS)
        lies_now.set()
        model.generate(first, session=session, **OPTIONS)
        with pytest.raises(WrongActivationsError) as caught:
            session.finish()
        wrong = caught.value
        # The fourth token was not sent before.
        assert (wrong.peer, wrong.position) == (peer_of(tmp_path / f"node-{place}.key"), 8 + 3)
        assert Span(*wrong.blocks) == spans[place]
        model.close()
        assert audit_outcomes(model) == {"passed": 2, "failed": 1}


@pytest.mark.parametrize("route", ROUTES)
def test_reused_prefixes_and_rollbacks_are_audited(
    llama: Path, tmp_path: Path, route: RouteName
) -> None:
    prompt = random_ids(1, 80)
    edited = torch.cat([prompt[:, :70], random_ids(1, 9, seed=5)], 1)
    with (
        in_process_swarm(llama, thirds(BLOCKS), tmp_path) as addresses,
        joined(llama, addresses, route, audit=1.0) as model,
    ):
        for ids in (prompt, edited):
            model.generate(ids, **OPTIONS)
        with model.inference_session(max_length=140) as session:
            model.generate(prompt, session=session, **OPTIONS)
            model.generate(edited, session=session, **OPTIONS)
        model.generate(prompt, num_beams=3, max_new_tokens=12, do_sample=False)
        model.close()
        assert audit_outcomes(model) == {"passed": 12}


@pytest.mark.parametrize("route", ROUTES)
def test_prefixes_that_came_over_lossy_links_are_not_judged(
    llama: Path, tmp_path: Path, route: RouteName
) -> None:
    """The inputs that the nodes had then are not known: honest ones would seem wrong."""
    prompt = random_ids(1, 80)
    with (
        in_process_swarm(llama, thirds(BLOCKS), tmp_path) as addresses,
        joined(llama, addresses, route, audit=1.0, quality="int8") as model,
    ):
        for ids in (prompt, torch.cat([prompt[:, :70], random_ids(1, 9, seed=5)], 1)):
            model.generate(ids, **OPTIONS)
        model.close()
        found = audit_outcomes(model)
        # Some may be near enough.
        assert found["passed"] >= 3
        assert sum(found.values()) == 6
        assert found.keys() == {"passed", "not audited"}


def only_at(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: Span, change: Callable[..., Any]
) -> None:
    """Have the node of the blocks `at` run `change(original, self, ...)` as a method of `owner`."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        opened = self._opened if owner is SessionSealer else self._state.opened
        if Span(*opened.blocks) == at:
            return change(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, method)


async def _disclose_zeros(_: Any, sender: Any, rows: Any) -> None:
    count = sum(part.count for part in rows)
    meta, payload = encode(torch.zeros(count, HIDDEN))
    await sender._client.send(Disclosed(rows=rows, tensor=meta), payload)
    nothing = TensorMeta(meta.dtype, (0, HIDDEN))
    await sender._client.send(Disclosed(rows=(), tensor=nothing), b"")


async def _disclose_nothing(*_: Any) -> None:
    raise ProtocolError("not_kept", "it is lost")


async def _disclose_without_end(_: Any, sender: Any, rows: Any) -> None:
    meta, payload = encode(torch.zeros(1, HIDDEN))
    for _ in range(1000):
        await sender._client.send(Disclosed(rows=(RowSlice(0, 0, 1),), tensor=meta), payload)


async def _seal_nothing(*_: Any) -> None:
    """Hash no outputs, as if none had been sent."""


@pytest.mark.parametrize(
    ("method", "change", "expected"),
    [
        # The next node's inputs are not known, either.
        ("disclose", _disclose_zeros, {"passed": 1, "failed": 1, "not audited": 1}),
        ("disclose", _disclose_nothing, {"passed": 1, "failed": 1, "not audited": 1}),
        ("add_outputs", _seal_nothing, {"passed": 2, "failed": 1}),
    ],
)
def test_a_node_answers_for_its_seal(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    change: Callable[..., Any],
    expected: dict[str, int],
) -> None:
    spans = thirds(BLOCKS)
    owner = OutputSender if method == "disclose" else SessionSealer
    only_at(monkeypatch, owner, method, spans[1], change)
    with (
        in_process_swarm(llama, spans, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        assert generate_once(model, random_ids(1, 8)) is not None
        model.close()
        assert audit_outcomes(model) == expected


def test_a_node_that_floods_an_audit_is_dropped(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = thirds(BLOCKS)
    only_at(monkeypatch, OutputSender, "disclose", spans[1], _disclose_without_end)
    with (
        in_process_swarm(llama, spans, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        model.generate(random_ids(1, 8), **OPTIONS)
        model.close()
        assert audit_outcomes(model) == {"passed": 1, "not audited": 2}


@pytest.mark.timeout(180)
def test_a_node_that_leaves_whenever_it_is_audited_is_left(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes for an honest one that is unlucky: it is not barred, and drawn until one passes."""
    spans = thirds(BLOCKS)

    evader: PeerId | None = None

    def leave(make_seal: Callable[..., Any], sealer: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("requested") and sealer._identity.peer_id == evader:
            raise _SessionEnded
        return make_seal(sealer, *args, **kwargs)

    only_at(monkeypatch, SessionSealer, "make_seal", spans[1], leave)
    other = tmp_path / "other"
    other.mkdir()
    prompt = random_ids(1, 8)
    with (
        in_process_swarm(llama, spans, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        connection: Any = model._ensure_connection()
        history: AuditHistory = connection._auditor.history
        evader = peer_of(tmp_path / "node-1.key")
        for lost in (1, 2, 3):
            assert generate_once(model, prompt) is None
            while history.lost.get(evader) != lost:
                time.sleep(0.05)
        assert not history.barred
        assert history.draw_rate(evader, 0.01) == 1.0
        with in_process_swarm(llama, [spans[1]], other, initial_peers=addresses):
            honest = peer_of(other / "node-0.key")
            deadline = time.monotonic() + JOIN_S
            while not history.passed.get(honest):
                assert time.monotonic() < deadline
                assert generate_once(model, prompt) is None
            model.close()


@pytest.mark.parametrize("route", ROUTES)
def test_a_liar_is_not_used_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: RouteName
) -> None:
    """Not by another client of the user, either, who is told why."""
    spans = thirds(BLOCKS)
    lie(monkeypatch, spans[1], scale)
    with in_process_swarm(llama, spans, tmp_path) as addresses:
        with joined(llama, addresses, route, audit=1.0) as model:
            with pytest.raises(RefusedError, match="wrong activations"):
                model.generate(random_ids(1, 8), **OPTIONS)
            _assert_reported(model, peer_of(tmp_path / "node-1.key"))
            model.close()
            assert audit_outcomes(model) == {"passed": 2, "failed": 1}
        with (
            pytest.raises(RefusedError, match="wrong activations"),
            joined(llama, addresses, route),
        ):
            pass


def _assert_reported(model: DistributedModelForCausalLM, liar: PeerId) -> None:
    """The swarm is told, and believes it as little as any other report."""
    connection: Any = model._ensure_connection()
    reports: Sequence[FailureReport] = ()
    while not reports:
        time.sleep(0.1)
        fetching = connection.swarm.notices.fetch(FailureReport, connection._request.model_id)
        reports = model._loop.run(fetching)
    (report,) = reports
    assert [(each.peer, each.kind) for each in report.failures] == [(liar, "wrong")]


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("others_lie", [False, True])
def test_nodes_audit_for_a_client_without_weights(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_parts: bool,
    others_lie: bool,
) -> None:
    """A liar is named where it repeats its lie, by one block that the client computes, or where it
    does not. One that audits and lies is named, too: the honest node is not.
    """
    first, last = Span(0, 3), Span(3, BLOCKS)
    lie(monkeypatch, last, scale, in_parts=in_parts)
    monkeypatch.setattr(auditor, "missing_bytes", lambda *_: 10**6)
    with (
        in_process_swarm(llama, [first, last, last], tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        connection: Any = model._ensure_connection()
        liar, honest = (peer_of(tmp_path / f"node-{number}.key") for number in (1, 2))
        avoided = liar if others_lie else honest
        connection._planner.barred = {avoided}
        holders = NodeRecomputation.find_holders

        async def find_holders(self: NodeRecomputation, work: HopWork) -> list[PeerId]:
            connection._planner.barred = set()
            return await holders(self, work)

        monkeypatch.setattr(NodeRecomputation, "find_holders", find_holders)
        wrong = generate_once(model, random_ids(1, 8))
        assert (None if wrong is None else wrong.peer) == (None if others_lie else liar)
        model.close()
        # No other node has the first blocks.
        found = audit_outcomes(model)
        assert found == {"failed": 1, "not audited": 2 if others_lie else 1}
        assert connection._auditor.history.barred.keys() & {liar, honest} == {liar}


def test_a_star_is_not_shown_to_other_nodes_unasked(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor, "missing_bytes", lambda *_: 10**6)
    spans = thirds(BLOCKS) * 2
    with in_process_swarm(llama, spans, tmp_path) as addresses:
        for asked, expected in (("auto", "not audited"), ("nodes", "passed")):
            with joined(llama, addresses, "star", audit=1.0, auditors=asked) as model:
                model.generate(random_ids(1, 8), **OPTIONS)
                model.close()
                assert audit_outcomes(model) == {expected: 3}


BEFORE_SEALS = (1, 6)


@pytest.mark.parametrize("route", ROUTES)
def test_nodes_of_a_version_before_seals_are_used_and_not_audited(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: RouteName
) -> None:
    def opened_before(**fields: Any) -> Opened:
        return Opened(**fields | {"version": BEFORE_SEALS, "nonce": b"", "computation": None})

    monkeypatch.setattr(session_server, "Opened", opened_before)
    prompt = random_ids(1, 8)
    with (
        in_process_swarm(llama, thirds(BLOCKS), tmp_path) as addresses,
        joined(llama, addresses, route, audit=1.0) as model,
    ):
        tokens = model.generate(prompt, **OPTIONS)
        model.close()
        assert audit_outcomes(model) == {"not audited": 3}
    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


@pytest.mark.parametrize("route", ROUTES)
def test_for_clients_of_a_version_before_seals_nothing_is_hashed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: RouteName
) -> None:
    def hash_nothing(*_: Any) -> None:
        raise AssertionError("a seal is made")

    monkeypatch.setattr(hop_opening, "VERSION", BEFORE_SEALS)
    monkeypatch.setattr(sealing, "SessionSeals", hash_nothing)
    prompt = random_ids(1, 8)
    with (
        in_process_swarm(llama, thirds(BLOCKS), tmp_path) as addresses,
        joined(llama, addresses, route) as model,
    ):
        tokens = model.generate(prompt, **OPTIONS)
    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_newcomer_that_always_lies_is_found_within_29_sessions(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six nodes one lies, and says that it is fast, so that it is used. Draws of 10 % find it in
    95 % of 40 runs; then the tokens are those of transformers.
    """
    spans = thirds(BLOCKS)
    lie(monkeypatch, spans[1], scale)
    boast(monkeypatch)
    # Nodes report it once it is found, and clients leave it: to each run it is new.
    monkeypatch.setattr(ReputationView, "blames", lambda *_: {})
    prompt, sessions = random_ids(1, 8), []
    with in_process_swarm(llama, spans * 2, tmp_path) as addresses:
        liar = peer_of(tmp_path / "node-1.key")
        for seed in range(40):
            with joined(llama, addresses, "chain", audit=0.01) as model:
                sessions.append(_sessions_until_found(model, prompt, liar, seed))
                tokens = model.generate(prompt, **OPTIONS)
                if sessions[-1] is not None:
                    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)
    found = [count for count in sessions if count is not None]
    assert len(found) >= 34, sessions


def _sessions_until_found(
    model: DistributedModelForCausalLM, prompt: torch.Tensor, liar: PeerId, seed: int
) -> int | None:
    """Sessions over the liar until it is barred; None if that takes more than 29."""
    connection: Any = model._ensure_connection()
    own = connection._auditor
    own.history, own._rng = AuditHistory(None), random.Random(seed)
    connection._planner.barred = own.history.barred
    count = 0
    while count < 29:
        with (
            suppress(WrongActivationsError),
            model.inference_session(max_length=16) as session,
        ):
            count += liar in {hop.peer_id for hop in session.hops}
            model.generate(prompt, session=session, max_new_tokens=4, do_sample=False)
        while own._tasks:
            time.sleep(0.01)
        if own.history.barred:
            assert list(own.history.barred) == [liar]
            return count
    return None


@pytest.mark.parametrize("auditors", ["client", "nodes"])
def test_bounds_that_are_too_narrow_blame_no_honest_node(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auditors: str
) -> None:
    """Those of another model may be: larger ones round otherwise."""
    narrow = Threshold(1e-9, 1e-9, 1e-9, 1)
    kind = ComputationKind("llama", "float32", "none", "cpu")
    monkeypatch.setattr(comparison, "_load_thresholds", lambda _: {kind: {BLOCKS: narrow}})
    spans = [Span(0, 3), Span(3, BLOCKS)] * 2
    with (
        in_process_swarm(llama, spans, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0, auditors=auditors) as model,
    ):
        model.generate(random_ids(1, 40), **OPTIONS)
        model.close()
        assert audit_outcomes(model) == {"not audited": 2}
