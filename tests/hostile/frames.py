"""Hostile bytes: a recording of every message, and what a seeded generator makes of them."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nesa_node.compression.tensors import TensorMeta
from nesa_node.swarm.protocol.any_message import encode_message
from nesa_node.swarm.protocol.messages import (
    VERSION,
    Busy,
    Cancel,
    Close,
    Closed,
    Downstream,
    ErrorMessage,
    HandedOver,
    HandOver,
    Leaving,
    Link,
    Linked,
    Message,
    Open,
    Opened,
    Output,
    Pages,
    Ping,
    Pong,
    PushOpen,
    PushOpened,
    QuantizedPages,
    Reorder,
    Reordered,
    Rollback,
    RolledBack,
    RowSlice,
    Step,
    Sync,
    Synced,
    TransferOpen,
    TransferOpened,
)
from nesa_node.swarm.protocol.stream import MAX_CHUNK_BYTES, MAX_HEADER_BYTES

ROWS, MAX_TOKENS, TOKENS = 2, 24, 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What an attacker knows of the node it attacks; anybody can read it from the DHT."""

    peer_id: str
    addresses: tuple[str, ...]
    model_id: str
    blocks: tuple[int, int]
    hidden_size: int
    cache_heads: tuple[int, int]
    """How many, and how wide."""


def frame(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<II", len(header), len(payload)) + header + payload


def message_frame(message: Message, payload: bytes = b"", **changes: Any) -> bytes:
    """A message whose fields may be changed to what its type would never allow."""
    fields = {**msgspec.to_builtins(message, builtin_types=(bytes,)), **changes}
    return frame(msgspec.msgpack.encode(fields), payload)


def open_message(facts: Facts, rng: random.Random, **changes: Any) -> Open:
    fields: dict[str, Any] = {
        "version": VERSION,
        "model": facts.model_id,
        "session": rng.randbytes(16),
        "secret": rng.randbytes(32),
        "blocks": facts.blocks,
        "rows": ROWS,
        "max_tokens": MAX_TOKENS,
        "mode": "star",
        "dtype": "float32",
        "epoch": 0,
        "upstream": None,
    }
    return Open(**{**fields, **changes})


def recordings(facts: Facts, rng: random.Random) -> list[bytes]:
    """One valid frame of every message type of the protocol."""
    session, secret = rng.randbytes(16), rng.randbytes(32)
    meta = TensorMeta(dtype="float32", shape=(TOKENS, facts.hidden_size))
    payload = bytes(TOKENS * facts.hidden_size * 4)
    rows = (RowSlice(0, 0, TOKENS),)
    down = Downstream(peer=facts.peer_id, blocks=(facts.blocks[1], facts.blocks[1] + 1))
    plain: list[Message] = [
        open_message(facts, rng),
        Opened(version=VERSION, max_tokens=9, context_length=99, step_timeout_s=3.0),
        Busy(retry_after_s=1.0, free_tokens=3, message="later"),
        Link(epoch=1, upstream=None, downstream=down, lengths=(0, 0), emit_from=(0, 0)),
        Linked(epoch=1),
        PushOpen(version=VERSION, session=session, secret=secret, epoch=1),
        PushOpened(epoch=1),
        Rollback(epoch=2, lengths=(0, 0)),
        RolledBack(epoch=2),
        Ping(nonce=7),
        Pong(nonce=7, epoch=1, step=3, busy=False),
        Leaving(seconds=1.0),
        Cancel(),
        Close(),
        Closed(),
        ErrorMessage(code="bad_frame", message="no"),
        HandOver(to=Downstream(peer=facts.peer_id, blocks=facts.blocks)),
        HandedOver(peer=facts.peer_id, lengths=(0, 0)),
        TransferOpen(version=VERSION, session=session, secret=secret),
        TransferOpened(),
        Sync(lengths=(0, 0)),
        Synced(lengths=(0, 0)),
        Reorder(epoch=2, sources=(1, 0)),
        Reordered(epoch=2),
    ]
    sides = 2 * (facts.blocks[1] - facts.blocks[0])
    cached = TensorMeta(dtype="float32", shape=(sides, TOKENS, *facts.cache_heads))
    pages = Pages(row=0, position=0, tensor=cached)
    codes = QuantizedPages(row=0, position=0, count=TOKENS, nbytes=100)
    step = Step(session=session, epoch=1, step=1, rows=rows, tensor=meta)
    output = Output(epoch=1, step=1, rows=rows, tensor=meta)
    return [
        *(frame(encode_message(message)) for message in plain),
        *(frame(encode_message(message), payload) for message in (step, output)),
        frame(encode_message(pages), bytes(cached.nbytes)),
        frame(encode_message(codes), bytes(codes.nbytes)),
    ]


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(1, len(data))]


def bit_flipped(data: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(data)
    # The head of a frame is where a flipped bit changes its meaning; a payload has few of those.
    span = min(len(flipped), 400)
    for _ in range(rng.randint(1, 6)):
        flipped[rng.randrange(span)] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def spliced(one: bytes, other: bytes, rng: random.Random) -> bytes:
    return one[: rng.randrange(len(one))] + other[rng.randrange(len(other)) :]


def impossible(rng: random.Random) -> bytes:
    """A frame that no decoder may accept, whatever comes after it."""
    huge = rng.choice([MAX_HEADER_BYTES + 1, 1 << 20, 1 << 31, (1 << 32) - 1])
    header = encode_message(Close())
    return rng.choice(
        [
            struct.pack("<II", huge, 0) + rng.randbytes(64),
            struct.pack("<II", 0, rng.randrange(MAX_CHUNK_BYTES)),
            struct.pack("<II", len(header), max(huge, MAX_CHUNK_BYTES + 1)) + header,
            frame(header, b"a payload that no close has"),
            frame(header + b"\0"),
            frame(rng.randbytes(rng.randrange(1, 300))),
            frame(b"\xc1"),
            # Announces 2^32 - 1 elements, entries, characters or bytes, and brings none.
            *(frame(head + b"\xff" * 4) for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")),
            frame(b"\x81" * 30_000),  # maps in maps
            frame(b"\x91" * 60_000),  # arrays in arrays
            frame(b"\x81\xa1t" + b"\x91" * 50_000),
            frame(msgspec.msgpack.encode({"t": "step" * 9000})),
            frame(msgspec.msgpack.encode({"t": rng.randrange(100)})),
            frame(msgspec.msgpack.encode({"nonce": 1})),
            frame(b"\x81\xa1t\xa4\xff\xfe\xfd\xfc"),  # a name that is not UTF-8
        ]
    )


def mutate(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Something else than `data`, or one of `others`."""
    return rng.choice(
        [
            truncated(data, rng),
            bit_flipped(data, rng),
            spliced(data, rng.choice(others), rng),
            rng.choice(others),
            impossible(rng),
            rng.randbytes(rng.randint(1, 600)),
        ]
    )
