"""What is promised to whom."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nesa_node.core.errors import BusyError, ProtocolError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.cache.pages import PAGE_TOKENS, PagePool
from nesa_node.engine.weights.families import CacheHeads
from nesa_node.server.node.served_span import make_limits
from nesa_node.server.session.admission import RETRY_AFTER_RANGE_S, Admission, AdmissionLimits

A, B = PeerId("a"), PeerId("b")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(
    pages: int = 10,
    *,
    peer_pages: int = 100,
    sessions: int = 5,
    hidden: int = 1_000_000,
    peer_hidden: int = 1_000_000,
    token_bytes: int = 1,
    reserve: int = 0,
    clock: Clock | None = None,
) -> Admission:
    pool = PagePool(
        Span(0, 1),
        CacheHeads(num_kv_heads=1, head_dim=2),
        tokens=pages * PAGE_TOKENS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    limits = AdmissionLimits(
        hidden_bytes=hidden,
        hidden_bytes_per_peer=peer_hidden,
        hidden_bytes_per_token=token_bytes,
        hidden_reserve_bytes=reserve,
        sessions_per_peer=sessions,
        cache_tokens_per_peer=peer_pages * PAGE_TOKENS,
    )
    return Admission(limits, pool, clock=clock or Clock())


def enter(stack: ExitStack, made: Admission, peer: PeerId, pages: int) -> object:
    return stack.enter_context(made.admit_session(peer, rows=pages, max_tokens=PAGE_TOKENS))


def test_every_row_is_promised_whole_pages_and_all_come_back() -> None:
    made = admission()
    with made.admit_session(A, rows=3, max_tokens=PAGE_TOKENS + 1) as place:
        assert place.reservation.pages == 6
        assert made.free_tokens == 4 * PAGE_TOKENS
        assert made.sessions == 1
    assert made.free_tokens == made.total_tokens == 10 * PAGE_TOKENS
    assert made.sessions == 0


def test_who_finds_no_room_is_busy_and_who_never_could_is_told_so() -> None:
    made = admission(10, peer_pages=6)
    with ExitStack() as stack:
        enter(stack, made, A, 6)
        with pytest.raises(BusyError, match="quota of a"):
            enter(stack, made, A, 1)
        with pytest.raises(BusyError, match="5 pages asked for, 4 are free"):
            enter(stack, made, B, 5)
        enter(stack, made, B, 4)
        with pytest.raises(ProtocolError, match=f"at most {6 * PAGE_TOKENS}") as refused:
            enter(stack, made, B, 7)
        assert refused.value.code == "too_large"
        assert made.free_tokens == 0
    assert made.free_tokens == made.total_tokens


def test_a_peer_has_so_many_sessions_and_hidden_states_have_room() -> None:
    made = admission(100, sessions=2, hidden=1000)
    with ExitStack() as stack:
        enter(stack, made, A, 1)
        enter(stack, made, A, 1)
        with pytest.raises(BusyError, match="2 sessions"):
            enter(stack, made, A, 1)
        enter(stack, made, B, 20)
        with pytest.raises(BusyError, match="hidden states"):
            enter(stack, made, B, 20)
        assert made.free_tokens == 1000 - 22 * PAGE_TOKENS
    assert made.free_tokens == made.max_tokens == 1000
    with ExitStack() as stack:
        enter(stack, made, B, 20)


def test_a_peer_gets_its_share_for_hidden_states_and_no_more() -> None:
    made = admission(100, hidden=1000, peer_hidden=20 * PAGE_TOKENS)
    with ExitStack() as stack:
        enter(stack, made, A, 10)
        enter(stack, made, A, 10)
        with pytest.raises(BusyError, match=r"quota of a .* hidden states"):
            enter(stack, made, A, 1)
        enter(stack, made, B, 10)
        with pytest.raises(ProtocolError, match=f"at most {20 * PAGE_TOKENS};") as refused:
            enter(stack, made, B, 20 + 1)
        assert refused.value.code == "too_large"
    with ExitStack() as stack:
        enter(stack, made, A, 20)


def test_two_identities_of_a_stranger_leave_room_for_four_peers_that_keep_little() -> None:
    made = admission(100, hidden=1000, peer_hidden=20 * PAGE_TOKENS, reserve=400)
    with ExitStack() as stack:
        enter(stack, made, A, 20)
        enter(stack, made, B, 11)
        with pytest.raises(BusyError, match="no room for hidden states"):
            enter(stack, made, B, 2)
        for name in "cdef":
            enter(stack, made, PeerId(name), 3)
            with pytest.raises(BusyError, match="no room for hidden states"):
                enter(stack, made, PeerId(name), 1)
        with pytest.raises(BusyError, match="no room for hidden states"):
            enter(stack, made, PeerId("g"), 3)
        assert made.free_tokens == 0
    assert made._hidden_bytes == 0


def test_a_node_keeps_a_reserve_for_newcomers() -> None:
    served: Any = SimpleNamespace(
        full_cache_bytes_per_token=2 * 8 * 128 * 2, hidden_size=8192, context_length=32_768
    )
    limits = make_limits(NodeConfig(model="m"), served, 65_536)
    assert 4 * limits.hidden_reserve_bytes == limits.hidden_bytes
    pool = admission(pages=2048).pool
    made = Admission(limits, pool)
    with ExitStack() as stack:
        for identity in "ab":
            with suppress(BusyError):
                for _ in range(1000):
                    enter(stack, made, PeerId(identity), 8)
        enter(stack, made, PeerId("honest"), 8)


@pytest.mark.parametrize("context_length", [0, 1024, 131_072])
@pytest.mark.parametrize("blocks", [1, 4])
def test_no_peer_takes_all_of_a_nodes_room_for_hidden_states(
    context_length: int, blocks: int
) -> None:
    tokens, heads, dim, hidden = 65_536, 8, 128, 8192
    served: Any = SimpleNamespace(
        full_cache_bytes_per_token=2 * heads * dim * 2 * blocks,
        hidden_size=hidden,
        context_length=context_length,
    )
    limits = make_limits(NodeConfig(model="m"), served, tokens)
    quarter = limits.hidden_bytes // 4
    assert 2 * quarter <= limits.hidden_bytes_per_peer <= 3 * quarter
    if 0 < context_length <= 4096:
        assert limits.hidden_bytes_per_peer >= context_length * hidden * 4


def test_beyond_its_promise_a_session_gets_what_is_free() -> None:
    made = admission(4, peer_pages=3, hidden=2000, peer_hidden=1000, token_bytes=10)
    with made.admit_session(A, rows=1, max_tokens=40) as place:
        place.grow_row(40, 64)
        assert place.reservation.pages == 2
        place.grow_row(64, 65)
        assert place.reservation.pages == 3
        with pytest.raises(ProtocolError, match="quota") as refused:
            place.grow_row(65, 100)
        assert refused.value.code == "cache_full"
        assert made.free_tokens == PAGE_TOKENS
    assert made.free_tokens == made.total_tokens
    with made.admit_session(A, rows=1, max_tokens=96):
        pass


def test_a_refusal_says_about_when_the_next_session_ends() -> None:
    clock = Clock()
    made = admission(clock=clock)
    for _ in range(40):
        with made.admit_session(A, rows=1, max_tokens=1):
            clock.now += 2.0
    assert made.retry_after_s == pytest.approx(2.0, rel=0.01)
    clock.now += 1e6
    with made.admit_session(A, rows=1, max_tokens=1):
        pass
    assert made.retry_after_s < RETRY_AFTER_RANGE_S[1]
    for _ in range(100):
        with made.admit_session(A, rows=1, max_tokens=1):
            pass
    assert made.retry_after_s == RETRY_AFTER_RANGE_S[0]


def test_where_the_operator_names_peers_no_other_is_served() -> None:
    made = admission()
    made.limits = replace(made.limits, allow=frozenset({A}))
    made.check_peer(A)
    with pytest.raises(ProtocolError, match="does not serve b") as refusal:
        made.check_peer(B)
    assert refusal.value.code == "not_allowed"
    made.limits = replace(made.limits, deny=frozenset({A}))
    with pytest.raises(ProtocolError, match="does not serve a"):
        made.check_peer(A)


def test_a_peer_holds_a_bounded_number_of_streams() -> None:
    made = admission()
    with ExitStack() as stack:
        for _ in range(512):
            stack.enter_context(made.admit_stream(A))
        with pytest.raises(BusyError, match="too many streams"):
            stack.enter_context(made.admit_stream(A))
        stack.enter_context(made.admit_stream(B))
    with made.admit_stream(A):
        pass
