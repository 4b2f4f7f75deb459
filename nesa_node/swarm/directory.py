"""Directory of the swarm: publishes this node's record and reads those of all nodes.

A record is stored on the DHT twice, under its model's key and in the index of all nodes, each time
as one subkey (the peer id) of a dictionary on the five members nearest to the key. It is renewed
well before it expires; the record of a crashed node disappears after its time to live.
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
            record = self._next_record(status)
            sealed = seal_statement(record, self._identity, self._membership)
            self._own_record = record
            keys = [model_key(ModelId(record.model_id)), ALL_NODES_KEY]
            failure = await self._dht_store.put(keys, sealed, record.expires_at, record.peer_id)
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
            found, _ = await asyncio.gather(
                self._search(model_key(model_id)), self._notices.fetch(FailureReport, model_id)
            )
        else:
            found = await self._search(model_key(model_id))
        await self._remember(found)
        return self.snapshot(model_id, num_blocks)

    async def fetch_one(self, model_id: ModelId, *, members: int = 1) -> None:
        """Fetch the records of `model_id` from one DHT member, at a tenth of `fetch`'s traffic.

        Of `members` that are asked at once the first answer counts.
        """
        # A node that one member does not name may exist all the same.
        found = await self._dht_store.find(model_key(model_id), members=members)
        await self._remember(found, is_complete=False)

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
        )

    async def _search(self, key: str) -> Iterable[bytes]:
        """Fetch the sealed records under `key`; an isolated node rejoins the DHT first."""
        found = await self._dht_store.find(key)
        if self._rejoiner.is_isolated and await self._rejoiner.rejoin(self._other_records()):
            found = await self._dht_store.find(key)
        return found

    def _other_records(self) -> list[NodeRecord]:
        return [record for record in self._live_records() if record.peer_id != self._peer_id]

    async def _remember(self, sealed_records: Iterable[bytes], *, is_complete: bool = True) -> None:
        """Check and remember records; complete results also drop expired ones as failed nodes."""
        async for record in self._validator.open_all(NodeRecord, sealed_records):
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
        for number, record in enumerate(expired, 1):
            if number % STATEMENTS_PER_LOOP_TURN == 0:
                await asyncio.sleep(0)
            peer = record.signer
            if self._records.get(peer) is not record:
                continue  # Renewed in the meantime, or dropped by a concurrent fetch.
            self._records.drop(peer)
            if hears_others and peer != self._peer_id:
                self._reputation.histories.record_expiry(record)

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
