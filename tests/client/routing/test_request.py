"""What a client may be told."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.choices import StrategyName
from nesa_node.routing.strategies import DEFAULT_STRATEGY, STRATEGIES


def test_every_strategy_has_a_name_that_may_be_given() -> None:
    assert set(get_args(StrategyName)) == set(STRATEGIES)
    assert ConnectionOptions().strategy == DEFAULT_STRATEGY


def test_a_strategy_that_there_is_not_is_refused_with_those_there_are() -> None:
    unknown: Any = "cheapest"
    with pytest.raises(ConfigError, match="'cheapest': give exact-latency, "):
        ConnectionOptions(strategy=unknown)
