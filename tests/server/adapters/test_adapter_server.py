"""What a hostile peer sends to a node that stores adapters, over a real stream."""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nesa_node.core.errors import (
    AdapterError,
    BusyError,
    ProtocolError,
    RemoteError,
    StreamClosedError,
)
from nesa_node.core.ids import PeerId
from nesa_node.engine.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    check_adapter_folder,
    combine_digests,
    read_adapter_folder,
)
from nesa_node.server.adapters import adapter_server
from nesa_node.server.adapters.adapter_server import AdapterServer, TransferLimits
from nesa_node.swarm import adapter_transfer
from nesa_node.swarm.adapter_transfer import AdapterPeer, receive_answer
from nesa_node.swarm.dht.adapter_notices import AdapterNotice
from nesa_node.swarm.dht.sealing import seal_statement
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.adapter_messages import (
    ADAPTER_PROTOCOL,
    AdapterChunk,
    AdapterFiles,
    AdapterGet,
    AdapterHeld,
    AdapterPut,
    AdapterQuery,
    AdapterStored,
    AdapterWanted,
)
from nesa_node.swarm.protocol.any_message import encode_message
from nesa_node.swarm.protocol.messages import ErrorMessage, Ping
from nesa_node.swarm.protocol.stream import Stream
from tests.engine.adapter_folders import config_of, lora_tensors, safetensors, write_adapter
from tests.server.adapters.nodes import MIB, MODEL, adapter_nodes
from tests.swarm.local_swarm import local_swarm
from tests.swarm.notice_fields import listed_adapter, make_notice


class Attacker:
    """A peer of a node with a store, and an author of notices."""

    def __init__(self, swarm: Swarm, node: Swarm, server: AdapterServer, author: Identity) -> None:
        self.server = server
        self.author = author
        self.asking = AdapterPeer(swarm, MODEL)
        self._swarm = swarm
        self._node = node

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        transport, node = self._swarm.transport, self._node.transport
        pipes = await transport.open_stream(node.peer_id, ADAPTER_PROTOCOL, node.addresses)
        stream = Stream(node.peer_id, *pipes)
        try:
            yield stream
        finally:
            await stream.close()

    def notice(self, digest: str, nbytes: int, **changes: Any) -> bytes:
        adapter = listed_adapter(digest=digest, nbytes=nbytes)
        fields = {"model_id": MODEL, "adapters": (adapter,), **changes}
        return seal_statement(
            make_notice(AdapterNotice, self.author, time.time(), **fields), self.author
        )

    async def put(
        self, config: bytes, weights: bytes, *, digest: str, notice: bytes = b"", **changes: Any
    ) -> None:
        """Upload these bytes. Raises what the node answers."""
        sealed = notice or self.notice(digest, len(config) + len(weights))
        fields: dict[str, Any] = {
            "model": MODEL,
            "digest": bytes.fromhex(digest),
            "notice": sealed,
            "config_bytes": len(config),
            "weights_bytes": len(weights),
        }
        async with self.stream() as stream:
            await stream.send(AdapterPut(**{**fields, **changes}))
            await receive_answer(stream, AdapterWanted)
            for data in (config, weights):
                await adapter_transfer._send_chunks(stream, data)
            await receive_answer(stream, AdapterStored)

    async def put_folder(self, folder: Path, **changes: Any) -> str:
        """Upload a folder as its author would, with the config in its normalized form."""
        summary = read_adapter_folder(folder, "tiny")
        weights = (folder / "adapter_model.safetensors").read_bytes()
        await self.put(summary.config, weights, digest=summary.digest, **changes)
        return summary.digest

    async def refused(self, code: str, *args: Any, **changes: Any) -> str:
        """The node's words as it refuses an upload with `code`; it then holds nothing."""
        with pytest.raises((RemoteError, BusyError)) as caught:
            await self.put(*args, **changes)
        assert caught.value.code == code, caught.value
        assert self.server.store.held() == {}
        folder = self.server.store._folder
        await asyncio.sleep(0.05)
        assert not list(folder.glob("incoming-*"))
        return str(caught.value)


@pytest.fixture
async def attacker(tmp_path: Path) -> AsyncIterator[Attacker]:
    author = Identity.ephemeral(tmp_path)
    async with (
        adapter_nodes(tmp_path, 1) as ((node,), (server,)),
        local_swarm(tmp_path, 1) as (swarm,),
    ):
        await swarm.transport.connect(node.transport.peer_id, node.transport.addresses)
        yield Attacker(swarm, node, server, author)


def written(folder: Path, **options: Any) -> tuple[bytes, bytes, str]:
    """Normalized config, weights and digest of an adapter."""
    write_adapter(folder, **options)
    summary = read_adapter_folder(folder, "tiny")
    return summary.config, (folder / "adapter_model.safetensors").read_bytes(), summary.digest


