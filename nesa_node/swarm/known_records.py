"""Bounded table of the node records that this node remembers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nesa_node.core.ids import PeerId
from nesa_node.swarm.records import NodeRecord

MAX_NODES_PER_MODEL = 1024
"""Planning allocates arrays of nodes by nodes: 160 MiB, and a third of a second, for 1,024."""
MAX_NODES = 16_384
"""Nodes of all models together; models with a known number of blocks are exempt."""


class KnownRecords:
    """Newest record of each peer, including expired ones until they are dropped.

    Identities are free, so a full table refuses new peers instead of evicting old ones: invented
    records never displace those of nodes that were known before.
    """

    def __init__(self, own: PeerId) -> None:
        """The record of `own`, this node's peer id, is always accepted."""
        self._own = own
        self._records: dict[PeerId, NodeRecord] = {}
        self._per_model: Counter[str] = Counter()

    def __iter__(self) -> Iterator[NodeRecord]:
        return iter(self._records.values())

    def get(self, peer: PeerId) -> NodeRecord | None:
        return self._records.get(peer)

    def take(
        self, record: NodeRecord, *, is_trusted_model: bool = False, is_hearsay: bool = False
    ) -> bool:
        """Remember `record` in place of its peer's older one. False if the table is full.

        A trusted model may have `MAX_NODES_PER_MODEL` nodes however full the table is. New peers
        with `is_hearsay`, which only one DHT member named, may fill half of that: what a single
        member invents must leave room for what all members name.
        """
        peer = PeerId(record.peer_id)
        before = self._records.get(peer)
        if before is None or before.model_id != record.model_id:
            self.drop(peer)
            most = MAX_NODES_PER_MODEL // 2 if is_hearsay else MAX_NODES_PER_MODEL
            is_full = self._per_model[record.model_id] >= most or (
                len(self._records) >= MAX_NODES and not is_trusted_model
            )
            if is_full and peer != self._own:
                return False
            self._per_model[record.model_id] += 1
        self._records[peer] = record
        return True

    def drop(self, peer: PeerId) -> None:
        """Remove the record of `peer`, if there is one."""
        record = self._records.pop(peer, None)
        if record is not None:
            self._per_model[record.model_id] -= 1
            if not self._per_model[record.model_id]:
                del self._per_model[record.model_id]
