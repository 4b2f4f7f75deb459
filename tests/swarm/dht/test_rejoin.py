"""Members and clients that lost each other: their network stood still, or calls failed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import ModelId
from nesa_node.swarm.dht import rejoin as rejoining
from nesa_node.swarm.dht.rejoin import DhtRejoiner
from nesa_node.swarm.dht.rpc import CallBudget
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.transport import parse_initial_peers
from tests.swarm.local_swarm import LOOPBACK, dht_node, eventually, local_swarm
from tests.swarm.record_fields import MODEL_ID, make_record, make_status

MODEL = ModelId(MODEL_ID)
TTL_S = 1.5
FROZEN_S = 4.0
"""A call of the DHT is given up after 3 s."""


@pytest.fixture(autouse=True)
def _no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """What returns does not wait for the next look at the initial peers."""
    monkeypatch.setattr(rejoining, "_REJOIN_INTERVAL_S", 3600.0)


@contextmanager
def frozen(swarms: Sequence[Swarm]) -> Iterator[None]:
    pids = [swarm.transport.daemon_pid for swarm in swarms]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def _announce(member: Swarm) -> None:
    while True:
        await member.directory.publish(make_status())
        await asyncio.sleep(TTL_S / 3)


async def _read(client: Swarm) -> None:
    while True:
        await client.directory.fetch(MODEL)
        await asyncio.sleep(0.2)


@asynccontextmanager
async def _announcers_and_client(folder: Path) -> AsyncIterator[tuple[list[Swarm], Swarm]]:
    """Two members whose records live for `TTL_S`, and a client that knows the first."""
    async with local_swarm(folder, 2, record_ttl_s=TTL_S) as members:
        peers = members[0].transport.addresses
        identity = Identity.ephemeral(folder)
        async with open_swarm(identity, initial_peers=peers, listen=False) as client:
            yield members, client


async def _sees(client: Swarm, count: int) -> bool:
    return len((await client.directory.fetch(MODEL)).nodes) == count


async def test_a_client_frozen_for_longer_than_records_live_returns_at_once(
    tmp_path: Path,
) -> None:
    async with _announcers_and_client(tmp_path) as (members, client), asyncio.TaskGroup() as tasks:
        announcing = [tasks.create_task(_announce(member)) for member in members]
        await eventually(lambda: _sees(client, 2))
        with frozen([client]):
            reading = tasks.create_task(_read(client))
            await asyncio.sleep(FROZEN_S)
        await eventually(lambda: _sees(client, 2), timeout_s=3.0)
        for task in (*announcing, reading):
            task.cancel()


async def test_a_client_that_reads_without_pause_is_never_blind_for_long(tmp_path: Path) -> None:
    """Members refuse most of its calls, which is not silence."""
    async with _announcers_and_client(tmp_path) as (members, client), asyncio.TaskGroup() as tasks:
        for member in members:
            # A quarter of what is real, for a busy machine, too.
            budget = CallBudget(lambda: time.monotonic() / 4, burst_units=20.0)
            member.directory._dht_store._node._rpc._budget = budget
        announcing = [tasks.create_task(_announce(member)) for member in members]
        await eventually(lambda: _sees(client, 2))
        started = last_seen = time.monotonic()
        longest = 0.0
        was_refused = False
        while time.monotonic() < started + 3 * TTL_S:
            was_refused = was_refused or len(dht_node(client)._busy_peers) > 0
            assert not client.directory._rejoiner.is_isolated
            if len(await client.directory.fetch_all()) == 2:
                last_seen = time.monotonic()
            longest = max(longest, time.monotonic() - last_seen)
        for task in announcing:
            task.cancel()
        assert was_refused
        assert longest < TTL_S


async def test_members_that_forgot_each_other_meet_again_when_they_publish(
    tmp_path: Path,
) -> None:
    async with local_swarm(tmp_path, 2) as members:
        joining = [task for task in asyncio.all_tasks() if task.get_name() == "dht-operation"]
        await asyncio.gather(*joining)
        for member in members:
            table = dht_node(member).protocol.routing_table
            for node_id in list(table.uid_to_peer_id):
                del table[node_id]
        for member in members:
            await member.directory.publish(make_status())
        async with open_swarm(
            Identity.ephemeral(tmp_path),
            host_maddrs=LOOPBACK,
            initial_peers=members[0].transport.addresses,
        ) as newcomer:
            await eventually(lambda: _sees(newcomer, 2), timeout_s=6.0)


async def test_a_node_whose_members_are_gone_waits_for_them_once_and_leaves_at_once(
    tmp_path: Path,
) -> None:
    async with local_swarm(tmp_path, 2) as (first, other):
        await other.directory.publish(make_status())
        attempts: list[object] = []

        async def unanswered(*arguments: object) -> None:
            attempts.append(arguments)
            await asyncio.sleep(0.2)
            raise PeerUnreachableError("it is switched off")

        transport: Any = other.transport
        transport.connect = unanswered
        table = dht_node(other).protocol.routing_table
        for node_id in list(table.uid_to_peer_id):
            del table[node_id]
        for _ in range(3):
            await other.directory.fetch(MODEL)
        assert len(attempts) == 1
        await asyncio.sleep(rejoining._FAILED_ATTEMPT_PAUSE_S)
        await other.directory.fetch(MODEL)
        (attempt,) = _attempts_under_way()
        assert not await attempt
        assert len(attempts) == 2
        await other.directory.withdraw()
        assert not _attempts_under_way()
        assert first.transport.peer_id in str(attempts[0])


async def test_nodes_that_were_seen_first_are_dialled_and_strangers_with_newer_records_by_lot(
    tmp_path: Path,
) -> None:
    identity, now = Identity.ephemeral(tmp_path), time.time()
    own = make_record(identity, now)
    records = [
        own.model_copy(update={"peer_id": f"{own.peer_id[:-3]}{number:03}", "issued_at": now + 1})
        for number in range(111, 200)
        if "0" not in str(number)
    ]
    dialled: list[str] = []

    async def unanswered(name: str, *_: object) -> None:
        dialled.append(name)
        raise PeerUnreachableError("it is switched off")

    transport: Any = SimpleNamespace(peer_id=identity.peer_id, dial=unanswered)
    table = SimpleNamespace(uid_to_peer_id={})
    node: Any = SimpleNamespace(protocol=SimpleNamespace(routing_table=table))
    first = [str(record.peer_id) for record in records[:4]]
    drawn = set()
    for _ in range(5):
        dialled.clear()
        assert not await DhtRejoiner(node, transport, {}).start_attempt(records)
        assert dialled[:4] == first
        assert len(set(dialled)) == 8
        drawn |= set(dialled[4:])
    assert len(drawn) > 4


async def test_an_attempt_that_is_cancelled_at_once_has_begun_no_dial(tmp_path: Path) -> None:
    """A coroutine that is made and never awaited would be warned of, and fail this test."""
    identity = Identity.ephemeral(tmp_path)

    async def unexpected(*_: object) -> None:
        pytest.fail("it was dialled")

    transport: Any = SimpleNamespace(peer_id="me", dial=unexpected, connect=unexpected)
    node: Any = SimpleNamespace(protocol=SimpleNamespace(routing_table=()))
    peer = f"/ip4/127.0.0.1/tcp/9/p2p/{identity.peer_id}"
    attempt = DhtRejoiner(
        node, transport, parse_initial_peers([peer], transport.peer_id)
    ).start_attempt([make_record(identity, time.time())])
    asyncio.get_running_loop().call_soon(attempt.cancel)
    await asyncio.wait({attempt})
    assert attempt.cancelled()
    del attempt
    gc.collect()


def _attempts_under_way() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "dht-rejoin-now"]
