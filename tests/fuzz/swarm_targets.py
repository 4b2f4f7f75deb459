"""What a node reads from peers over the DHT and from libp2p's daemon."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from nesa_node.core.errors import NesaError, PeerUnreachableError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm import node as node_module
from nesa_node.swarm.dht.digests import FindMode, FindOption, KeySummary, digest_parts
from nesa_node.swarm.dht.message_codec import (
    load_value,
    pack_records,
    parse_message,
    unpack_records,
)
from nesa_node.swarm.dht.pool_notices import NOTICE_KINDS
from nesa_node.swarm.dht.records import ALL_NODES_KEY, NodeRecord, model_key
from nesa_node.swarm.dht.rpc import PROTOCOL_PREFIX, CallBudget, DhtRpc, node_id_of
from nesa_node.swarm.dht.sealing import open_statement, read_kind, seal_statement
from nesa_node.swarm.dht.validator import RecordValidator, dht_id
from nesa_node.swarm.p2p.control import UnaryCalls, pack_multiaddr, read_protobuf
from nesa_node.swarm.p2p.dial_addresses import choose_dial_addresses
from nesa_node.swarm.p2p.hivemind_imports import DHTID, PeerID, dht_pb2, p2pd_pb2
from nesa_node.swarm.p2p.identity import (
    Identity,
    Membership,
    base58_decode,
    base58_encode,
    public_key_bytes,
)
from nesa_node.swarm.p2p.pipe import SCRATCH_BYTES, Pipe
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.p2p.transport import split_peer_address
from tests.fuzz.mutation import MSGPACK, PROTOBUF
from tests.fuzz.target import Parse, Target
from tests.swarm.notice_fields import make_notice
from tests.swarm.record_fields import MODEL_ID, make_record

NOW = 2_000_000_000.0
KEY = dht_id(model_key(ModelId(MODEL_ID)))
_METHODS = ("rpc_ping", "rpc_find", "rpc_store")
_WITH_OPTION = b"\x82"
"""First byte from which on an answer is one to a find with an option; 1 modulo 3."""


def _identity() -> Identity:
    with tempfile.TemporaryDirectory(prefix="nesa-fuzz-") as directory:
        return Identity.ephemeral(Path(directory))


IDENTITY = _identity()
PEER = IDENTITY.peer_id
NODE_ID = node_id_of(base58_decode(PEER))


def sealed_statements() -> list[bytes]:
    record = make_record(IDENTITY, NOW, location=(1.0, 2.0), codecs=("int8:64",), next_span=(0, 3))
    notices = [make_notice(kind, IDENTITY, NOW) for kind in NOTICE_KINDS.values()]
    return [
        seal_statement(record, IDENTITY),
        *(seal_statement(notice, IDENTITY) for notice in notices),
    ]


def trust(*_: object) -> bool:
    return True


def _now() -> float:
    """Not a mock, which would keep all calls."""
    return NOW


@contextmanager
def trusting() -> Iterator[None]:
    """Takes all signatures for right: a peer can make right ones for whatever it says."""
    with mock.patch("nesa_node.swarm.dht.sealing.verify_signature", new=trust):
        yield


class _NoNetwork:
    """`UnaryCalls` whose peers all answer `answer`."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[PeerId, bytes], Awaitable[bytes]]] = {}
        self.answer: bytes | None = None

    async def add_handler(self, protocol: str, handler: Any) -> None:
        self.handlers[protocol.removeprefix(PROTOCOL_PREFIX)] = handler

    async def remove_handler(self, protocol: str) -> None:
        pass

    async def call(self, *_: object) -> bytes:
        if self.answer is None:
            raise PeerUnreachableError("there is no network")
        return self.answer

    def fail_pending(self) -> None:
        pass


