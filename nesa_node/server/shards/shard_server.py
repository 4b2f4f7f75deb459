"""A node's answers to owners of models that place shards on it, and to sessions of those shards.

Weights are in memory only. An id of 128 random bits is what admits a session: the node lists ids
nowhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from nesa_node.compression.tensors import DTYPES
from nesa_node.core.errors import BusyError, ProtocolError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.declaration import gib_to_bytes
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import choose_device, free_memory_bytes, release_memory
from nesa_node.engine.model.shard import ShardLoader
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.server.session.message_loop import RefusalLog, receive_first_message
from nesa_node.server.session.peer_access import require_peer
from nesa_node.server.shards.held_shard import HeldShard, open_shard
from nesa_node.swarm.adapter_transfer import transfer_limit_s
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.messages import Open
from nesa_node.swarm.protocol.shard_messages import (
    MAX_PART_BYTES,
    ShardDrop,
    ShardDropped,
    ShardHeld,
    ShardPart,
    ShardPut,
    ShardQuery,
    ShardRename,
    ShardRequest,
    ShardWanted,
)
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

PUTS_AT_ONCE = 4
MAX_SHARDS, MAX_SHARDS_PER_PEER = 32, 16
"""Small ones take little memory, but each has threads of its own."""
MAX_NAMES = 4
"""Of a shard, whose old ones are dropped."""
UNUSED_S = 24 * 3600.0
"""After which a shard that no session or query names is dropped: its owner may be gone."""
CHECK_S = 60.0
_BUSY_RETRY_S = 5.0


@dataclass(eq=False)
class _Holding:
    """A shard from its first byte until its memory is free again."""

    nbytes: int
    owner: PeerId
    shard: HeldShard | None = None
    dropped: asyncio.Event = field(default_factory=asyncio.Event)


class ShardServer:
    """Holds shards in up to `shards_gib` of memory."""

    def __init__(self, config: NodeConfig, swarm: Swarm) -> None:
        self._config = config
        self._swarm = swarm
        self._device = choose_device(config.device)
        self._max_bytes = gib_to_bytes(config.shards_gib) or 0
        self._allow, self._deny = frozenset(config.allow_peers), frozenset(config.deny_peers)
        self._refusals = RefusalLog()
        self._holdings: list[_Holding] = []
        self._by_name: dict[ModelId, _Holding] = {}
        self._tasks = TaskSet()
        self._loading = 0

    async def close(self) -> None:
        """Have clients leave, and drop all shards."""
        for holding in self._holdings:
            holding.dropped.set()
        await self._tasks.join()

    async def run(self) -> None:
        """Drop shards that were not used for `UNUSED_S`."""
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            for holding in list(self._holdings):
                shard = holding.shard
                if shard is not None and shard.admission.sessions:
                    shard.used_at = now
                elif shard is not None and now > shard.used_at + UNUSED_S:
                    log.info("unused_shard_dropped", mib=holding.nbytes >> 20)
                    for name in list(shard.names):
                        self._forget(name)

    async def handle_session(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a client's session of a shard; the caller closes the stream."""
        stream = Stream(peer, reader, writer)
        async with self._refusals.answering(stream):
            message = await receive_first_message(stream)
            if not isinstance(message, Open):
                raise ProtocolError("unexpected", "a session of a shard begins with open")
            shard = self._require(message.model)
            await shard.server.serve(stream, message)

    async def handle_owner(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one request about a shard; the caller closes the stream."""
        stream = Stream(peer, reader, writer)
        async with self._refusals.answering(stream):
            message = await receive_first_message(stream)
            if not isinstance(message, ShardRequest):
                raise ProtocolError("unexpected", "a stream of shards begins with a request")
            require_peer(self._swarm, peer, message.membership, allow=self._allow, deny=self._deny)
            match message:
                case ShardPut():
                    shard = await self._put(stream, message)
                    await stream.send(_describe(shard))
                case ShardQuery():
                    await stream.send(_describe(self._require(message.shard)))
                case ShardRename():
                    await stream.send(_describe(self._rename(message)))
                case ShardDrop():
                    if message.shard not in self._by_name:
                        raise _unknown()
                    self._forget(ModelId(message.shard))
                    await stream.send(ShardDropped())

    def _require(self, name: str) -> HeldShard:
        holding = self._by_name.get(ModelId(name))
        if holding is None or holding.shard is None:
            raise _unknown()
        if holding.dropped.is_set():
            raise ProtocolError("draining", "this node is stopping")
        holding.shard.used_at = time.monotonic()
        return holding.shard

    def _require_new(self, name: str) -> None:
        if name in self._by_name:
            raise ProtocolError("shard_exists", "this node holds a shard of this id already")

    def _rename(self, message: ShardRename) -> HeldShard:
        shard, new = self._require(message.shard), ModelId(message.new)
        self._require_new(new)
        if len(shard.names) >= MAX_NAMES:
            raise ProtocolError("shard_exists", f"this shard has {MAX_NAMES} ids already")
        self._by_name[new] = self._by_name[ModelId(message.shard)]
        shard.names.add(new)
        return shard

    def _forget(self, name: ModelId) -> None:
        holding = self._by_name.pop(name)
        if holding.shard is not None:
            holding.shard.names.discard(name)
        if holding not in self._by_name.values():
            holding.dropped.set()

    async def _put(self, stream: Stream, message: ShardPut) -> HeldShard:
        self._require_new(message.shard)
        if self._loading >= PUTS_AT_ONCE:
            raise BusyError("this node receives other shards", _BUSY_RETRY_S)
        self._loading += 1
        try:
            loader = await asyncio.to_thread(self._make_loader, message)
            cache_bytes = loader.cache_bytes_per_token * message.cache_tokens
            nbytes = loader.nbytes + loader.buffer_bytes + cache_bytes
            self._require_new(message.shard)
            self._require_room(nbytes, stream.peer)
            holding = _Holding(nbytes, stream.peer)
            async with self._reserving(ModelId(message.shard), holding):
                with _answering_errors():
                    await asyncio.to_thread(loader.begin)
                blocks = await self._receive(stream, loader, holding)
                ready: asyncio.Future[HeldShard] = asyncio.get_running_loop().create_future()
                holding_it = self._hold(message, loader.checkpoint, blocks, holding, ready)
                del loader, blocks
                if self._tasks.start(holding_it, name="shard") is None:
                    raise ProtocolError("draining", "this node is stopping")
                return await ready
        finally:
            self._loading -= 1

    def _make_loader(self, message: ShardPut) -> ShardLoader:
        with _answering_errors():
            loader = ShardLoader(
                message.config, message.blocks, dtype=DTYPES[message.dtype], device=self._device
            )
        if loader.layout != message.layout:
            raise ProtocolError(
                "bad_shard", "layers of this model differ here: versions of transformers do, too"
            )
        return loader

    def _require_room(self, nbytes: int, owner: PeerId) -> None:
        of_owner = sum(each.owner == owner for each in self._holdings)
        if len(self._holdings) >= MAX_SHARDS or of_owner >= MAX_SHARDS_PER_PEER:
            raise ProtocolError("no_room", "this node holds as many shards as it may")
        held = sum(each.nbytes for each in self._holdings)
        left = min(self._max_bytes - held, free_memory_bytes(self._device))
        if nbytes > left:
            raise ProtocolError(
                "no_room",
                f"the shard and its cache take {nbytes >> 20} MiB, and {max(left, 0) >> 20} MiB "
                "are left for shards",
            )

    @asynccontextmanager
    async def _reserving(self, name: ModelId, holding: _Holding) -> AsyncIterator[None]:
        self._holdings.append(holding)
        self._by_name[name] = holding
        try:
            yield
        except BaseException:
            if holding.shard is None:
                self._release(holding)
            raise

    def _release(self, holding: _Holding) -> None:
        if holding in self._holdings:
            self._holdings.remove(holding)
        for name in [name for name, each in self._by_name.items() if each is holding]:
            del self._by_name[name]

    async def _receive(self, stream: Stream, loader: ShardLoader, holding: _Holding) -> ModelBlocks:
        await stream.send(ShardWanted(nbytes=loader.nbytes))
        left = loader.nbytes
        try:
            async with asyncio.timeout(transfer_limit_s(left)):
                while left:
                    message, payload = await stream.receive(
                        max_tensor_bytes=min(left, MAX_PART_BYTES)
                    )
                    if not isinstance(message, ShardPart):
                        raise ProtocolError("unexpected", "only parts of weights follow")
                    if holding.dropped.is_set():
                        raise _unknown()
                    await asyncio.to_thread(loader.add, payload)
                    left -= len(payload)
        except TimeoutError:
            raise ProtocolError("transfer_timeout", f"{stream.peer} sends too slowly") from None
        with _answering_errors():
            return await asyncio.to_thread(loader.finish)

    async def _hold(
        self,
        message: ShardPut,
        checkpoint: Checkpoint,
        blocks: ModelBlocks,
        holding: _Holding,
        ready: asyncio.Future[HeldShard],
    ) -> None:
        serving = self._serve(message, checkpoint, blocks, holding, ready)
        del checkpoint, blocks  # Their memory is free once that has ended.
        try:
            with _answering_errors():
                await serving
        except ProtocolError as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            holding.shard = None
            await asyncio.to_thread(release_memory)
            self._release(holding)
            log.info("shard_dropped", mib=holding.nbytes >> 20)

    async def _serve(
        self,
        message: ShardPut,
        checkpoint: Checkpoint,
        blocks: ModelBlocks,
        holding: _Holding,
        ready: asyncio.Future[HeldShard],
    ) -> None:
        async with open_shard(
            self._config,
            self._swarm,
            ModelId(message.shard),
            checkpoint,
            blocks,
            message.cache_tokens,
            self._refusals,
        ) as shard:
            if ready.cancelled():
                return  # The node is stopping.
            holding.shard = shard
            ready.set_result(shard)
            log.info("shard_held", blocks=message.blocks, mib=holding.nbytes >> 20)
            await holding.dropped.wait()
            await shard.server.drain(self._config.drain_timeout_s)


@contextmanager
def _answering_errors() -> Iterator[None]:
    """Answer what an owner's config makes transformers and torch raise: errors of any type."""
    try:
        yield
    except (ProtocolError, asyncio.CancelledError):
        raise
    except Exception as error:
        # A peer's mistake, or this node's: the owner is told, and the node goes on.
        log.info("shard_not_held", reason=repr(error)[:500])
        raise ProtocolError("bad_shard", f"{type(error).__name__}: {error}"[:500]) from None


def _unknown() -> ProtocolError:
    return ProtocolError("unknown_shard", "this node holds no such shard")


def _describe(shard: HeldShard) -> ShardHeld:
    return ShardHeld(
        prefill_tokens_per_s=shard.throughput.prefill_tokens_per_s,
        decode_tokens_per_s=shard.throughput.decode_tokens_per_s,
        total_cache_tokens=shard.admission.max_tokens,
        free_cache_tokens=shard.admission.free_tokens,
    )