async def test_files_of_another_digest_are_refused(attacker: Attacker, tmp_path: Path) -> None:
    config, weights, digest = written(tmp_path / "a")
    changed = weights[:-1] + bytes([weights[-1] ^ 1])
    assert "have the digest" in await attacker.refused(
        "wrong_adapter", config, changed, digest=digest
    )
    await attacker.put(config, weights, digest=digest)
    assert list(attacker.server.store.held()) == [digest]


async def test_ten_gigabytes_are_refused_before_a_byte_is_sent(
    attacker: Attacker, tmp_path: Path
) -> None:
    config, _, digest = written(tmp_path / "a")
    words = await attacker.refused(
        "adapter_too_large", config, b"", digest=digest, notice=b"\0", weights_bytes=10 * 2**30
    )
    assert f"this node stores {16 * MIB}" in words
    notice = attacker.notice(digest, 17 * MIB)
    await attacker.refused(
        "adapter_too_large", config, b"", digest=digest, notice=notice, weights_bytes=17 * MIB
    )


async def test_more_bytes_than_announced_are_not_written(
    attacker: Attacker, tmp_path: Path
) -> None:
    config, weights, digest = written(tmp_path / "a")
    notice = attacker.notice(digest, len(config) + 10)
    words = await attacker.refused(
        "bad_frame", config, weights, digest=digest, notice=notice, weights_bytes=10
    )
    assert "10 are missing" in words


async def test_only_what_its_author_lists_now_is_stored(attacker: Attacker, tmp_path: Path) -> None:
    config, weights, digest = written(tmp_path / "a")
    size = len(config) + len(weights)
    stranger = Identity.ephemeral(tmp_path)
    forged = msgspec.msgpack.decode(attacker.notice(digest, size))
    forged["peer_id"] = stranger.peer_id
    for notice, words in (
        (b"\xff" * 100, "sealed"),
        (msgspec.msgpack.encode(forged), "did not sign"),
        (attacker.notice("0" * 64, size), "does not list"),
        (attacker.notice(digest, size, model_id="other@0"), "does not list"),
        (attacker.notice(digest, size, issued_at=1e9, expires_at=1e9 + 60), "expired"),
    ):
        said = await attacker.refused("not_listed", config, weights, digest=digest, notice=notice)
        assert words in said
    said = await attacker.refused(
        "wrong_adapter", config, weights, digest=digest, notice=attacker.notice(digest, size + 1)
    )
    assert "the notice says" in said
    older = attacker.notice(digest, size, seq=1)
    removed = make_notice(
        AdapterNotice, attacker.author, time.time(), model_id=MODEL, adapters=(), seq=2
    )
    await attacker.server._swarm.notices.announce(removed, seal_statement(removed, attacker.author))
    said = await attacker.refused("not_listed", config, weights, digest=digest, notice=older)
    assert "has removed" in said


async def test_a_files_mistakes_are_named(attacker: Attacker, tmp_path: Path) -> None:
    """`tests/engine/weights/test_adapter_files.py` has all of them."""
    config, good, _ = written(tmp_path / "a")
    for files, words in (
        ((config, struct.pack("<Q", 2**62) + b"{}"), "the header"),
        ((config, safetensors(lora_tensors(size=16))), "trained for another model"),
        ((b"[" * 30_000, good), "JSON"),
        ((msgspec.json.encode(config_of(base_model_name_or_path="x")), good), "not normalized"),
    ):
        digest = combine_digests(files[0], hashlib.sha256(files[1]).digest())
        assert words in await attacker.refused("wrong_adapter", *files, digest=digest)


async def test_only_requests_about_this_model_are_answered(attacker: Attacker) -> None:
    for message, code in (
        (AdapterQuery(model="other@0"), "wrong_model"),
        (AdapterQuery(model=MODEL, membership=bytes(32)), "not_a_member"),
        (AdapterGet(model=MODEL, digest=bytes(32)), "unknown_adapter"),
        (Ping(nonce=1), "unexpected"),
        (AdapterStored(), "unexpected"),
        (AdapterHeld(digests=()), "unexpected"),
    ):
        async with attacker.stream() as stream:
            await stream.send(message)
            answer, _ = await stream.receive()
            assert isinstance(answer, ErrorMessage)
            assert answer.code == code


async def test_bytes_that_are_no_message_end_the_stream(attacker: Attacker) -> None:
    for data in (b"\xff" * 8, struct.pack("<II", 3, 0) + b"abc", struct.pack("<II", 2**31, 0)):
        async with attacker.stream() as stream:
            stream._writer.write(data)
            answer, _ = await stream.receive()
            assert isinstance(answer, ErrorMessage)
            assert answer.code == "bad_frame"
    header = encode_message(AdapterChunk(data=b"x"))
    assert len(header) < 64


