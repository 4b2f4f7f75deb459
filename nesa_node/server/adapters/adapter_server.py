"""A node's part in its model's adapters: streams of peers, and what it keeps and announces.

Peers upload adapters whose author has signed a notice about them, and fetch them by digest. The
node checks every byte before it stores an adapter, and applies none by itself.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nesa_node.core.errors import (
    AdapterError,
    BusyError,
    DiskLimitError,
    ModelError,
    PeerUnreachableError,
    ProtocolError,
    RecordError,
    SwarmError,
)
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.engine.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    LayerSizes,
    check_adapter_folder,
)
from nesa_node.server.adapters.store import AdapterStore
from nesa_node.server.session.message_loop import RefusalLog, receive_first_message
from nesa_node.server.session.peer_access import PeerAccess
from nesa_node.swarm.adapter_catalog import PublishedAdapter, find_published, list_published
from nesa_node.swarm.adapter_transfer import (
    AdapterPeer,
    file_bytes,
    find_holders,
    message_name,
    receive_files,
    send_files,
)
from nesa_node.swarm.dht.adapter_notices import MAX_ADAPTER_BYTES, AdapterNotice, ListedAdapter
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.adapter_messages import (
    MAX_ADAPTER_DIGESTS,
    AdapterFiles,
    AdapterGet,
    AdapterHeld,
    AdapterPut,
    AdapterQuery,
    AdapterRequest,
    AdapterStored,
    AdapterWanted,
)
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.stream import MAX_BUDGET_PEERS, MessageBudget, Stream

log = get_logger(__name__)

KEEP_INTERVAL_S = 300.0
"""Interval between readings of the notices, in which removed adapters are deleted."""
MAX_ANNOUNCED_PER_ROUND = 8
MAX_TRANSFERS = 8
MAX_TRANSFERS_PER_PEER = 2
PEER_BYTES_PER_HOUR = 2 * 2**30
"""Bytes that one peer may upload and fetch together; a node's uplink is not a mirror's."""
MAX_READS = 8
"""Readings of the notices for names that are not known, within `_READS_WINDOW_S`."""
_READS_WINDOW_S = 40.0
_SERVED_AGE_S = 1.0
"""Age up to which the list of held adapters is answered again without reading the folder."""
_PUT_BYTES = 64 * 1024
"""What a request to store counts, beside its files: a signature to verify and a small file."""
_MAX_FETCHES = 4
_START_DELAY_S = 30.0
"""Longest wait before the first reading of the notices: nodes may start together."""
_HOUR_S = 3600.0
_BUSY_RETRY_S = 5.0


class TransferLimits:
    """Bounds of transfers: at once, of all peers and of each one, and bytes of a peer per hour.

    `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: Counter[PeerId] = Counter()
        self._paid_at: LruTable[PeerId, float] = LruTable(MAX_BUDGET_PEERS)
        """By peer: the time at which its bytes so far are paid for."""

    @contextmanager
    def admit(self, peer: PeerId, nbytes: int) -> Iterator[None]:
        """Count a transfer of `nbytes` while the body runs. Raises `BusyError`."""
        if self._running.total() >= MAX_TRANSFERS or self._running[peer] >= MAX_TRANSFERS_PER_PEER:
            raise BusyError("too many transfers at once", _BUSY_RETRY_S)
        self.charge(peer, nbytes)
        self._running[peer] += 1
        try:
            yield
        finally:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]

    def charge(self, peer: PeerId, nbytes: int) -> None:
        """Count bytes of `peer`. Raises `BusyError` beyond `PEER_BYTES_PER_HOUR`."""
        now = self._clock()
        paid_at = max(self._paid_at.get(peer, -math.inf), now - _HOUR_S)
        paid_at += nbytes / PEER_BYTES_PER_HOUR * _HOUR_S
        if paid_at > now:
            raise BusyError("this peer has moved too many bytes within an hour", paid_at - now)
        self._paid_at.put(peer, paid_at)


class AdapterServer:
    """Serves and keeps the adapters of one model.

    `find_layers` gives the sizes of the model's layers, in a thread. `authors` are the only ones
    whose adapters are stored and found; all, if empty. `allow` (all, if empty) and `deny` are the
    peers that are served.
    """

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        store: AdapterStore,
        *,
        find_layers: Callable[[], LayerSizes],
        find_addresses: Callable[[], Mapping[PeerId, Sequence[str]]],
        authors: frozenset[PeerId] = frozenset(),
        allow: frozenset[PeerId] = frozenset(),
        deny: frozenset[PeerId] = frozenset(),
        refusals: RefusalLog | None = None,
    ) -> None:
        """`find_addresses` gives the addresses of the model's known nodes."""
        self.store = store
        self.model_id = model_id
        self._swarm = swarm
        self._find_layers = find_layers
        self._find_addresses = find_addresses
        self._authors = authors
        self._access = PeerAccess(swarm, model_id, allow, deny)
        self._refusals = refusals or RefusalLog()
        self._limits = TransferLimits()
        self._budget = MessageBudget()
        self._reads: deque[float] = deque(maxlen=MAX_READS)
        self._served: dict[str, int] = {}
        self._served_at = -math.inf
        self._incoming_bytes = 0
        self._layers: LayerSizes | None = None
        self._layers_lock = asyncio.Lock()
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)
        self._fetch_locks: dict[str, asyncio.Lock] = {}
        """By digest, while it is being fetched."""

    async def handle(self, peer: PeerId, reader: Any, writer: Any) -> None:
        """Serve one stream, which has one request; the caller closes it.

        A peer's mistake is answered, never raised.
        """
        stream = Stream(peer, reader, writer)
        async with self._refusals.answering(stream):
            # Read before it is refused: see `SessionServer.handle`.
            message = await receive_first_message(stream)
            await self._budget.wait_until_paid(stream, message)
            self._check_request(peer, message)
            await self._dispatch(stream, message)

    async def find(self, text: str) -> PublishedAdapter:
        """The adapter that `name`, `author/name` or a digest means.

        Reads the notices from the DHT where those known here do not say. Raises `AdapterError`.
        """
        try:
            return find_published(list_published(self._known_notices()), text)
        except AdapterError:
            now = time.monotonic()
            if len(self._reads) == MAX_READS and now < self._reads[0] + _READS_WINDOW_S:
                raise
            self._reads.append(now)
        await self._swarm.notices.fetch(AdapterNotice, self.model_id)
        return find_published(list_published(self._known_notices()), text)

    async def open_digest(self, digest: str) -> Path:
        """As `open`, for the adapter of a digest. Raises `AdapterError` if none lists it."""
        if digest in await self._list_served():
            return await asyncio.to_thread(self.store.open, digest)
        return await self.open(await self.find(digest))

    async def open(self, adapter: PublishedAdapter) -> Path:
        """The PEFT folder of an adapter, fetched from another node where it is not held.

        Read it at once, as `AdapterStore.open` says. A fetch takes as long as
        `transfer_limit_s` allows each node that has it. Raises `AdapterError` where no node has it,
        or none that fits the model, `DiskLimitError` where this node has no room for it, and
        `SwarmError`.
        """
        if not await asyncio.to_thread(self.store.holds, adapter.digest):
            lock = self._fetch_locks.setdefault(adapter.digest, asyncio.Lock())
            try:
                async with lock, self._fetches:
                    if not await asyncio.to_thread(self.store.holds, adapter.digest):
                        await self._fetch(adapter)
            finally:
                self._fetch_locks.pop(adapter.digest, None)
        return await asyncio.to_thread(self.store.open, adapter.digest)

    async def run(self) -> None:
        """Read the notices, delete what was removed, and announce what the DHT has lost, until
        cancelled."""
        await asyncio.sleep(random.uniform(0.0, _START_DELAY_S))
        while True:
            try:
                await self.keep_notices()
            except (SwarmError, OSError, TimeoutError, DiskLimitError) as error:
                log.info("adapters_not_kept", reason=str(error))
            except Exception:  # a bug must end neither the node nor its other services
                log.exception("adapters_not_kept")
            await asyncio.sleep(KEEP_INTERVAL_S * random.uniform(0.8, 1.2))

    async def keep_notices(self) -> None:
        """One round of `run`."""
        found = {
            notice.signer: (notice, sealed)
            for notice, sealed in await self._swarm.notices.fetch_sealed(
                AdapterNotice, self.model_id
            )
        }
        kept = await asyncio.to_thread(self.store.notices, self.model_id)
        lost = []
        for each in kept:
            notice, sealed = found.get(PeerId(each.author), (None, b""))
            if notice is None or notice.order < each.order:
                lost.append(each.sealed)
            elif notice.order > each.order:
                await asyncio.to_thread(self.store.keep_notice, notice, sealed)
        for digest in await asyncio.to_thread(self.store.sweep):
            log.info("adapter_deleted", digest=digest)
        for sealed in random.sample(lost, min(MAX_ANNOUNCED_PER_ROUND, len(lost))):
            try:
                notice = self._swarm.notices.open(AdapterNotice, sealed)
            except RecordError as error:
                log.info("notice_not_announced", reason=str(error))
                continue
            await self._swarm.notices.announce(notice, sealed)

    def _check_request(self, peer: PeerId, message: AnyMessage) -> None:
        if not isinstance(message, AdapterRequest):
            raise ProtocolError("unexpected", f"{message_name(message)} on a stream of adapters")
        self._access.require(peer, message.membership, message.model)

    async def _dispatch(self, stream: Stream, message: AnyMessage) -> None:
        match message:
            case AdapterQuery():
                await self._answer_query(stream, message)
            case AdapterGet():
                await self._send(stream, message.digest.hex())
            case AdapterPut():
                await self._receive(stream, message)

    async def _answer_query(self, stream: Stream, query: AdapterQuery) -> None:
        served = await self._list_served()
        wanted = (each.hex() for each in query.digests) if query.digests else served
        held = tuple(bytes.fromhex(each) for each in wanted if each in served)
        await stream.send(AdapterHeld(digests=held[:MAX_ADAPTER_DIGESTS]))

    async def _list_served(self) -> dict[str, int]:
        """Bytes of the adapters that are served, by digest."""
        now = time.monotonic()
        if now > self._served_at + _SERVED_AGE_S:
            # Set first: streams that come while the folder is read do not read it, too.
            self._served_at = now
            self._served = await asyncio.to_thread(self._read_served)
        return self._served

    def _read_served(self) -> dict[str, int]:
        """Adapters that are held and that a kept notice of this model lists. Blocks the thread."""
        notices = self.store.notices(self.model_id)
        listed = {digest for each in notices for digest in each.digests if self._takes(each.author)}
        return {each: nbytes for each, nbytes in self.store.held().items() if each in listed}

    def _takes(self, author: str) -> bool:
        return not self._authors or author in self._authors

    async def _send(self, stream: Stream, digest: str) -> None:
        nbytes = (await self._list_served()).get(digest)
        if nbytes is None:
            raise ProtocolError("unknown_adapter", f"this node does not hold {digest}")
        with self._limits.admit(stream.peer, nbytes):
            try:
                folder = await asyncio.to_thread(self.store.open, digest)
                config = await asyncio.to_thread((folder / ADAPTER_CONFIG_FILE).read_bytes)
                weights = folder / ADAPTER_WEIGHTS_FILE
                await stream.send(
                    AdapterFiles(
                        config_bytes=len(config),
                        weights_bytes=await asyncio.to_thread(file_bytes, weights),
                    )
                )
                await send_files(stream, config, weights)
            except (AdapterError, OSError) as error:
                raise ProtocolError("unknown_adapter", f"{digest} was just evicted") from error

    async def _receive(self, stream: Stream, put: AdapterPut) -> None:
        digest = put.digest.hex()
        self._limits.charge(stream.peer, _PUT_BYTES)
        notice, listed = self._open_notice(put, digest)
        await asyncio.to_thread(self._check_room, self._newest_notice(notice), listed)
        if not await asyncio.to_thread(self.store.holds, digest):
            with self._limits.admit(stream.peer, listed.nbytes), self._incoming(listed.nbytes):
                await stream.send(AdapterWanted())
                await self._receive_files(stream, put, digest)
        try:
            await asyncio.to_thread(self.store.keep_notice, notice, put.notice)
        except (OSError, DiskLimitError) as error:
            raise BusyError(f"the notice cannot be kept: {error}", _HOUR_S) from None
        self._served_at = -math.inf
        await stream.send(AdapterStored())
        log.info("adapter_stored", digest=digest, author=notice.peer_id, nbytes=listed.nbytes)

    @contextmanager
    def _incoming(self, nbytes: int) -> Iterator[None]:
        """Count bytes on disk that are not in the store yet. Raises `BusyError` beyond half of
        its size."""
        if self._incoming_bytes + nbytes > self.store.max_bytes // 2:
            raise BusyError("too many bytes are being received", _BUSY_RETRY_S)
        self._incoming_bytes += nbytes
        try:
            yield
        finally:
            self._incoming_bytes -= nbytes

    async def _receive_files(self, stream: Stream, put: AdapterPut, digest: str) -> None:
        try:
            with self.store.incoming() as folder:
                await receive_files(
                    stream,
                    folder / ADAPTER_CONFIG_FILE,
                    folder / ADAPTER_WEIGHTS_FILE,
                    config_bytes=put.config_bytes,
                    weights_bytes=put.weights_bytes,
                    budget=self._budget,
                )
                layers = await self._model_layers()
                await asyncio.to_thread(check_adapter_folder, folder, digest, layers)
                await asyncio.to_thread(self.store.add, folder, digest)
        except AdapterError as error:
            raise ProtocolError("wrong_adapter", str(error)) from None
        except (OSError, DiskLimitError, TimeoutError) as error:
            raise BusyError(f"it cannot be stored: {error}", _HOUR_S) from None

    def _open_notice(self, put: AdapterPut, digest: str) -> tuple[AdapterNotice, ListedAdapter]:
        """The notice that allows an upload, and the adapter in it. Raises `ProtocolError`."""
        if self.store.max_bytes <= 0:
            raise ProtocolError("not_allowed", "this node stores no adapters")
        nbytes = put.config_bytes + put.weights_bytes
        most = min(MAX_ADAPTER_BYTES, self.store.max_author_bytes)
        if nbytes > most:
            raise ProtocolError("adapter_too_large", f"{nbytes} bytes; this node stores {most}")
        try:
            notice = self._swarm.notices.open(AdapterNotice, put.notice)
        except RecordError as error:
            raise ProtocolError("not_listed", f"the author's notice: {error}") from None
        if not self._takes(notice.peer_id):
            raise ProtocolError("not_allowed", "this node stores no adapters of this author")
        listed = notice.find_digest(digest)
        if notice.model_id != self.model_id or listed is None:
            raise ProtocolError("not_listed", "the notice does not list this adapter")
        if self._newest_notice(notice).find_digest(digest) is None:
            raise ProtocolError("not_listed", "its author has removed this adapter")
        if listed.nbytes != nbytes:
            raise ProtocolError("wrong_adapter", f"{nbytes} bytes; the notice says {listed.nbytes}")
        return notice, listed

    def _newest_notice(self, notice: AdapterNotice) -> AdapterNotice:
        """The newest notice of the same author that is known here, or `notice` itself."""
        same = [each for each in self._known_notices() if each.peer_id == notice.peer_id]
        return max([notice, *same], key=lambda each: each.order)

    def _known_notices(self) -> list[AdapterNotice]:
        known = self._swarm.notices.known_notices(AdapterNotice, self.model_id)
        return [each for each in known if self._takes(each.peer_id)]

    def _check_room(self, notice: AdapterNotice, listed: ListedAdapter) -> None:
        """Raise `ProtocolError` where the author's share is full. Blocks the thread."""
        others = tuple(each.digest for each in notice.adapters if each.digest != listed.digest)
        taken = self.store.author_bytes(others)
        if taken + listed.nbytes > self.store.max_author_bytes:
            raise ProtocolError(
                "author_full",
                f"this node stores {self.store.max_author_bytes} bytes of one author, {taken} are "
                "taken; `nesa-node adapters remove` one",
            )

    async def _model_layers(self) -> LayerSizes:
        async with self._layers_lock:
            if self._layers is None:
                self._layers = await asyncio.to_thread(self._find_layers)
            return self._layers

    async def _fetch(self, adapter: PublishedAdapter) -> None:
        """Fetch an adapter into the store. Raises `AdapterError` and `DiskLimitError`."""
        nbytes = adapter.listed.nbytes
        if nbytes > self.store.max_author_bytes:
            raise DiskLimitError(
                f"{adapter.name} has {nbytes} bytes; the store holds {self.store.max_author_bytes} "
                "of one author, a quarter of --adapter-store-gib"
            )
        notice, sealed = await self._find_sealed(adapter)
        own = [each.digest for each in notice.adapters]
        layers = await self._model_layers()
        asking = AdapterPeer(self._swarm, self.model_id)
        holders = await find_holders(asking, self._find_addresses(), adapter.digest)
        reason = "no node of the model has it now"
        for peer, addresses in holders.items():
            try:
                with self._incoming(nbytes), self.store.incoming() as folder:
                    await asking.get(
                        peer,
                        addresses,
                        adapter.digest,
                        nbytes,
                        config=folder / ADAPTER_CONFIG_FILE,
                        weights=folder / ADAPTER_WEIGHTS_FILE,
                    )
                    await asyncio.to_thread(check_adapter_folder, folder, adapter.digest, layers)
                    await asyncio.to_thread(self.store.add, folder, adapter.digest, own)
                await asyncio.to_thread(self.store.keep_notice, notice, sealed)
                return
            except (PeerUnreachableError, ProtocolError, ModelError) as error:
                reason = str(error)
            except OSError as error:
                raise DiskLimitError(f"{adapter.name} cannot be stored: {error}") from error
        raise AdapterError(f"{adapter.name} cannot be fetched: {reason}")

    async def _find_sealed(self, adapter: PublishedAdapter) -> tuple[AdapterNotice, bytes]:
        """The author's newest notice, sealed. Raises `AdapterError` if it does not list this."""
        found = await self._swarm.notices.fetch_sealed(AdapterNotice, self.model_id)
        for notice, sealed in found:
            if notice.signer == adapter.author and notice.find_digest(adapter.digest) is not None:
                return notice, sealed
        raise AdapterError(f"{adapter.name} is no longer published")