class _Member:
    """A member of the DHT, all of it real but the network."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.network = _NoNetwork()
        membership = Membership(None)
        self.validator = RecordValidator(membership, clock)
        own = _identity().peer_id
        self.peer = DhtRpc(own, self.network, self.validator, membership)  # type: ignore[arg-type]
        self.peer._budget = CallBudget(lambda: 0.0, burst_units=1e12)
        self._node: Any = None

    async def protocol(self) -> Any:
        """Made by the first who asks: that takes an event loop."""
        if self._node is None:
            opening = node_module._dht_node(self.peer, self.validator, listen=True)
            self._node = await opening.__aenter__()
            self._opening = opening
        return self._node.protocol


@contextmanager
def _requests() -> Iterator[Parse]:
    member = _Member(lambda: NOW)

    async def parse(data: bytes) -> None:
        await member.protocol()
        method = _METHODS[data[0] % 3] if data else "rpc_find"
        try:
            await member.network.handlers[method](PEER, data[1:])
        finally:
            await asyncio.sleep(0)

    with trusting(), _hivemind_time():
        yield parse


@contextmanager
def _answers() -> Iterator[Parse]:
    member = _Member(lambda: NOW)
    target = PeerID.from_base58(PEER)
    find = dht_pb2.FindRequest(keys=[KEY])
    requests = {
        "rpc_ping": (dht_pb2.PingRequest(), dht_pb2.PingResponse),
        "rpc_find": (find, dht_pb2.FindResponse),
        "rpc_store": (dht_pb2.StoreRequest(), dht_pb2.StoreResponse),
    }

    async def parse(data: bytes) -> None:
        protocol = await member.protocol()
        method = _METHODS[data[0] % 3] if data else "rpc_find"
        member.network.answer = data[1:]
        request, kind = requests[method]
        option = None
        if method == "rpc_find" and data[:1] >= _WITH_OPTION:
            option = FindOption(FindMode.SUMMARY)
            request = dht_pb2.FindRequest(keys=[option.pack(), KEY])
        read = await member.peer.call_protobuf_handler(target, f"DHT.{method}", request, kind)
        if method == "rpc_find":
            # What has passed can be read.
            assert await protocol.find(target, DHTID.from_bytes(KEY), option), read
        await asyncio.sleep(0)

    with trusting(), _hivemind_time():
        yield parse


@contextmanager
def _hivemind_time() -> Iterator[None]:
    with mock.patch("hivemind.utils.timed_storage.get_dht_time", new=_now):
        yield


def _packed() -> bytes:
    return pack_records([(PEER, msgspec.msgpack.encode(each), NOW + 60) for each in _sealed()])


def _sealed() -> list[bytes]:
    return sealed_statements()


def _request_seeds() -> list[bytes]:
    info = dht_pb2.NodeInfo(node_id=NODE_ID)
    name = msgspec.msgpack.encode(PEER)
    records = [msgspec.msgpack.encode(each) for each in _sealed()]
    many = len(records)
    stores = dht_pb2.StoreRequest(
        keys=[KEY] * many, subkeys=[name] * many, values=records, in_cache=[False] * many,
        expiration_time=[NOW + 60] * many, peer=info,
    )  # fmt: skip
    whole = dht_pb2.StoreRequest(
        keys=[KEY], subkeys=[b""], values=[_packed()], expiration_time=[NOW + 60], in_cache=[True]
    )
    find = dht_pb2.FindRequest(keys=[KEY, dht_id(ALL_NODES_KEY)], peer=info)
    ping = dht_pb2.PingRequest(peer=info, validate=True)
    return [
        b"\0" + ping.SerializeToString(),
        b"\1" + find.SerializeToString(),
        *(
            b"\1" + dht_pb2.FindRequest(keys=[FindOption(mode, 5).pack(), KEY]).SerializeToString()
            for mode in FindMode
        ),
        b"\2" + stores.SerializeToString(),
        b"\2" + whole.SerializeToString(),
    ]


def _answer_seeds() -> list[bytes]:
    info = dht_pb2.NodeInfo(node_id=NODE_ID)
    raw = base58_decode(PEER)
    result = dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY, value=_packed(), expiration_time=NOW + 60,
        nearest_node_ids=[NODE_ID], nearest_peer_ids=[raw],
    )  # fmt: skip
    nothing = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
    packed = KeySummary(1, digest_parts([("a", b"", NOW)])).pack()
    summary = dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=packed)
    plain = dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=b"\xc4\x01a", expiration_time=NOW)
    return [
        b"\0" + dht_pb2.PingResponse(peer=info, dht_time=NOW).SerializeToString(),
        b"\1" + dht_pb2.FindResponse(results=[result], peer=info).SerializeToString(),
        b"\1" + dht_pb2.FindResponse(results=[plain], peer=info).SerializeToString(),
        _WITH_OPTION
        + dht_pb2.FindResponse(results=[nothing, summary], peer=info).SerializeToString(),
        b"\2" + dht_pb2.StoreResponse(store_ok=[True], peer=info).SerializeToString(),
    ]


@contextmanager
def _dictionaries() -> Iterator[Parse]:
    def parse(data: bytes) -> None:
        with suppress(NesaError):
            load_value(data)
        unpack_records(data)

    yield parse


@contextmanager
def _protobufs() -> Iterator[Parse]:
    kinds = (
        *(dht_pb2.PingRequest, dht_pb2.PingResponse, dht_pb2.FindRequest),
        *(dht_pb2.FindResponse, dht_pb2.StoreRequest, dht_pb2.StoreResponse),
    )

    def parse(data: bytes) -> None:
        parse_message(kinds[data[0] % 6 if data else 0], data[1:])

    yield parse


@contextmanager
def _statements() -> Iterator[Parse]:
    kinds = list(NOTICE_KINDS.values())
    validator = RecordValidator(Membership(None), lambda: NOW)
    name = msgspec.msgpack.encode(PEER)

    def parse(data: bytes) -> None:
        read_kind(data)
        for kind in kinds:
            with suppress(NesaError):
                open_statement(kind, data)
        with suppress(NesaError):
            validator.check(KEY, name, msgspec.msgpack.encode(data), NOW + 60)
        record = open_statement(NodeRecord, data)
        record.node_state()
        record.measured_links()
        choose_dial_addresses(record.addresses, (), public_only=True)

    with trusting():
        yield parse


@contextmanager
def _bodies() -> Iterator[Parse]:
    """The signed part alone, so that a mistake in the envelope does not hide it."""
    kinds = ("record", *NOTICE_KINDS)
    with _statements() as read:

        def parse(data: bytes) -> None:
            envelope = {
                "record": data[1:], "signature": bytes(64), "peer_id": PEER, "tag": b"",
                "kind": kinds[data[0] % len(kinds) if data else 0],
            }  # fmt: skip
            read(msgspec.msgpack.encode(envelope))

        yield parse


def _body_seeds() -> list[bytes]:
    envelopes = [msgspec.msgpack.decode(each) for each in _sealed()]
    return [
        bytes([("record", *NOTICE_KINDS).index(each.get("kind", "record"))]) + each["record"]
        for each in envelopes
    ]


class FakeTransport:
    """The event loop's side of a pipe whose other end takes everything."""

    def is_closing(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def fed_pipe(data: bytes) -> Pipe:
    """A pipe that `data` has come through, and then its end."""
    pipe = Pipe(bytearray(SCRATCH_BYTES))
    pipe.connection_made(FakeTransport())  # type: ignore[arg-type]
    pipe._unread += data
    pipe.eof_received()
    return pipe


@contextmanager
def _p2pd_frames() -> Iterator[Parse]:
    async def answer(peer: PeerId, data: bytes) -> bytes:
        return data

    async def parse(data: bytes) -> None:
        for kind in (p2pd_pb2.StreamInfo, p2pd_pb2.Response):
            with suppress(NesaError, OSError, asyncio.IncompleteReadError):
                await read_protobuf(fed_pipe(data), kind())
        tasks = TaskSet()
        calls = UnaryCalls(fed_pipe(data), tasks)
        calls._handlers["/nesa/1/dht/rpc_find"] = answer
        await calls.receive()
        await tasks.close()

    yield parse


def _frame(message: Any) -> bytes:
    data = bytes(message.SerializeToString())
    assert len(data) < 1 << 14
    return bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) + data


