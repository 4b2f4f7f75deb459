from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nesa_node.core.errors import RecordError
from nesa_node.core.ids import ModelId, Span
from nesa_node.swarm.dht.records import ALL_NODES_KEY, MAX_RECORD_BYTES, NodeRecord, model_key
from nesa_node.swarm.dht.sealing import seal_statement
from nesa_node.swarm.dht.shards import NUM_RANGES, Shard, find_shard
from nesa_node.swarm.dht.validator import RecordValidator, dht_id
from nesa_node.swarm.p2p.hivemind_imports import DHTProtocol, DHTRecord, MSGPackSerializer
from nesa_node.swarm.p2p.identity import Identity, Membership
from tests.swarm.record_fields import MODEL_ID, make_record

NOW = 1_800_000_000.0
KEY = dht_id(model_key(ModelId(MODEL_ID)))


class _Member:
    """A validator with a clock to turn, and a peer whose records it sees."""

    def __init__(self, directory: Path) -> None:
        self.now = NOW
        self.validator = RecordValidator(Membership(None), lambda: self.now)
        self.peer = Identity.ephemeral(directory)
        self.stranger = Identity.ephemeral(directory)

    def wrap(self, record: NodeRecord, **changes: object) -> DHTRecord:
        fields: dict[str, object] = {
            "key": KEY,
            "subkey": MSGPackSerializer.dumps(record.peer_id),
            "value": MSGPackSerializer.dumps(seal_statement(record, self.peer)),
            "expiration_time": record.expires_at,
        }
        return DHTRecord(**{**fields, **changes})


@pytest.fixture
def member(tmp_path: Path) -> _Member:
    return _Member(tmp_path)


def test_signed_record_passes_under_its_model_and_the_index(member: _Member) -> None:
    record = make_record(member.peer, NOW)
    assert member.validator.validate(member.wrap(record))
    assert member.validator.validate(member.wrap(record, key=dht_id(ALL_NODES_KEY)))
    assert member.validator.dropped == {}


def test_record_passes_under_the_one_shard_of_its_level_bucket_and_range(member: _Member) -> None:
    record = make_record(member.peer, NOW, shard_level=4)
    own = find_shard(record.signer, Span(*record.span), record.num_blocks, 4)
    keys = {
        shard: dht_id(shard.key(ModelId(MODEL_ID)))
        for level in range(1, 6)
        for bucket in range(2 ** (level - 1))
        for shard in (Shard(level, index, bucket) for index in range(NUM_RANGES))
    }
    valid = {
        shard
        for shard, key in keys.items()
        if member.validator.validate(member.wrap(record, key=key))
    }
    assert valid == {own}
    assert member.validator.dropped == {"key": len(keys) - 1}
    wrapped = member.wrap(record)
    assert member.validator.validate(wrapped)
    assert member.validator.is_shard_record(keys[own], wrapped.value)
    assert not member.validator.is_shard_record(KEY, wrapped.value)
    assert not member.validator.is_shard_record(KEY, b"nonsense")
    without = make_record(member.peer, NOW, seq=2)
    assert not member.validator.validate(member.wrap(without, key=keys[own]))


def test_what_is_not_a_peers_own_record_is_dropped_and_counted(member: _Member) -> None:
    record = make_record(member.peer, NOW)
    unsigned = MSGPackSerializer.dumps(b"hello")
    cases = {
        "unwanted": {"subkey": DHTProtocol.IS_REGULAR_VALUE},
        "subkey": {"subkey": MSGPackSerializer.dumps(member.stranger.peer_id)},
        "key": {"key": dht_id(model_key(ModelId("other@0")))},
        "expiry": {"expiration_time": record.expires_at + 1},
        "oversized": {"value": MSGPackSerializer.dumps(bytes(MAX_RECORD_BYTES + 1))},
        "malformed": {"value": unsigned},
    }
    for reason, changes in cases.items():
        assert not member.validator.validate(member.wrap(record, **changes))
        assert member.validator.dropped[reason] == 1, reason
    huge = {"value": bytes(10**6)}
    assert not member.validator.validate(member.wrap(record, **huge))
    assert member.validator.dropped["oversized"] == 2
    text = {"value": MSGPackSerializer.dumps("text")}
    assert not member.validator.validate(member.wrap(record, **text))
    assert member.validator.dropped["malformed"] == 2


def test_subkey_must_be_encoded_in_the_one_way(member: _Member) -> None:
    """Else one peer could hold many subkeys that decode to the same id."""
    record = make_record(member.peer, NOW)
    text = record.peer_id.encode()
    longer = b"\xda" + len(text).to_bytes(2) + text
    assert msgspec.msgpack.decode(longer) == record.peer_id
    assert not member.validator.validate(member.wrap(record, subkey=longer))


def test_replaced_record_does_not_come_back(member: _Member) -> None:
    old = member.wrap(make_record(member.peer, NOW, seq=5))
    new = member.wrap(make_record(member.peer, NOW, seq=6, expires_at=NOW + 61, state="withdrawn"))
    assert member.validator.validate(old)
    assert member.validator.validate(new)
    assert not member.validator.validate(old)
    assert member.validator.dropped == {"stale": 1}
    assert member.validator.validate(new)
    assert member.validator.newest_seq(make_record(member.peer, NOW).node_state().peer_id) == 6


def test_remembered_record_still_expires(member: _Member) -> None:
    wrapped = member.wrap(make_record(member.peer, NOW))
    assert member.validator.validate(wrapped)
    member.now += 60
    assert not member.validator.validate(wrapped)
    assert member.validator.dropped == {"expired": 1}


def test_record_from_a_wrong_clock_is_dropped(member: _Member) -> None:
    record = make_record(member.peer, NOW + 100, expires_at=NOW + 160)
    assert not member.validator.validate(member.wrap(record))
    assert member.validator.dropped == {"future": 1}


def test_refusal_is_remembered_with_its_reason(member: _Member) -> None:
    for _ in range(2):
        with pytest.raises(RecordError) as caught:
            member.validator.open(NodeRecord, b"garbage")
        assert caught.value.reason == "malformed"