async def test_a_sender_that_stops_midway_is_left(
    attacker: Attacker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_transfer, "TRANSFER_GRACE_S", 0.3)
    config, weights, digest = written(tmp_path / "a")
    notice = attacker.notice(digest, len(config) + len(weights))
    async with attacker.stream() as stream:
        await stream.send(
            AdapterPut(
                model=MODEL,
                digest=bytes.fromhex(digest),
                notice=notice,
                config_bytes=len(config),
                weights_bytes=len(weights),
            )
        )
        await receive_answer(stream, AdapterWanted)
        await stream.send(AdapterChunk(data=config))
        with pytest.raises(RemoteError, match="too slowly"):
            await receive_answer(stream, AdapterStored)
    assert not list(attacker.server.store._folder.glob("incoming-*"))


async def test_a_client_takes_nothing_but_the_adapter_that_it_asked_for(
    tmp_path: Path,
) -> None:
    """The node is the liar here."""
    config, weights, digest = written(tmp_path / "a")
    scripts: list[list[Any]] = [
        [AdapterFiles(config_bytes=len(config), weights_bytes=10**6)],
        [
            AdapterFiles(config_bytes=len(config), weights_bytes=len(weights)),
            AdapterChunk(data=config + b"x"),
        ],
        [
            AdapterFiles(config_bytes=len(config), weights_bytes=len(weights)),
            AdapterChunk(data=config),
            AdapterChunk(data=bytes(len(weights))),
        ],
        [AdapterHeld(digests=())],
        [],
    ]
    async with local_swarm(tmp_path, 2) as (node, client):
        waiting = iter(scripts)

        async def lie(peer: PeerId, reader: Any, writer: Any) -> None:
            stream = Stream(peer, reader, writer)
            await stream.receive()
            for message in next(waiting):
                await stream.send(message)

        await node.transport.serve(ADAPTER_PROTOCOL, lie)

        async def fetch(asking: AdapterPeer, folder: Path) -> None:
            await asking.get(
                node.transport.peer_id,
                node.transport.addresses,
                digest,
                len(config) + len(weights),
                config=folder / ADAPTER_CONFIG_FILE,
                weights=folder / ADAPTER_WEIGHTS_FILE,
            )
            check_adapter_folder(folder, digest)

        asking = AdapterPeer(client, MODEL)
        for number in range(len(scripts)):
            folder = tmp_path / f"pulled-{number}"
            await asyncio.to_thread(folder.mkdir)
            with pytest.raises((ProtocolError, AdapterError, StreamClosedError)):
                await fetch(asking, folder)


def test_transfers_are_bounded_at_once_and_per_hour() -> None:
    now = 50.0
    limits = TransferLimits(lambda: now)
    peers = [PeerId(f"peer-{number}") for number in range(20)]
    with limits.admit(peers[0], 1), limits.admit(peers[0], 1):
        with pytest.raises(BusyError, match="at once"), limits.admit(peers[0], 1):
            pass
        with limits.admit(peers[1], 1), limits.admit(peers[2], 1):
            pass
    assert not limits._running
    hour_bytes = adapter_server.PEER_BYTES_PER_HOUR
    limits = TransferLimits(lambda: now)
    with limits.admit(peers[0], hour_bytes):
        pass
    with pytest.raises(BusyError) as caught, limits.admit(peers[0], hour_bytes // 2):
        pass
    assert caught.value.retry_after_s == pytest.approx(1800.0)
    with limits.admit(peers[1], hour_bytes):
        pass
    now += 1800.0
    with limits.admit(peers[0], hour_bytes // 2):
        pass


async def test_bytes_on_their_way_are_bounded(attacker: Attacker, tmp_path: Path) -> None:
    server = attacker.server
    with server._incoming(server.store.max_bytes // 2):
        config, weights, digest = written(tmp_path / "a")
        assert "being received" in await attacker.refused("busy", config, weights, digest=digest)
    assert server._incoming_bytes == 0


async def test_queries_tell_what_is_held_and_listed(attacker: Attacker, tmp_path: Path) -> None:
    digest = await attacker.put_folder(write_adapter(tmp_path / "a"))
    peer, addresses = attacker._node.transport.peer_id, attacker._node.transport.addresses
    assert await attacker.asking.query(peer, addresses) == {digest}
    assert await attacker.asking.query(peer, addresses, ("0" * 64, digest)) == {digest}
    assert await attacker.asking.query(peer, addresses, ("0" * 64,)) == frozenset()
    for path in (tmp_path / "store-0" / "notices").iterdir():
        os.unlink(path)
    await asyncio.sleep(adapter_server._SERVED_AGE_S)
    assert await attacker.asking.query(peer, addresses) == frozenset()
