"""Small packets that once ended a process, stalled it or filled its memory."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nesa_node.core.errors import ProtocolError, RemoteError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht.member import MAX_WAITING_NEWCOMERS
from nesa_node.swarm.dht.message_codec import (
    MAX_RECORDS_PER_CALL,
    load_value,
    pack_records,
    parse_message,
    unpack_records,
)
from nesa_node.swarm.dht.records import model_key
from nesa_node.swarm.dht.rpc import PROTOCOL_PREFIX, CallBudget, node_id_of
from nesa_node.swarm.dht.validator import dht_id
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.control import MAX_UNARY_MESSAGE_BYTES
from nesa_node.swarm.p2p.hivemind_imports import (
    DHTID,
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
    dht_pb2,
)
from nesa_node.swarm.p2p.identity import Identity, base58_decode
from tests.swarm.local_swarm import LOOPBACK, dht_node, eventually, local_swarm
from tests.swarm.record_fields import MODEL_ID, make_status

MODEL = ModelId(MODEL_ID)
KEY = dht_id(model_key(MODEL))
SLOW_S = 0.1


def nested(depth: int) -> bytes:
    """Tuples within tuples, as hivemind writes them: seven bytes for each."""
    data = b"\xc0"
    for _ in range(depth):
        data = b"\xc9" + struct.pack(">Ib", len(data) + 1, 0x40) + b"\x91" + data
    return data


def crowded(num_items: int) -> bytes:
    items = b"".join(
        b"\x93" + msgspec.msgpack.encode(str(index % 1000)) + b"\xc4\x00\xca\x7f\x00\x00\x00"
        for index in range(num_items)
    )
    body = b"\x93\xc0\xca\x7f\x00\x00\x00\xdd" + struct.pack(">I", num_items) + items
    return b"\xc9" + struct.pack(">Ib", len(body), 0x50) + body


def store_request(packed: bytes) -> bytes:
    request = dht_pb2.StoreRequest(
        keys=[KEY],
        subkeys=[b""],
        values=[packed],
        expiration_time=[time.time() + 60],
        in_cache=[False],
    )
    return bytes(request.SerializeToString())


async def call(source: Swarm, target: PeerId, method: str, data: bytes) -> bytes:
    return await source.transport.unary.call(target, PROTOCOL_PREFIX + method, data)


_READ_BOMBS = """
import struct
from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.dht.message_codec import load_value, unpack_records
from nesa_node.swarm.p2p.hivemind_imports import DictionaryDHTValue, MSGPackSerializer
from tests.swarm.test_dht_bombs import nested
for depth in (1, 200, 3000):
    bomb = nested(depth)
    inside = b"\\xc9" + struct.pack(">Ib", len(bomb), 0x50) + bomb
    arrays = b"\\x91" * 100_000
    readers = unpack_records, load_value, MSGPackSerializer.loads, DictionaryDHTValue.unpackb
    for packed in (bomb, inside, arrays, b"\\x93\\xc0\\xca\\x7f\\0\\0\\0" + arrays):
        for read in readers:
            try:
                read(packed)
            except ProtocolError:
                print("refused")
