"""What a client may be told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import AsyncMock

import pytest

from nesa_node.client.routing.request import ConnectionOptions, RouteRequest
from nesa_node.client.session import connection as connection_module
from nesa_node.client.session.base import SessionPrefix
from nesa_node.client.session.connection import RemoteConnection
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId, Span
from nesa_node.core.settings.choices import StrategyName
from nesa_node.routing.strategies import DEFAULT_STRATEGY, STRATEGIES


def test_every_strategy_has_a_name_that_may_be_given() -> None:
    assert set(get_args(StrategyName)) == set(STRATEGIES)
    assert ConnectionOptions().strategy == DEFAULT_STRATEGY


def test_a_strategy_that_there_is_not_is_refused_with_those_there_are() -> None:
    unknown: Any = "cheapest"
    with pytest.raises(ConfigError, match="'cheapest': give exact-latency, "):
        ConnectionOptions(strategy=unknown)


def test_an_audit_scheme_that_there_is_not_is_refused_with_those_there_are() -> None:
    unknown: Any = "md5"
    with pytest.raises(ConfigError, match="no audit scheme 'md5': give relative-l2, jl-32, "):
        ConnectionOptions(audit_scheme=unknown)


@pytest.mark.parametrize(
    ("prompt", "expected"), [(None, (0, 50)), (((1, 2, 3), (4,)), (4, 48)), (((1,) * 90,), (90, 1))]
)
async def test_a_session_knows_the_length_of_its_prompt(
    monkeypatch: pytest.MonkeyPatch,
    prompt: tuple[tuple[int, ...], ...] | None,
    expected: tuple[int, int],
) -> None:
    """What the rows have left of 50 tokens each is for output, at least one token."""
    asked: list[RouteRequest] = []

    def make(swarm: Any, request: RouteRequest, *_: Any, **__: Any) -> Any:
        asked.append(request)
        return SimpleNamespace(open=AsyncMock(), close=AsyncMock())

    monkeypatch.setattr(connection_module, "RemoteSession", make)
    swarm: Any = SimpleNamespace(directory=SimpleNamespace(set_num_blocks=lambda *_: None))
    request = RouteRequest(
        model_id=ModelId("tiny@0"),
        span=Span(0, 4),
        rows=1,
        max_tokens=1,
        hidden_size=4,
        dtype="float32",
    )
    prefix = None
    if prompt is not None:
        prefix = SessionPrefix(salt=b"salt", tokens=prompt, compute_inputs=AsyncMock())
    rows = 1 if prompt is None else len(prompt)
    opening = RemoteConnection(swarm, request, 4).open_session(
        Span(0, 4), rows=rows, max_tokens=50, prefix=prefix
    )
    async with opening:
        assert (asked[0].prompt_tokens, asked[0].output_tokens) == expected
