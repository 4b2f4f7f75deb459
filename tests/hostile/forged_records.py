"""Records that must not be believed, pushed into a daemon's part of the DHT; and some that count
for nothing although they are in order."""

from __future__ import annotations

import random
import time
from typing import Any

from nesa_node.core.errors import NesaError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht.records import MAX_RECORD_BYTES, NodeRecord, model_key
from nesa_node.swarm.dht.rpc import PROTOCOL_PREFIX
from nesa_node.swarm.dht.sealing import seal_statement
from nesa_node.swarm.dht.validator import dht_id
from nesa_node.swarm.p2p.hivemind_imports import DHTProtocol, MSGPackSerializer, dht_pb2
from nesa_node.swarm.p2p.identity import Identity
from tests.hostile.attacker import Attacker
from tests.swarm.record_fields import make_record

REFUSED, STORED = "refused", "stored"


async def forged_records(attacker: Attacker, count: int) -> None:
    """Signed by another, changed, replayed, from other times, too large, under wrong keys."""
    rng, own = attacker.rng, attacker.swarm.identity
    old = await _sealed_records(attacker)
    for _ in range(count):
        now = time.time()
        mine = _record(attacker, own, now)
        sealed = seal_statement(mine, own)
        kind, changes = rng.choice(_forgeries(attacker, mine, sealed, old, now, rng))
        attacker.tally.note(f"record: {kind}", await _store(attacker, **changes), (REFUSED,))


def _forgeries(
    attacker: Attacker,
    mine: NodeRecord,
    sealed: bytes,
    old: list[bytes],
    now: float,
    rng: random.Random,
) -> list[tuple[str, dict[str, Any]]]:
    own, victim = attacker.swarm.identity, attacker.facts.peer_id
    flipped = bytearray(sealed)
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    base: dict[str, Any] = {"name": mine.peer_id, "sealed": sealed, "expires_at": mine.expires_at}
    expired = _record(attacker, own, now - 200)
    future = _record(attacker, own, now + 200)
    return [
        ("another's subkey", {**base, "name": victim}),
        ("bit flips", {**base, "sealed": bytes(flipped)}),
        ("replayed", {**base, "name": victim, "sealed": rng.choice(old), "expires_at": now + 60}),
        (
            "expired",
            {**base, "sealed": seal_statement(expired, own), "expires_at": expired.expires_at},
        ),
        (
            "future",
            {**base, "sealed": seal_statement(future, own), "expires_at": future.expires_at},
        ),
        ("longer life", {**base, "expires_at": mine.expires_at + 300}),
        ("oversized", {**base, "sealed": rng.randbytes(MAX_RECORD_BYTES + 1)}),
        ("malformed", {**base, "name": victim, "sealed": rng.randbytes(rng.randrange(200))}),
        ("wrong key", {**base, "key": rng.randbytes(20)}),
        ("regular value", {**base, "subkey": DHTProtocol.IS_REGULAR_VALUE}),
        ("dictionary", {**base, "subkey": DHTProtocol.IS_DICTIONARY}),
    ]


async def sybils(attacker: Attacker, count: int, folder: Any) -> None:
    """In order, each of an identity of its own, and a majority that denies the model's size."""
    for _ in range(count):
        identity = Identity.ephemeral(folder)
        record = _record(attacker, identity, time.time(), num_blocks=attacker.facts.blocks[1] + 40)
        answer = await _store(
            attacker,
            name=record.peer_id,
            sealed=seal_statement(record, identity),
            expires_at=record.expires_at,
        )
        attacker.tally.note("sybil", answer, (STORED,))


def _record(attacker: Attacker, identity: Identity, now: float, **changes: Any) -> NodeRecord:
    facts = attacker.facts
    fields = {
        "model_id": facts.model_id,
        "span": facts.blocks,
        "decode_tokens_per_s": 1e6,
        "free_cache_tokens": 10**6,
        "total_cache_tokens": 10**6,
        "seq": int(now * 1000),
    }
    return make_record(identity, now, **{**fields, **changes})


async def _sealed_records(attacker: Attacker) -> list[bytes]:
    key = model_key(ModelId(attacker.facts.model_id))
    return list(await attacker.swarm.directory._search(key))


async def _store(
    attacker: Attacker,
    *,
    name: str,
    sealed: bytes,
    expires_at: float,
    key: bytes | None = None,
    subkey: bytes | None = None,
) -> str:
    request = dht_pb2.StoreRequest(
        keys=[key or dht_id(model_key(ModelId(attacker.facts.model_id)))],
        subkeys=[MSGPackSerializer.dumps(name) if subkey is None else subkey],
        values=[MSGPackSerializer.dumps(sealed)],
        expiration_time=[expires_at],
        in_cache=[False],
    )
    try:
        answer = await attacker.swarm.transport.unary.call(
            PeerId(attacker.facts.peer_id),
            PROTOCOL_PREFIX + "rpc_store",
            request.SerializeToString(),
        )
    except NesaError:
        return REFUSED
    stored = dht_pb2.StoreResponse.FromString(answer).store_ok
    return STORED if all(stored) else REFUSED
