"""Directory of the swarm: publishes this node's record and reads those of all nodes.

A record is stored on the DHT twice, under its model's key and in the index of all nodes, each time
as one subkey (the peer id) of a dictionary on the five members nearest to the key. It is renewed
well before it expires; the record of a crashed node disappears after its time to live. Records of a
model with more than a thousand nodes are in shards instead (`dht/shards.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.models import MAX_RECORD_TTL_S
from nesa_node.swarm.dht.records import (
    ALL_NODES_KEY,
    NodeRecord,
    NodeStatus,
    RecordTable,
    majority_num_blocks,
    model_key,
)
from nesa_node.swarm.dht.rejoin import DhtRejoiner
from nesa_node.swarm.dht.sealing import MAX_ADDRESSES, FailureReport, seal_statement
from nesa_node.swarm.dht.shards import (
    MIN_HOLDERS,
    Shard,
    ShardWriter,
    adjacent_shards,
    column_shards,
    even_sample,
    find_block_range,
    further_shards,
    interleave,
    median_levels,
)
from nesa_node.swarm.dht.validator import STATEMENTS_PER_LOOP_TURN, RecordValidator
from nesa_node.swarm.notice_store import NoticeStore
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.transport import Transport
from nesa_node.swarm.reputation import ReputationView
from nesa_node.topology.links.matrix import MeasuredLink, assemble_links
from nesa_node.topology.snapshot import NodeState, Snapshot, count_span_holders

log = get_logger(__name__)

DEFAULT_TTL_S = 60.0
_FETCH_ONE_TIMEOUT_S = 1.0
_FETCH_ONE_MEMBERS = 4
_RECENT_SHARE = 0.6
"""Age of a recent record as a share of its life: a node renews it after a third."""
_FURTHER_SHARDS = 8
"""Shards beside this node's column that one fetch reads for blocks with few holders."""