"""


def test_nested_extensions_are_refused_and_end_no_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _READ_BOMBS], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * 48


@asynccontextmanager
async def _bootstrap(directory: Path) -> AsyncIterator[str]:
    """A bootstrap in a process of its own; its address."""
    ready = directory / "ready.json"
    arguments = ("bootstrap", "--host-maddrs", *LOOPBACK, "--ready-file", str(ready))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nesa_node", *arguments),
        *("--identity-path", str(directory / "bootstrap.key")),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(40):
            while not ready.exists() or not ready.read_text():
                assert process.returncode is None
                await asyncio.sleep(0.1)
        addresses: list[str] = json.loads(ready.read_text())["addresses"]
        yield addresses[0]
        assert process.returncode is None, "the bootstrap has ended"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_process_that_is_sent_a_bomb_goes_on_answering(tmp_path: Path) -> None:
    async with (
        _bootstrap(tmp_path) as address,
        open_swarm(
            Identity.ephemeral(tmp_path), host_maddrs=LOOPBACK, initial_peers=[address]
        ) as attacker,
    ):
        target = PeerId(address.rpartition("/")[2])
        for packed in (nested(200), nested(5000), crowded(300_000)):
            with pytest.raises(RemoteError, match="ProtocolError"):
                await call(attacker, target, "rpc_store", store_request(packed))
        ping = await call(attacker, target, "rpc_ping", b"")
        assert dht_pb2.PingResponse.FromString(ping).dht_time > 0


async def test_process_that_asks_a_hostile_member_goes_on(tmp_path: Path) -> None:
    async def answer(_: PeerId, data: bytes) -> bytes:
        num_keys = len(dht_pb2.FindRequest.FromString(data).keys)
        result = dht_pb2.FindResult(
            type=dht_pb2.FOUND_DICTIONARY, value=nested(400), expiration_time=time.time() + 60
        )
        asked.set()
        return bytes(dht_pb2.FindResponse(results=[result] * num_keys).SerializeToString())

    asked = asyncio.Event()
    async with open_swarm(Identity.ephemeral(tmp_path), host_maddrs=LOOPBACK) as evil:
        evil.transport.unary._handlers[PROTOCOL_PREFIX + "rpc_find"] = answer
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nesa_node", "status", "--json", "--initial-peers"),
            evil.transport.addresses[0],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(process.communicate(), 50)
        assert asked.is_set()
        assert process.returncode in range(8), errors.decode()
        assert b"Traceback" not in errors, errors.decode()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (dht_pb2.StoreRequest, b"\x12\x00" * (MAX_UNARY_MESSAGE_BYTES // 2)),
        (dht_pb2.StoreRequest, b"\x12\xff\xff\xff\xff\x7f"),
        (dht_pb2.StoreRequest, b"\x0b" * 10_000),
        (dht_pb2.StoreRequest, b"\x08" + b"\xff" * 10_000),
        (dht_pb2.StoreRequest, bytes(MAX_UNARY_MESSAGE_BYTES + 1)),
        (dht_pb2.FindRequest, b"\x12\x00" * 1000),
        (dht_pb2.PingRequest, b"\x0a" * 513),
        (dht_pb2.FindResponse, b"\x12\x00" * 1000),
        (dht_pb2.FindResponse, b"\x12\x80\x80\x80\x01" + b"\x22\x00" * 1024**2),
        (dht_pb2.FindResponse, b"\x12\x01"),
    ],
)
def test_protobuf_is_bounded_before_it_is_built(kind: Any, data: bytes) -> None:
    assert_cheap(lambda: parse_message(kind, data))


@pytest.mark.parametrize("packed", [crowded(300_000), crowded(MAX_RECORDS_PER_CALL + 1)])
def test_dictionary_of_too_many_items_is_refused_before_it_is_built(packed: bytes) -> None:
    assert_cheap(lambda: unpack_records(packed))


def assert_cheap(read: Any) -> None:
    """Refused in little time and memory. The memory for the bytes themselves is allowed once."""
    # As a daemon does once it has imported what it needs: collections leave that alone.
    gc.collect()
    gc.freeze()
    began = time.thread_time()
    with pytest.raises(ProtocolError):
        read()
    took_s = time.thread_time() - began
    gc.unfreeze()
    assert took_s < SLOW_S
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_UNARY_MESSAGE_BYTES + 1024**2


def test_dictionaries_are_written_and_read_as_hivemind_does() -> None:
    theirs = DictionaryDHTValue()
    later = time.time() + 60
    records = [("12D3KooWa", b"one", later), ("12D3KooWb", b"two", later + 1)]
    for record in records:
        theirs.store(*record)
    packed = MSGPackSerializer.dumps(theirs)
    assert pack_records(records) == packed
    assert unpack_records(packed) == records
    read = load_value(packed)
    assert read.data == theirs.data
    assert read.latest_expiration_time == later + 1
    assert load_value(MSGPackSerializer.dumps(b"value")) == b"value"


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Swarm, Swarm]]:
    async with local_swarm(tmp_path, 2) as (victim, attacker):
        await victim.directory.publish(make_status(load=0.25))
        yield victim, attacker


def stop_the_budget_s_clock(swarm: Swarm) -> None:
    """On a busy machine the budget of a peer would fill again between its calls."""
    swarm.directory._dht_store._node._rpc._budget = CallBudget(lambda: 0.0)


async def test_key_asked_for_twice_in_one_call_is_refused(pair: tuple[Swarm, Swarm]) -> None:
    victim, attacker = pair
    target = victim.identity.peer_id
    for keys in ([KEY] * 16, [KEY, dht_id("other"), KEY], [KEY[:19]], [KEY + b"\0"]):
        find = dht_pb2.FindRequest(keys=keys).SerializeToString()
        with pytest.raises(RemoteError, match="ProtocolError"):
            await call(attacker, target, "rpc_find", find)
    answer = await call(
        attacker, target, "rpc_find", dht_pb2.FindRequest(keys=[KEY]).SerializeToString()
    )
    assert dht_pb2.FindResponse.FromString(answer).results[0].type == dht_pb2.FOUND_DICTIONARY


async def test_answers_stay_below_the_largest_message_and_are_paid_for(
    pair: tuple[Swarm, Swarm],
) -> None:
    victim, attacker = pair
    stop_the_budget_s_clock(victim)
    storage = dht_node(victim).protocol.storage
    keys = [dht_id(f"full {index}") for index in range(3)]
    value, later = msgspec.msgpack.encode(bytes(1180)), time.time() + 500
    for key in map(DHTID.from_bytes, keys):
        index = 0
        while storage.store_subkey(key, f"12D3KooW{index:044d}", value, later):
            index += 1
    find = dht_pb2.FindRequest(keys=keys).SerializeToString()
    answered = await call(attacker, victim.identity.peer_id, "rpc_find", find)
    sizes = [len(result.value) for result in dht_pb2.FindResponse.FromString(answered).results]
    assert min(sizes[:1]) > 2_000_000
    assert sizes[2] == 0
    for _ in range(20):
        try:
            await call(attacker, victim.identity.peer_id, "rpc_find", find)
        except RemoteError:
            return
    pytest.fail("two thousand records in each answer, and no end")


async def test_large_calls_are_paid_for_before_they_are_read(
    pair: tuple[Swarm, Swarm], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, attacker = pair
    stop_the_budget_s_clock(victim)
    read: list[int] = []

    def spy(kind: Any, data: bytes) -> Any:
        if len(data) > 1_000_000:
            read.append(len(data))
        return parse_message(kind, data)

    monkeypatch.setattr("nesa_node.swarm.dht.rpc.parse_message", spy)
    request = store_request(crowded(300_000))
    for _ in range(8):
        with pytest.raises(RemoteError):
            await call(attacker, victim.identity.peer_id, "rpc_store", request)
    assert 1 <= len(read) <= 3


def test_budget_charges_bytes_records_and_answers() -> None:
    peer = PeerId("p")
    budgets = [CallBudget(lambda: 0.0) for _ in range(3)]
    spending: list[tuple[Callable[[PeerId, int], None], int, int]] = [
        (budgets[0].charge_call, MAX_UNARY_MESSAGE_BYTES, 1),
        (budgets[1].charge_checks, MAX_RECORDS_PER_CALL, 1),
        (budgets[2].charge_answer, 2 * 1024**2, 15),
    ]
    for spend, amount, times in spending:
        for _ in range(times):
            spend(peer, amount)
        with pytest.raises(ProtocolError, match="too much"):
            spend(peer, amount)


async def test_peer_holds_two_large_calls_at_most(pair: tuple[Swarm, Swarm]) -> None:
    victim, attacker = pair
    held: list[int] = []
    release = asyncio.Event()

    async def hold(_: PeerId, data: bytes) -> bytes:
        held.append(len(data))
        await release.wait()
        return b"done"

    await victim.transport.unary.add_handler("/hold", hold)
    unary, target = attacker.transport.unary, victim.identity.peer_id
    calls = [asyncio.create_task(unary.call(target, "/hold", bytes(3 * 1024**2))) for _ in range(5)]
    done, pending = await asyncio.wait(calls, timeout=5, return_when=asyncio.ALL_COMPLETED)
    assert (len(done), len(pending)) == (3, 2)
    assert all(isinstance(call.exception(), RemoteError) for call in done)
    release.set()
    await asyncio.wait(pending)
    assert len(held) == 2
    assert not victim.transport.unary._incoming_bytes


async def test_peer_that_asks_for_it_is_not_pinged_before_its_ping_is_answered(
    pair: tuple[Swarm, Swarm],
) -> None:
    """Else each of its calls is held for 3 s if it does not answer."""
    victim, attacker = pair
    pinged: list[PeerId] = []

    async def ignore(peer: PeerId, _: bytes) -> bytes:
        pinged.append(peer)
        raise ProtocolError("busy", "not now")

    attacker.transport.unary._handlers[PROTOCOL_PREFIX + "rpc_ping"] = ignore
    own = dht_pb2.NodeInfo(node_id=node_id_of(base58_decode(attacker.identity.peer_id)))
    ping = dht_pb2.PingRequest(peer=own, validate=True).SerializeToString()
    answer = await call(attacker, victim.identity.peer_id, "rpc_ping", ping)
    assert dht_pb2.PingResponse.FromString(answer).peer.node_id
    assert pinged == []


async def test_neighbours_with_endless_peer_ids_are_forgotten(pair: tuple[Swarm, Swarm]) -> None:
    """Written in base 58, 200 kB of a peer id take 40 s."""
    victim, attacker = pair
    endless = os.urandom(200_000)

    async def answer(_: PeerId, data: bytes) -> bytes:
        result = dht_pb2.FindResult(
            type=77, value=b"?", nearest_node_ids=[node_id_of(endless)], nearest_peer_ids=[endless]
        )
        num_keys = len(dht_pb2.FindRequest.FromString(data).keys)
        return bytes(dht_pb2.FindResponse(results=[result] * num_keys).SerializeToString())

    attacker.transport.unary._handlers[PROTOCOL_PREFIX + "rpc_find"] = answer
    protocol = dht_node(victim).protocol
    began = time.thread_time()
    found = await protocol.find(PeerID.from_base58(attacker.identity.peer_id), DHTID(7))
    assert (found.records, found.neighbours) == ([], {})
    assert time.thread_time() - began < 5 * SLOW_S


async def test_crowd_of_newcomers_is_served_one_at_a_time(pair: tuple[Swarm, Swarm]) -> None:
    victim, _ = pair
    protocol = dht_node(victim).protocol
    served: list[Any] = []
    at_once: list[int] = []

    async def call_store(peer: Any, keys: Any, *_: Any, **__: Any) -> list[bool]:
        at_once.append(1)
        await asyncio.sleep(0)
        served.append(peer)
        at_once.pop()
        assert not at_once
        return [True] * len(keys)

    protocol.call_store = call_store
    for index in range(1000):
        await protocol.update_routing_table(DHTID(index), PeerID(index.to_bytes(34, "big")))
    assert protocol.num_waiting_newcomers <= MAX_WAITING_NEWCOMERS

    async def all_served() -> bool:
        return bool(protocol.num_waiting_newcomers == 0)

    await eventually(all_served)
    assert len(set(served)) <= MAX_WAITING_NEWCOMERS


def test_no_reader_of_hiveminds_is_left() -> None:
    assert MSGPackSerializer.loads is load_value


async def test_newcomer_is_handed_all_keys_in_few_calls(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 1) as (member,):
        protocol = dht_node(member).protocol
        later = time.time() + 500
        keys = [DHTID(index) for index in range(1, 201)]
        for key in keys:
            assert protocol.storage.store_subkey(key, f"12D3KooW{int(key)}", b"\xc4\x01a", later)
        given: list[int] = []
        store = protocol.call_store

        async def spy(peer: Any, keys: Any, *rest: Any) -> Any:
            answer = await store(peer, keys, *rest)
            given.append(0 if answer is None else len(answer))
            return answer

        async def all_given() -> bool:
            return sum(given) == len(keys)

        protocol.call_store = spy
        async with open_swarm(
            Identity.ephemeral(tmp_path),
            host_maddrs=LOOPBACK,
            initial_peers=member.transport.addresses,
        ):
            await eventually(all_given)
            assert len(given) <= 4
