"""The node records that a peer remembers, within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nesa_node.core.ids import PeerId
from nesa_node.swarm.records import NodeRecord

MAX_NODES_PER_MODEL = 1024
"""Planning makes arrays of as many rows and columns: 160 MiB and a third of a second for these."""
MAX_NODES = 16_384
"""Of all models whose number of blocks is not known from a checkpoint."""


class KnownRecords:
    """The newest record of each peer, also an expired one until it is dropped.

    Identities are free, so a full table refuses new peers instead of forgetting old ones: records
    that a stranger makes up never displace those of nodes that were here before.
    """

    def __init__(self, own: PeerId) -> None:
        """There is always room for the record of `own`."""
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
        """Remember `record` in place of an older one of its peer. False if there is no room.

        A trusted model has the room of `MAX_NODES_PER_MODEL` whatever other models there are.
        Newcomers of `is_hearsay`, which one member named alone, get half of that room: what it
        makes up must leave some for what all members name.
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
        """Forget the record of `peer`, if there is one."""
        record = self._records.pop(peer, None)
        if record is not None:
            self._per_model[record.model_id] -= 1
            if not self._per_model[record.model_id]:
                del self._per_model[record.model_id]
