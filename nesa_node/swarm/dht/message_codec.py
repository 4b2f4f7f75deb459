"""Bounded parser of hivemind's DHT messages.

hivemind parses dictionaries of records recursively, one level per nested extension, without a limit
of depth: a kilobyte of nested extensions overflows the C stack and ends the process. Here a
dictionary is flat, one extension holding one array of `[subkey, value, expiration]`; anything else
is refused before it is built. Importing this module replaces hivemind's `MSGPackSerializer.loads`
by `load_value`. The bytes and fields of a protobuf are counted before it is parsed, since a field
of two bytes takes 16 in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.p2p.control import MAX_UNARY_MESSAGE_BYTES
from nesa_node.swarm.p2p.hivemind_imports import (
    DecodeError,
    DictionaryDHTValue,
    MSGPackSerializer,
    dht_pb2,
)

MAX_KEYS_PER_FIND = 16
MAX_KEYS_PER_STORE = 512
MAX_RECORDS_PER_CALL = 4096
KEY_BYTES = 20
MAX_PROTOBUF_FIELDS = 4096
"""Fields of one protobuf, without nested ones: a store has five for each key, and a few more."""

_MAX_MESSAGE_BYTES = {
    dht_pb2.PingRequest: 512,
    dht_pb2.PingResponse: 512,
    dht_pb2.FindRequest: 1024,
    dht_pb2.FindResponse: MAX_UNARY_MESSAGE_BYTES,
    dht_pb2.StoreRequest: MAX_UNARY_MESSAGE_BYTES,
    dht_pb2.StoreResponse: 4096,
}
_RESULTS_FIELD_NUMBER = dht_pb2.FindResponse.DESCRIPTOR.fields_by_name["results"].number
_DICTIONARY_CODE = 0x50
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10

_Record = tuple[Annotated[str, Meta(max_length=128)], bytes, float]
_Records = Annotated[list[_Record], Meta(max_length=MAX_RECORDS_PER_CALL)]
_extension_decoder = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_dictionary_decoder = msgspec.msgpack.Decoder(tuple[float | None, float, _Records])
_bytes_decoder: msgspec.msgpack.Decoder[bytes | None] = msgspec.msgpack.Decoder(bytes | None)
_encoder = msgspec.msgpack.Encoder()


def parse_message(kind: Any, data: bytes) -> Any:
    """Parse `data` as the protobuf class `kind` of `dht_pb2`. Raises `ProtocolError`."""
    if len(data) > _MAX_MESSAGE_BYTES[kind]:
        raise ProtocolError("too_large", f"a {kind.__name__} of {len(data)} bytes is too large")
    parts = list(_iter_fields(data, 0, len(data)))
    if kind is dht_pb2.FindResponse:
        if sum(number == _RESULTS_FIELD_NUMBER for number, _, _ in parts) > MAX_KEYS_PER_FIND:
            raise ProtocolError("too_large", "more results than keys fit into one call")
        for number, start, end in parts:
            if number == _RESULTS_FIELD_NUMBER:
                list(_iter_fields(data, start, end))
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError("malformed", f"not a {kind.__name__}") from error


def pack_records(records: Sequence[tuple[str, bytes, float]]) -> bytes:
    """Pack `records` (subkey, value, expiration) as hivemind writes a dictionary."""
    latest = max((expiration for _, _, expiration in records), default=-math.inf)
    body = _encoder.encode((math.inf, latest, records))
    return _encoder.encode(msgspec.msgpack.Ext(_DICTIONARY_CODE, body))


def unpack_records(packed: bytes) -> list[tuple[str, bytes, float]]:
    """Unpack a dictionary into (subkey, value, expiration) tuples. Raises `ProtocolError`."""
    try:
        extension = _extension_decoder.decode(packed)
        if extension.code == _DICTIONARY_CODE:
            return _dictionary_decoder.decode(extension.data)[2]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError("bad_answer", "not a flat dictionary of records") from error
    raise ProtocolError("bad_answer", f"extension {extension.code} is no dictionary of records")


def load_value(packed: bytes) -> Any:
    """Unpack a value of hivemind's DHT: records or bytes. Raises `ProtocolError`."""
    try:
        return _bytes_decoder.decode(packed)
    except msgspec.ValidationError:
        records = DictionaryDHTValue()
        with records.freeze():
            for record in unpack_records(packed):
                records.store(*record)
        return records
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError("malformed", "not a value of the DHT") from error


MSGPackSerializer.loads = staticmethod(load_value)


def _iter_fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, start, end) of each field in `data[start:end]`; groups are refused."""
    count = 0
    while start < end:
        tag, start = _read_varint(data, start, end)
        kind = tag & 7
        after = start
        if kind == _VARINT:
            _, after = _read_varint(data, start, end)
        elif kind == _LENGTH:
            size, start = _read_varint(data, start, end)
            after = start + size
        elif kind in (_FIXED64, _FIXED32):
            after = start + (8 if kind == _FIXED64 else 4)
        else:
            raise ProtocolError("malformed", f"a protobuf field of wire type {kind}")
        count += 1
        if after > end or count > MAX_PROTOBUF_FIELDS:
            raise ProtocolError("malformed", "a protobuf is cut short or has too many fields")
        yield tag >> 3, start, after
        start = after


def _read_varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[start : min(end, start + _MAX_VARINT_BYTES)]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, start + index + 1
    raise ProtocolError("malformed", "a protobuf's number is cut short or too long")
