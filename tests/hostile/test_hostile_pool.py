"""Strangers and hostile orchestrators in a pool, over a real DHT: nothing is loaded unasked."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.ids import PeerId
from nesa_node.core.settings.models import OrchestratorConfig
from nesa_node.server.pool.builder import PoolBuilder
from nesa_node.swarm.dht.pool_notices import (
    MAX_REQUESTS,
    POOL,
    AssignedSpan,
    BuildRequest,
    MachineAssignment,
    Offer,
    WantedSwarm,
    assignment_topic,
)
from nesa_node.swarm.dht.rpc import PROTOCOL_PREFIX, CallBudget
from nesa_node.swarm.dht.sealing import notice_key, seal_statement
from nesa_node.swarm.dht.validator import dht_id
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.hivemind_imports import MSGPackSerializer, dht_pb2
from nesa_node.swarm.p2p.identity import Identity
from tests.pool.machines import Pool, open_pool
from tests.swarm.local_swarm import LOOPBACK, dht_node, local_swarm
from tests.swarm.notice_fields import make_notice

REQUESTS, AT_ONCE = 10_000, 50
MAX_GROWTH_BYTES = 30 << 20
MAX_ROUND_S = 5.0


def requests_of_strangers(folder: Path, count: int) -> dht_pb2.StoreRequest:
    """Requests for a model by `count` identities that exist for this alone."""
    request = dht_pb2.StoreRequest()
    for _ in range(count):
        stranger = Identity.ephemeral(folder)
        notice = make_notice(BuildRequest, stranger, time.time(), model_id=POOL)
        request.keys.append(dht_id(notice_key(BuildRequest, POOL)))
        request.subkeys.append(MSGPackSerializer.dumps(notice.peer_id))
        request.values.append(MSGPackSerializer.dumps(seal_statement(notice, stranger)))
        request.expiration_time.append(notice.expires_at)
        request.in_cache.append(False)
    return request


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ten_thousand_requests_of_strangers_build_nothing(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as (boss, other, attacker):
        for member in (boss, other):
            # Budgets of callers have tests of their own.
            dht_node(member)._rpc._budget = CallBudget(lambda: 0.0, burst_units=1e9)
        builder = PoolBuilder(OrchestratorConfig(), boss)
        own = WantedSwarm(model="org/own", until=time.time() + 600)
        await boss.notices.publish(BuildRequest, POOL, ttl_s=600, swarms=(own,))
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(REQUESTS // AT_ONCE):
            sent = requests_of_strangers(tmp_path, AT_ONCE).SerializeToString()
            for target in (boss, other):
                await attacker.transport.unary.call(
                    target.identity.peer_id, PROTOCOL_PREFIX + "rpc_store", sent
                )
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown < MAX_GROWTH_BYTES
        for member in (boss, other):
            assert len(await member.notices.fetch(BuildRequest, POOL)) <= MAX_REQUESTS + 1
        started = time.monotonic()
        round_ = await builder._read()
        assert time.monotonic() - started < MAX_ROUND_S
        assert list(round_.wanted) == ["org/own"]


@pytest.fixture
def pool(tmp_path: Path, tiny: Callable[[str], Path]) -> Any:
    """One machine that obeys an orchestrator, and loads two models in an hour."""
    boss = Identity.ephemeral(tmp_path)
    for number in range(8):
        shutil.copytree(tiny("llama"), tmp_path / "cache" / f"model-{number}")
    limits = ["--allow-orchestrators", boss.peer_id, "--pool-loads-per-hour", "2"]
    with open_pool(tmp_path, [limits]) as pool:
        yield pool, boss


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_orchestrator_that_assigns_again_and_again_loads_no_more_than_allowed(
    pool: tuple[Pool, Identity],
) -> None:
    daemons, boss = pool
    ready = json.loads((daemons.folder / "machine-1.json").read_text())
    machine = PeerId(ready["peer_id"])
    async with open_swarm(boss, host_maddrs=LOOPBACK, initial_peers=daemons.addresses) as hostile:
        for epoch, number in enumerate((*range(8), *range(8)), 1):
            span = AssignedSpan(model=f"model-{number % 8}", span=(0, 2), cache_tokens=64)
            await hostile.notices.publish(
                MachineAssignment, assignment_topic(machine), epoch=epoch, ttl_s=600, spans=(span,)
            )
            await asyncio.sleep(5.0)
        [offer] = await hostile.notices.fetch(Offer, POOL)
    log = (daemons.folder / "machine-1.log").read_text()
    started = re.findall(r"assigned_model_started +model=(\S+)", log)
    assert len(started) == 2
    [held] = [each for each in offer.held if each.state == "refused"]
    assert held.reason == "--pool-loads-per-hour: 2 were loaded in this hour"
