"""A node from its first record to its withdrawal, in this process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nesa_node.core.ids import Span
from nesa_node.core.settings.models import NodeConfig, PeerConfig
from nesa_node.server.node.daemon import run_bootstrap, serve_node
from tests.cli.tiny import BLOCKS, write_tiny_model
from tests.swarm.local_swarm import LOOPBACK, local_swarm


async def test_a_node_that_is_stopped_is_gone_at_once(tmp_path: Path) -> None:
    ready, stopping = tmp_path / "ready.json", asyncio.Event()
    async with local_swarm(tmp_path, 1) as (member,):
        config = NodeConfig.model_validate(
            {
                "model": str(write_tiny_model(tmp_path / "small")),
                "block_indices": Span(0, BLOCKS),
                "initial_peers": member.transport.addresses,
                "host_maddrs": LOOPBACK,
                "identity_path": tmp_path / "node.key",
                "ready_file": ready,
                "torch_dtype": "float32",
                "device": "cpu",
                "attn_cache_tokens": 1024,
                "drain_timeout_s": 2,
            }
        )
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(serve_node(config, stopping))
            while not (ready.exists() or serving.done()):  # noqa: ASYNC110  # a file
                await asyncio.sleep(0.05)
            assert [record.state for record in await member.directory.fetch_all()] == ["serving"]
            stopping.set()
        assert not await member.directory.fetch_all()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_daemon_is_stopped_while_it_waits_for_silent_peers(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining, left = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def never_answers(*_: object) -> AsyncIterator[None]:
        joining.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            left.set()

    monkeypatch.setattr("nesa_node.server.node.daemon._open_swarm", never_answers)
    config = PeerConfig(identity_path=tmp_path / "node.key")
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(run_bootstrap(config))
        await joining.wait()
        os.kill(os.getpid(), number)
    assert left.is_set()
