"""How often the gateway asks the DHT."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from nesa_node.api.models import discovery as looking
from nesa_node.api.models.discovery import DhtModelDirectory
from nesa_node.topology.snapshot import Snapshot
from tests.api.scripted import MODEL_ID


async def test_requests_that_look_for_blocks_at_the_same_time_share_one_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looking, "MAX_AGE_S", 3600.0)
    fetch = AsyncMock(return_value=Snapshot(MODEL_ID, 6, (), taken_at=0.0))
    directory: Any = SimpleNamespace(fetch=fetch)
    look = DhtModelDirectory(directory, directory)
    await asyncio.gather(*(look.fetch(MODEL_ID) for _ in range(20)))
    assert fetch.await_count == 1
    monkeypatch.setattr(looking, "MAX_AGE_S", 0.0)
    await look.fetch(MODEL_ID)
    assert fetch.await_count == 2
