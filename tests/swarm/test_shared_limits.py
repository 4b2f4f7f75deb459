"""Limits that all peers share, and what a node that was cut off itself thinks of the others."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.lru_table import LruTable
from nesa_node.swarm.dht.rpc import DhtRpc, _drop_mismatched_neighbours, node_id_of
from nesa_node.swarm.p2p.control import MAX_UNARY_MESSAGE_BYTES, UnaryCalls
from nesa_node.swarm.p2p.hivemind_imports import dht_pb2
from nesa_node.swarm.p2p.link_measurements import PING_PROTOCOL, answer_pings
from nesa_node.swarm.p2p.pipe import Pipe
from nesa_node.swarm.p2p.tasks import TaskSet
from tests.swarm.local_swarm import eventually, local_swarm
from tests.swarm.pipes import pipe_pair
from tests.swarm.record_fields import MODEL_ID, make_status
from tests.turns import turns_of_the_loop

MODEL = ModelId(MODEL_ID)


async def test_streams_of_all_peers_take_half_of_the_files_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_swarm(tmp_path, 4) as (server, *peers):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (5, 5))
        addresses = server.transport.addresses
        opened = [
            (await peer.transport.open_stream(server.identity.peer_id, PING_PROTOCOL, addresses))[0]
            for peer in peers
        ]

        async def is_served(pipe: Pipe) -> bool:
            try:
                pipe.write(bytes(8))
                return await pipe.readexactly(8) == bytes(8)
            except (asyncio.IncompleteReadError, OSError):
                return False

        assert sorted([await is_served(pipe) for pipe in opened]) == [False, True, True]
        for pipe in opened:
            pipe.close()


async def test_unanswered_calls_of_all_peers_hold_64_mib_at_most() -> None:
    held = asyncio.Event()
    begun = 0

    async def hold(_: PeerId, __: bytes) -> bytes:
        nonlocal begun
        begun += 1
        await held.wait()
        return b""

    tasks = TaskSet()
    async with pipe_pair() as (pipe, _):
        calls = UnaryCalls(pipe, tasks)
        calls._handlers["/hold"] = hold
        data = bytes(MAX_UNARY_MESSAGE_BYTES)
        for number in range(20):
            request = SimpleNamespace(proto="/hold", peer=b"peer%d" % number, data=data)
            calls._dispatch(b"%d" % number, request)
        await asyncio.sleep(0)
        assert begun * MAX_UNARY_MESSAGE_BYTES == 64 * 1024**2
        held.set()

        async def is_idle() -> bool:
            return not len(tasks)

        await eventually(is_idle)
        assert calls._incoming_bytes.total() == 0


async def test_one_peer_holds_an_eighth_of_the_unary_calls_at_most() -> None:
    held = asyncio.Event()
    begun: Counter[PeerId] = Counter()

    async def hold(peer: PeerId, __: bytes) -> bytes:
        begun[peer] += 1
        await held.wait()
        return b""

    tasks = TaskSet()
    async with pipe_pair() as (pipe, _):
        calls = UnaryCalls(pipe, tasks)
        calls._handlers["/hold"] = hold
        for peer in b"greedy", b"late":
            for number in range(500 if peer == b"greedy" else 20):
                request = SimpleNamespace(proto="/hold", peer=peer, data=b"")
                calls._dispatch(b"%d" % number, request)
        await asyncio.sleep(0)
        assert sorted(begun.values()) == [20, 64]
        held.set()

        async def is_idle() -> bool:
            return not len(tasks)

        await eventually(is_idle)
        assert not calls._num_incoming_calls


async def test_records_that_find_no_room_are_tried_in_turns() -> None:
    peer: Any = object.__new__(DhtRpc)
    tried: list[str] = []
    items = [(f"p{number}", b"record", 0.0) for number in range(800)]

    async def check_all(_: bytes, items: list[tuple[str, bytes, float]]) -> Any:
        return items

    peer._check_all = check_all

    def refuse(_: object, subkey: str, *__: object) -> bool:
        tried.append(subkey)
        return False

    peer.protocol = SimpleNamespace(storage=SimpleNamespace(store_subkey=refuse))
    async with turns_of_the_loop() as turns:
        assert await peer._store_valid(bytes(20), items) == 0
        assert len(tried) == 800
        assert turns[0] >= 800 // 16 - 1


async def test_stream_of_pings_that_says_nothing_is_left_after_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeout, waited = asyncio.timeout, []

    def hurried(delay_s: float) -> asyncio.Timeout:
        waited.append(delay_s)
        return timeout(0.01)

    monkeypatch.setattr(asyncio, "timeout", hurried)
    async with pipe_pair() as (pipe, _):
        await answer_pings(PeerId("silent"), pipe, pipe)
    assert waited == [10.0]


def test_a_flood_pushes_out_what_was_not_renewed_first() -> None:
    latest = LruTable[str, int](3)
    for key in "abc":
        latest.put(key, 1)
    latest.put("a", 2)
    latest.put("d", 1)
    assert dict(latest) == {"c": 1, "a": 2, "d": 1}


async def test_ctrl_c_in_a_terminal_does_not_reach_libp2ps_daemon(tmp_path: Path) -> None:
    """It must live until the node has withdrawn its record."""
    async with local_swarm(tmp_path, 1) as (node,):
        assert os.getpgid(node.transport.daemon_pid) != os.getpgid(0)


@pytest.mark.parametrize("is_cut_off", [True, False])
async def test_only_a_node_that_hears_others_takes_silent_ones_for_failed(
    tmp_path: Path, is_cut_off: bool
) -> None:
    now = [time.time()]
    async with local_swarm(tmp_path, 3, clock=lambda: now[0]) as (reader, silent, other):
        for member in (silent, other):
            await member.directory.publish(make_status())
        await reader.directory.fetch(MODEL)
        assert len(reader.directory.snapshot(MODEL).nodes) == 2
        now[0] += 600
        if not is_cut_off:
            await other.directory.publish(make_status())
        await reader.directory.fetch(MODEL)
        histories = cast(Any, reader.directory)._reputation.histories
        assert histories.counts(silent.identity.peer_id).failures == (0 if is_cut_off else 1)


def test_twenty_neighbours_of_an_answer_count() -> None:
    """Each may be asked next."""
    peers = [bytes([0, 36, 8, 1, 18, 32]) + bytes(31) + bytes([number]) for number in range(50)]
    result = dht_pb2.FindResult(
        nearest_node_ids=[node_id_of(peer) for peer in peers], nearest_peer_ids=peers
    )
    _drop_mismatched_neighbours(result)
    assert list(result.nearest_peer_ids) == peers[:20]
    assert list(result.nearest_node_ids) == [node_id_of(peer) for peer in peers[:20]]
