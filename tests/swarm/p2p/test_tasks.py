"""Calls of several peers at once."""

from __future__ import annotations

import asyncio

import pytest

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.swarm.p2p import tasks
from nesa_node.swarm.p2p.tasks import gather_until_first_answer


async def _answer(after_s: float, answer: int | Exception) -> int:
    await asyncio.sleep(after_s)
    if isinstance(answer, Exception):
        raise answer
    return answer


async def test_peers_have_a_moment_once_one_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LATE_ANSWER_GRACE_S", 0.1)
    gone = PeerUnreachableError("gone")
    calls = [_answer(0, gone), _answer(0.02, 2), _answer(0.05, 3), _answer(60, 4)]
    first, second, third, late = await gather_until_first_answer(calls)
    assert (first, second, third) == (gone, 2, 3)
    assert isinstance(late, PeerUnreachableError)
    assert "0.1 s after the first" in str(late)


async def test_what_is_no_silence_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        await gather_until_first_answer([_answer(60, 1), _answer(0, ZeroDivisionError())])
