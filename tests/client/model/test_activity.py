"""What sessions do, as others are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.client.model.activity import MAX_ENDED_SESSIONS, MAX_FAILOVERS, ActivityTracker
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.session.base import Failover
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chains import Hop
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS
from tests.swarms import daemons, thirds

MODEL = ModelId("tiny@0")
HOPS = (Hop(PeerId("a"), Span(0, 6)),)


class Scripted:
    """As much of a session as is looked at."""

    def __init__(self) -> None:
        self.hops = HOPS
        self.failovers: tuple[Failover, ...] = ()


def scripted() -> Any:
    return Scripted()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_session_waits_reads_and_answers() -> None:
    clock = Clock()
    book = ActivityTracker(clock)
    with book.track_session(MODEL, prompt_tokens=7) as running:
        (seen,) = book.sessions()
        assert (seen.state, seen.hops, seen.prompt_tokens) == ("waiting", (), 7)
        assert abs(seen.began_at - time.time()) < 5
        running.mark_opened(scripted())
        (seen,) = book.sessions()
        assert (seen.state, seen.hops, seen.tokens_per_s) == ("prefill", HOPS, 0.0)
        running.mark_prompt_read()
        for _ in range(40):
            clock.now += 0.1
            running.add_tokens(2)
        (seen,) = book.sessions()
        assert (seen.state, seen.generated_tokens) == ("decode", 80)
        assert seen.tokens_per_s == pytest.approx(20, rel=0.05)
        with book.track_session(MODEL, prompt_tokens=1):
            ids = [one.id for one in book.sessions()]
            assert ids[0] == running.id != ids[1]
    assert book.sessions() == []


def test_a_session_that_is_over_is_told_with_the_chain_that_it_had() -> None:
    book, session = ActivityTracker(), scripted()
    with book.track_session(MODEL, prompt_tokens=1) as running:
        running.mark_opened(session)
        running.mark_prompt_read()
        running.add_tokens(3)
        session.hops = ()  # closed
        assert book.ended_sessions() == ()
    (seen,) = book.ended_sessions()
    assert (seen.hops, seen.generated_tokens) == (HOPS, 3)
    assert seen.ended_at is not None
    assert seen.ended_at >= seen.began_at
    for _ in range(MAX_ENDED_SESSIONS):
        with book.track_session(MODEL, prompt_tokens=1):
            pass
    assert len(book.ended_sessions()) == MAX_ENDED_SESSIONS
    assert seen not in book.ended_sessions()


def test_the_rate_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    book = ActivityTracker(clock)
    with book.track_session(MODEL, prompt_tokens=1) as running:
        running.mark_prompt_read()
        for pause_s in [0.01] * 1000 + [0.5] * 20:
            clock.now += pause_s
            running.add_tokens(1)
        assert book.sessions()[0].tokens_per_s == pytest.approx(2, rel=0.3)
        clock.now += 100
        assert book.sessions()[0].tokens_per_s < 0.2


def test_failovers_are_kept_when_their_session_has_ended() -> None:
    book, session = ActivityTracker(), scripted()
    with book.track_session(MODEL, prompt_tokens=1) as running:
        running.mark_opened(session)
        session.failovers = (Failover(5.0, (PeerId("b"),), 12.5),)
        assert book.sessions()[0].failovers == 1
        (seen,) = book.failovers()
        assert (seen.session_id, seen.lost, seen.took_ms) == (running.id, (PeerId("b"),), 12.5)
    assert book.failovers() == [seen]
    for at in range(MAX_FAILOVERS + 5):
        with book.track_session(MODEL, prompt_tokens=1) as running:
            session = scripted()
            session.failovers = (Failover(10.0 + at, (), 1.0),)
            running.mark_opened(session)
    assert [one.at for one in book.failovers()][:1] == [15.0]
    assert len(book.failovers()) == MAX_FAILOVERS


@pytest.mark.slow
def test_a_killed_node_is_named_with_the_time_it_took(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    spans = thirds(BLOCKS)
    with daemons(tiny("llama"), tmp_path) as swarm:
        nodes = swarm.start_all([*spans, spans[1]])
        book = ActivityTracker()
        with (
            AutoDistributedModelForCausalLM.from_pretrained(
                tiny("llama"), initial_peers=swarm.addresses, dtype=torch.float32
            ) as model,
            book.track_session(MODEL, prompt_tokens=4) as running,
            model.inference_session(32) as session,
        ):
            running.mark_opened(session)
            session.step(random_ids(1, 4))
            used = session.hops[1].peer_id
            swarm.kill(next(node for node in nodes if node.peer_id == used))
            session.step(random_ids(1, 4))
            assert book.sessions()[0].hops[1].peer_id != used
        (failover,) = book.failovers()
    assert failover.lost == (used,)
    assert 0 < failover.took_ms < 30_000
    assert abs(failover.at - time.time()) < 60