def _frame_seeds() -> list[bytes]:
    call = p2pd_pb2.PersistentConnectionResponse(
        callId=b"c" * 16,
        requestHandling=p2pd_pb2.CallUnaryRequest(
            peer=base58_decode(PEER), proto="/nesa/1/dht/rpc_find", data=b"data"
        ),
    )
    answer = p2pd_pb2.PersistentConnectionResponse(
        callId=b"d" * 16, callUnaryResponse=p2pd_pb2.CallUnaryResponse(error=b"no")
    )
    info = p2pd_pb2.StreamInfo(
        peer=base58_decode(PEER), addr=pack_multiaddr("/ip4/127.0.0.1/tcp/1"), proto="/nesa/session"
    )
    failed = p2pd_pb2.Response(
        type=p2pd_pb2.Response.ERROR, error=p2pd_pb2.ErrorResponse(msg="failed")
    )
    return [_frame(each) for each in (call, answer, info, failed)] + [_frame(call) * 3]


@contextmanager
def _addresses() -> Iterator[Parse]:
    def parse(data: bytes) -> None:
        text = data.decode("latin-1" if data[:1] == b"\0" else "utf-8", errors="replace")[:512]
        for public_only in (True, False):
            choose_dial_addresses([text, text[1:]], ["/ip4/1.2.3.4/tcp/1"], public_only=public_only)
        with suppress(ValueError):
            base58_decode(text)
        with suppress(ValueError):
            public_key_bytes(PeerId(text))
        _, peer = split_peer_address(text)
        with suppress(ValueError):
            base58_encode(base58_decode(peer))

    yield parse