class Directory:
    """Reads and writes node records; made by `open_swarm`.

    `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        validator: RecordValidator,
        notices: NoticeStore,
        rejoiner: DhtRejoiner,
        *,
        clock: Callable[[], float],
        ttl_s: float = DEFAULT_TTL_S,
    ) -> None:
        if not 0 < ttl_s <= MAX_RECORD_TTL_S:
            raise ValueError(f"a record lives between 0 and {MAX_RECORD_TTL_S:g} s, not {ttl_s:g}")
        self.ttl_s = ttl_s
        self.dropped = validator.dropped
        """Number of records and notices refused since the start, by reason."""
        self.is_stored = False
        """Whether the DHT accepted the record that this node published last."""
        self._identity = identity
        self._peer_id = identity.peer_id
        self._transport = transport
        self._validator = validator
        self._dht_store = notices.store
        self._notices = notices
        self._rejoiner = rejoiner
        self._membership = notices.membership
        self._reputation = ReputationView(notices, identity.peer_id, clock=clock)
        self._clock = clock
        self._records = RecordTable(identity.peer_id)
        self._num_blocks: dict[ModelId, int] = {}
        self._own_record: NodeRecord | None = None
        self._shard_writer = ShardWriter()
        self._num_fetches = 0
        self._publish_lock = asyncio.Lock()

    def record(self, peer: PeerId) -> NodeRecord | None:
        """The newest valid record of `peer` seen so far; None if expired or withdrawn."""
        record = self._records.get(peer)
        if record is None or record.state == "withdrawn" or record.expires_at <= self._clock():
            return None
        return record

    def set_num_blocks(self, model_id: ModelId, num_blocks: int) -> None:
        """Set a model's number of blocks as its checkpoint has it.

        Records with another number are left out of all results from now on.
        """
        self._num_blocks[model_id] = num_blocks

    def clear_num_blocks(self, model_id: ModelId) -> None:
        """Undo `set_num_blocks`; a no-op for a model that it was not called for."""
        self._num_blocks.pop(model_id, None)

    async def publish(self, status: NodeStatus) -> NodeRecord:
        """Sign `status` and store it in place of this node's previous record.

        A refusal by the DHT is logged, not raised: the caller publishes again before the record
        would expire (every third of `ttl_s`), and until then this node remembers it itself. Raises
        `PeerUnreachableError` if this node's own p2pd has ended.
        """
        async with self._publish_lock:
            await self._transport.refresh_addresses()
            self._adopt_level(status)
            record = self._next_record(status)
            sealed = seal_statement(record, self._identity, self._membership)
            self._own_record = record
            failure = await self._store_record(record, sealed)
            self.is_stored = failure is None
            if failure is not None:
                log.warning("record_not_stored", seq=record.seq, reason=failure)
            else:
                log.debug("record_published", seq=record.seq, state=record.state)
            if self._rejoiner.is_isolated and record.state != "withdrawn":
                # Members that are found again get this node's records by replication.
                self._rejoiner.start_attempt(self._other_records())
            if status.state == "withdrawn":
                self._records.drop(self._peer_id)
            else:
                self._records.add(record)
        return record

    async def withdraw(self) -> None:
        """Replace this node's record by a withdrawal; a no-op before `publish`.

        The withdrawal expires after the record.
        """
        if self._own_record is not None and self._own_record.state != "withdrawn":
            fields = self._own_record.model_dump(include=set(NodeStatus.model_fields))
            await self.publish(NodeStatus.model_validate({**fields, "state": "withdrawn"}))

    async def fetch(
        self, model_id: ModelId, num_blocks: int | None = None, *, reports: bool = True
    ) -> Snapshot:
        """Fetch the records of `model_id` and return a snapshot of its nodes.

        DHT members that do not answer within `FETCH_TIMEOUT_S` are left out; if none does, the
        snapshot is made of remembered records that have not expired. `num_blocks` is as in
        `snapshot`. With `reports`, reports of failures are fetched at the same time.
        """
        if reports:
            await asyncio.gather(
                self._fetch_records(model_id, num_blocks),
                self._notices.fetch(FailureReport, model_id),
            )
        else:
            await self._fetch_records(model_id, num_blocks)
        return self.snapshot(model_id, num_blocks)

    async def fetch_one(self, model_id: ModelId, *, members: int = 1) -> None:
        """Fetch the records of `model_id` from one DHT member, at a tenth of `fetch`'s traffic.

        Of `members` that are asked at once the first answer counts.
        """
        keys = self._keys_to_read(model_id)
        found = await asyncio.gather(*(self._dht_store.find(key, members=members) for key in keys))
        # A node that one member does not name may exist all the same.
        await self._remember(interleave(found), is_complete=False)

    async def try_fetch_one(self, model_id: ModelId) -> bool:
        """`fetch_one` at `_FETCH_ONE_MEMBERS` members; False if none answers within
        `_FETCH_ONE_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(_FETCH_ONE_TIMEOUT_S):
                await self.fetch_one(model_id, members=_FETCH_ONE_MEMBERS)
        except TimeoutError:
            log.info("quick_fetch_timed_out", timeout_s=_FETCH_ONE_TIMEOUT_S)
            return False
        return True

    def snapshot(self, model_id: ModelId, num_blocks: int | None = None) -> Snapshot:
        """Make a snapshot of the nodes of `model_id` from remembered records.

        Records with another number of blocks are left out. The right number is `num_blocks`, else
        that of `set_num_blocks`, else that of most records.
        """
        records = self._model_records(model_id)
        num_blocks, agreed = self._agreed_records(model_id, records, num_blocks)
        if len(agreed) < len(records):
            self.dropped["num_blocks"] += len(records) - len(agreed)
        agreed = self._even_sample(agreed, num_blocks)
        blames = self._reputation.blames(model_id, records)
        serving, joining = (
            tuple(self._state(record, blames) for record in agreed if record.state == state)
            for state in ("serving", "joining")
        )
        moving = tuple(
            replace(record.node_state(), span=Span(*record.next_span))
            for record in agreed
            if record.state == "draining" and record.next_span is not None
        )
        return Snapshot(model_id, num_blocks, serving, self._clock(), joining=(*joining, *moving))

    def count_holders_and_states(
        self, model_id: ModelId, num_blocks: int | None = None
    ) -> tuple[tuple[int, ...], Counter[str]]:
        """Count serving nodes by block, and nodes by state, in remembered records.

        `num_blocks` is as in `snapshot`, which takes several times as long.
        """
        records = self._model_records(model_id)
        num_blocks, agreed = self._agreed_records(model_id, records, num_blocks)
        serving = (record.span for record in agreed if record.state == "serving")
        holders = count_span_holders(serving, num_blocks)
        return holders, Counter(record.state for record in agreed)

    def addresses(self, model_id: ModelId, num_blocks: int) -> dict[PeerId, tuple[str, ...]]:
        """Addresses of all nodes of a model, from remembered records."""
        _, agreed = self._agreed_records(model_id, self._model_records(model_id), num_blocks)
        return {record.signer: record.addresses for record in agreed}

    def blames(self, model_id: ModelId) -> Mapping[PeerId, float]:
        """Blame of each peer for reported failures, as of now (`routing/reputation.py`)."""
        return self._reputation.blames(model_id, self._model_records(model_id))

    def speed_doubts(self, model_id: ModelId) -> Mapping[PeerId, float]:
        """Peers reported to be slower than they announce, with weights
        (`ReputationView.speed_doubts`)."""
        return self._reputation.speed_doubts(model_id, self._model_records(model_id))

    def measured_links(self, snapshot: Snapshot) -> dict[PeerId, tuple[MeasuredLink, ...]]:
        """Links announced by the nodes of `snapshot` in their newest records."""
        nodes = (*snapshot.nodes, *snapshot.joining)
        records = {node.peer_id: self.record(node.peer_id) for node in nodes}
        return {peer: record.measured_links() if record else () for peer, record in records.items()}

    def with_links(self, snapshot: Snapshot) -> Snapshot:
        """`snapshot` with the links that its nodes have measured among themselves."""
        return replace(snapshot, links=assemble_links(self.measured_links(snapshot)))

    async def fetch_all(self) -> list[NodeRecord]:
        """Fetch the records of all models, sorted by model, span and peer id.

        Without records that have a wrong number of blocks (`set_num_blocks`). Members that do
        not answer are left out, as in `fetch`.
        """
        await self._remember(await self._search(ALL_NODES_KEY))
        records = [
            record
            for record in self._live_records()
            if self._num_blocks.get(ModelId(record.model_id)) in (None, record.num_blocks)
        ]
        return sorted(records, key=lambda record: (record.model_id, record.span, record.peer_id))

    def withdrawn_records(self) -> list[NodeRecord]:
        """Remembered withdrawals that have not expired."""
        return [record for record in self._unexpired_records() if record.state == "withdrawn"]

    def _state(self, record: NodeRecord, blames: Mapping[PeerId, float]) -> NodeState:
        blame = blames.get(record.signer, 0.0)
        return replace(record.node_state(), reliability=self._reputation.reliability(record, blame))

    def _next_record(self, status: NodeStatus) -> NodeRecord:
        """Make a record of `status`; its sequence number and expiry rise, also after a restart."""
        now = self._clock()
        own = self._own_record or self._records.get(self._peer_id)
        last_seq = max(-1 if own is None else own.seq, self._validator.newest_seq(self._peer_id))
        expires_at = now + self.ttl_s
        if own is not None:
            expires_at = max(expires_at, own.expires_at + 0.001)
        fields = status.model_dump(include=set(NodeStatus.model_fields))
        return NodeRecord(
            **fields,
            peer_id=self._peer_id,
            seq=max(int(now * 1000), last_seq + 1),
            issued_at=max(now, expires_at - MAX_RECORD_TTL_S),
            expires_at=expires_at,
            addresses=self._transport.addresses[:MAX_ADDRESSES],
            shard_level=self._shard_writer.level,
        )

    async def _search(self, key: str) -> Iterable[bytes]:
        """Fetch the sealed records under `key`; an isolated node rejoins the DHT first."""
        found = await self._dht_store.find(key)
        if self._rejoiner.is_isolated and await self._rejoiner.rejoin(self._other_records()):
            found = await self._dht_store.find(key)
        return found

    def _other_records(self) -> list[NodeRecord]:
        return [record for record in self._live_records() if record.peer_id != self._peer_id]

    async def _fetch_records(self, model_id: ModelId, num_blocks: int | None) -> None:
        """Fetch the records under the model's key, or the column of this node where there are
        shards; then, for blocks with few holders, those of adjacent levels, then from the root and
        further shards."""
        levels = self._shard_levels(self._model_records(model_id))
        if not any(levels):
            await self._remember(await self._search(model_key(model_id)))
            levels = self._shard_levels(self._model_records(model_id))
            if not any(levels):
                return
        await self._fetch_keys(self._keys_to_read(model_id))
        ranges = self._lacking_ranges(model_id, num_blocks)
        if ranges:
            beside = adjacent_shards(self._peer_id, levels, ranges)
            await self._fetch_keys([shard.key(model_id) for shard in beside])
            ranges = self._lacking_ranges(model_id, num_blocks)
        if ranges:
            self._num_fetches += 1
            more = further_shards(self._peer_id, levels, ranges, self._num_fetches, _FURTHER_SHARDS)
            await self._fetch_keys([model_key(model_id), *(each.key(model_id) for each in more)])

    def _keys_to_read(self, model_id: ModelId) -> list[str]:
        """Keys of this node's column; with the root, if any range of blocks has no shards."""
        levels = self._shard_levels(self._model_records(model_id))
        keys = [shard.key(model_id) for shard in column_shards(self._peer_id, levels)]
        return keys if all(levels) else [model_key(model_id), *keys]

    async def _fetch_keys(self, keys: Sequence[str]) -> None:
        found = await asyncio.gather(*(self._search(key) for key in keys))
        await self._remember(interleave(found))

    def _lacking_ranges(self, model_id: ModelId, num_blocks: int | None) -> list[int]:
        """Ranges with a block that has less than `MIN_HOLDERS` holders in remembered records."""
        holders, _ = self.count_holders_and_states(model_id, num_blocks)
        return sorted(
            {
                find_block_range(Span(block, block + 1), len(holders))
                for block, count in enumerate(holders)
                if count < MIN_HOLDERS
            }
        )

    def _shard_levels(self, records: Iterable[NodeRecord]) -> tuple[int, ...]:
        """The level of each range of a model's blocks, as `records` of other nodes announce it."""
        return median_levels(
            (Span(*record.span), record.num_blocks, record.shard_level)
            for record in records
            if record.peer_id != self._peer_id
        )

    def _adopt_level(self, status: NodeStatus) -> None:
        """Begin with the level of the nodes of the same model and range of blocks; a withdrawal
        goes where the record is."""
        own = self._own_record
        index = find_block_range(Span(*status.span), status.num_blocks)
        if own is not None and status.state == "withdrawn":
            self._shard_writer.level = own.shard_level
            return
        if (
            own is None
            or own.model_id != status.model_id
            or index != find_block_range(Span(*own.span), own.num_blocks)
        ):
            self._shard_writer = ShardWriter()
        if self._shard_writer.level == 0:
            records = self._model_records(ModelId(status.model_id))
            self._shard_writer.adopt(self._shard_levels(records)[index])

    async def _store_record(self, record: NodeRecord, sealed: bytes) -> str | None:
        """Store a record under the keys of its level; returns what `DhtStore.put` does.

        A record in a shard lies also under the root and in the index if `ShardWriter` says so, if
        it is a withdrawal, or if its shard refuses it.
        """

        async def put(keys: Sequence[str]) -> str | None:
            return await self._dht_store.put(keys, sealed, record.expires_at, record.peer_id)

        model_id, writer = ModelId(record.model_id), self._shard_writer
        listed = [model_key(model_id), ALL_NODES_KEY]
        known = self._model_records(model_id)
        levels = self._shard_levels(known)
        index = find_block_range(Span(*record.span), record.num_blocks)
        ranges = [find_block_range(Span(*each.span), each.num_blocks) for each in known]
        if record.shard is None:
            failure = await put(listed)
            writer.record_stored(self._dht_store.num_records(model_key(model_id)))
            return failure
        key = record.shard.key(model_id)
        is_listed = record.state == "withdrawn" or writer.is_listed(self._peer_id)
        failure, not_listed = await asyncio.gather(put([key]), put(listed if is_listed else []))
        if failure is None:
            writer.record_stored(
                self._dht_store.num_records(key), levels[index], ranges.count(index), max(levels)
            )
            return None
        writer.record_refused(self._dht_store.num_records(key))
        return not_listed if is_listed else await put(listed)

    async def _remember(self, sealed_records: Iterable[bytes], *, is_complete: bool = True) -> None:
        """Check and remember records; complete results also drop expired ones as failed nodes."""
        async for record, _ in self._validator.open_all(NodeRecord, sealed_records):
            peer = record.signer
            known = self._records.get(peer)
            if known is not None and known.seq >= record.seq:
                continue
            is_trusted = record.model_id in self._num_blocks
            if not self._records.add(
                record, is_trusted_model=is_trusted, is_single_source=not is_complete
            ):
                self.dropped["full"] += 1
            if known is not None:
                self._reputation.histories.record_replacement(known, record)
        if is_complete:
            await self._drop_expired()

    async def _drop_expired(self) -> None:
        """Drop expired records and count their nodes as failed, unless all nodes are silent."""
        now = self._clock()
        # If no record is new, this node itself may have been cut off.
        hears_others = any(
            record.issued_at > now - self.ttl_s and record.peer_id != self._peer_id
            for record in self._records
        )
        expired = [record for record in self._records if record.expires_at <= now]
        failed = self._failed_peers(expired)
        for number, record in enumerate(expired, 1):
            if number % STATEMENTS_PER_LOOP_TURN == 0:
                await asyncio.sleep(0)
            peer = record.signer
            if self._records.get(peer) is not record:
                continue  # Renewed in the meantime, or dropped by a concurrent fetch.
            self._records.drop(peer)
            if hears_others and peer in failed:
                self._reputation.histories.record_expiry(record)

    def _failed_peers(self, expired: Sequence[NodeRecord]) -> set[PeerId]:
        """Peers of `expired` records whose next record this node would have read.

        Where there are shards it reads its own column only. Nodes of a shard that is split or
        merged leave it together, so that it has fewer recent records than expired ones.
        """
        names = {record.model_id for record in expired}
        models = {name: self._model_records(ModelId(name)) for name in names}
        read: set[tuple[str, Shard]] = set()
        has_root: set[str] = set()
        for model, records in models.items():
            levels = self._shard_levels(records)
            read |= {(model, shard) for shard in column_shards(self._peer_id, levels)}
            has_root |= set() if all(levels) else {model}
        recent_s = self._clock() - _RECENT_SHARE * self.ttl_s
        num_recent = Counter(
            (model, record.shard)
            for model, records in models.items()
            for record in records
            if record.issued_at > recent_s
        )
        num_expired = Counter((record.model_id, record.shard) for record in expired)

        def is_read(record: NodeRecord) -> bool:
            if record.shard is None:
                return record.model_id in has_root
            place = record.model_id, record.shard
            return place in read and num_recent[place] >= num_expired[place]

        return {record.signer for record in expired if is_read(record)} - {self._peer_id}

    def _unexpired_records(self) -> Iterator[NodeRecord]:
        now = self._clock()
        return (record for record in self._records if record.expires_at > now)

    def _live_records(self) -> list[NodeRecord]:
        return [record for record in self._unexpired_records() if record.state != "withdrawn"]

    def _model_records(self, model_id: ModelId) -> list[NodeRecord]:
        return [record for record in self._live_records() if record.model_id == model_id]

    def _agreed_records(
        self, model_id: ModelId, records: Sequence[NodeRecord], num_blocks: int | None
    ) -> tuple[int, list[NodeRecord]]:
        """Return the model's number of blocks, as `snapshot` finds it, and the records with it."""
        if num_blocks is None:
            num_blocks = self._num_blocks.get(model_id) or majority_num_blocks(records)
        return num_blocks, [record for record in records if record.num_blocks == num_blocks]

    def _even_sample(self, records: list[NodeRecord], num_blocks: int) -> list[NodeRecord]:
        """The records that a planner may count by block (`even_sample`)."""
        levels = self._shard_levels(records)
        if not any(levels):
            return records
        nodes = [(record.signer, Span(*record.span)) for record in records]
        kept = even_sample(nodes, self._peer_id, levels, num_blocks)
        return [record for record, is_kept in zip(records, kept, strict=True) if is_kept]
