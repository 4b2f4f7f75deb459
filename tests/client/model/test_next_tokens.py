"""Sessions that come together have their next tokens chosen together, each its own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.client.model.head import MAX_SHARED_TOKENS, NextTokenBatcher


@dataclass
class Ends:
    """Token i follows where value i is the largest; NaN is an error. A reading takes `takes_s`."""

    takes_s: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def head(self, hidden_TD: Tensor) -> Tensor:
        self.sizes.append(len(hidden_TD))
        time.sleep(self.takes_s)
        if bool(hidden_TD.isnan().any()):
            raise ValueError("NaN")
        return hidden_TD.clone()

    def embed_one_per_row(self, tokens: list[int], positions: list[int]) -> Tensor:
        return torch.tensor([[float(t), float(p)] for t, p in zip(tokens, positions, strict=True)])


def made(ends: Ends) -> NextTokenBatcher:
    return NextTokenBatcher(ends)  # type: ignore[arg-type]


def likes(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([token]), 100).float()


async def test_those_who_come_together_are_read_for_once() -> None:
    ends = Ends(takes_s=0.02)
    next_tokens = made(ends)
    for _ in range(4):
        chosen = await asyncio.gather(
            *(next_tokens.choose_next(likes(token), 5 + token) for token in range(20))
        )
        assert [one.token for one in chosen] == list(range(20))
        for token, one in enumerate(chosen):
            assert one.hidden_1D is not None
            assert one.hidden_1D.tolist() == [[token, 5 + token]]
    assert ends.sizes == [20] * 4


async def test_who_comes_first_waits_for_as_many_as_came_before() -> None:
    ends = Ends(takes_s=0.08)
    next_tokens = made(ends)

    async def later(number: int) -> int:
        await asyncio.sleep(0.005 * number)
        return (await next_tokens.choose_next(likes(number), 0)).token

    for _ in range(4):
        assert await asyncio.gather(*map(later, range(4))) == [0, 1, 2, 3]
    assert ends.sizes[-1] == 4


async def test_one_session_waits_for_nobody() -> None:
    ends = Ends(takes_s=0.2)
    next_tokens = made(ends)
    await next_tokens.choose_next(likes(1), 0)
    began = time.monotonic()
    for _ in range(3):
        await next_tokens.choose_next(likes(1), 0)
    assert ends.sizes == [1] * 4
    assert time.monotonic() - began < 3 * 0.2 * 1.2


async def test_an_error_reaches_only_the_session_whose_it_is() -> None:
    next_tokens = made(Ends())
    bad = torch.full((1, 100), torch.nan)
    calls = [next_tokens.choose_next(hidden_1D, 0) for hidden_1D in (likes(3), bad, likes(4))]
    results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert (results[0].token, results[2].token) == (3, 4)
    assert isinstance(results[1], ValueError)


@pytest.mark.parametrize("begun", [False, True])
async def test_who_is_cancelled_does_not_hold_up_the_others(begun: bool) -> None:
    ends = Ends(takes_s=0.05)
    next_tokens = made(ends)
    tasks = [asyncio.create_task(next_tokens.choose_next(likes(token), 0)) for token in range(3)]
    await asyncio.sleep(0.02 if begun else 0)
    tasks[0].cancel()
    chosen = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(chosen[0], asyncio.CancelledError)
    assert [one.token for one in chosen[1:] if not isinstance(one, BaseException)] == [1, 2]
    assert (await next_tokens.choose_next(likes(9), 0)).token == 9


async def test_banned_tokens_and_last_ones() -> None:
    next_tokens = made(Ends())
    scores = likes(7) + 0.5 * likes(8)
    first, last = await asyncio.gather(
        next_tokens.choose_next(scores, 3, frozenset({7})), next_tokens.choose_next(scores, None)
    )
    assert (first.token, last.token) == (8, 7)
    assert first.hidden_1D is not None
    assert last.hidden_1D is None


async def test_the_logits_of_one_reading_are_bounded() -> None:
    ends = Ends()
    next_tokens = made(ends)
    count = 2 * MAX_SHARED_TOKENS + 1
    chosen = await asyncio.gather(
        *(next_tokens.choose_next(likes(number % 100), 0) for number in range(count))
    )
    assert [one.token for one in chosen] == [number % 100 for number in range(count)]
    assert max(ends.sizes) == MAX_SHARED_TOKENS