def _address_seeds() -> list[bytes]:
    texts = (
        f"/ip4/10.0.0.1/tcp/31330/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/31330/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/1/ip6zone/p2p/tcp/2/p2p/{PEER}",
        f"/dns4/example.org/tcp/443/wss/p2p/{PEER}",
        f"/ip4/1.2.3.4/udp/1/quic-v1/webtransport/certhash/uEiA/p2p/{PEER}",
    )
    return [text.encode() for text in texts]


_ADDRESS_TOKENS = (
    *(b"/ip4/", b"/ip6/", b"/tcp/", b"/udp/", b"/p2p/", b"/unix/", b"/dns/", b"/p2p-circuit"),
    *(b"/onion3/", b"/garlic64/", b"/certhash/", b"/ip6zone/", b"99999", b"::", b"%", b"\xff"),
    *(b"1" * 200, b"/" * 50, b"/http-path/", b"/ipcidr/", b"/memory/", b"-1", "\u0661".encode()),
)

TARGETS: dict[str, Target] = {
    "dht_request": Target(
        open=_requests, seeds=_request_seeds, tokens=PROTOBUF + MSGPACK, weight=1.0
    ),
    "dht_answer": Target(open=_answers, seeds=_answer_seeds, tokens=PROTOBUF + MSGPACK, weight=1.0),
    "dht_dictionary": Target(open=_dictionaries, seeds=lambda: [_packed()], tokens=MSGPACK),
    "dht_protobuf": Target(
        open=_protobufs,
        seeds=lambda: _request_seeds() + _answer_seeds(),
        tokens=PROTOBUF,
        weight=2.0,
    ),
    "dht_statement": Target(open=_statements, seeds=sealed_statements, tokens=MSGPACK, weight=1.5),
    "dht_body": Target(open=_bodies, seeds=_body_seeds, tokens=MSGPACK, weight=2.0),
    "p2pd_frame": Target(open=_p2pd_frames, seeds=_frame_seeds, tokens=PROTOBUF, weight=0.5),
    "address": Target(open=_addresses, seeds=_address_seeds, tokens=_ADDRESS_TOKENS, weight=1.0),
}
