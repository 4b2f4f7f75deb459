"""Client of the p2pd control socket.

Messages are protobufs (`p2pd.proto`), each after its length as a varint. A request has a connection
of its own, which becomes the stream itself after STREAM_OPEN; one persistent connection multiplexes
the unary calls that hivemind's DHT uses. hivemind's own client is not used: it leaks a socket when
a request is cancelled, never ends calls after the daemon died, and keeps every cancelled handler in
memory.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from nesa_node.core.errors import ConfigError, PeerUnreachableError, RemoteError, SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import escape_lines, escape_text, get_logger
from nesa_node.swarm.p2p.hivemind_imports import DecodeError, Multiaddr, p2pd_pb2
from nesa_node.swarm.p2p.identity import PEER_ID_HEADER, base58_decode, base58_encode
from nesa_node.swarm.p2p.p2pd import parse_multiaddr
from nesa_node.swarm.p2p.pipe import SCRATCH_BYTES, Pipe, open_pipe
from nesa_node.swarm.p2p.tasks import TaskSet

log = get_logger(__name__)

MAX_UNARY_MESSAGE_BYTES = 4 * 1024**2
"""p2pd's own limit for one unary message."""

_MAX_UNARY_TASKS = 512
_MAX_UNARY_TASKS_PER_PEER = 64
"""Concurrent calls that an honest peer makes when it starts many DHT lookups at once."""
_MAX_UNARY_BYTES = 64 * 1024**2
"""Request bytes of all calls that are being answered."""
_MAX_UNARY_BYTES_PER_PEER = 2 * MAX_UNARY_MESSAGE_BYTES
_MAX_VARINT_BYTES = 5
_P2P_PROTOCOL_CODE = bytes.fromhex("a503")
_PEER_ID_IN_ADDRESS = re.compile(r"/p2p/([^/]+)")

UnaryHandler = Callable[[PeerId, bytes], Awaitable[bytes]]


async def read_protobuf(pipe: Pipe, message: Any) -> None:
    """Read one protobuf into `message`. Raises `SwarmError` if it is oversized or malformed."""
    size = 0
    for position in range(_MAX_VARINT_BYTES):
        byte = (await pipe.readexactly(1))[0]
        size |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            break
    if size > 2 * MAX_UNARY_MESSAGE_BYTES:
        raise SwarmError(f"p2pd announced a message of {size} bytes")
    data = await pipe.readexactly(size)
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise SwarmError("p2pd sent what is not a message") from error


def write_protobuf(pipe: Pipe, message: Any) -> None:
    size = message.ByteSize()
    prefix = bytearray()
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    pipe.write(bytes(prefix) + message.SerializeToString())


def pack_multiaddr(address: str) -> bytes:
    """Pack a multiaddress as p2pd reads it. Raises `ConfigError` for a malformed one.

    hivemind's `Multiaddr` writes a peer within an address (mostly a relay's) as a CID. p2pd expects
    the bare peer id, and because of one such address refuses the whole list.
    """
    pieces = _PEER_ID_IN_ADDRESS.split(address)
    packed = bytearray()
    for number, piece in enumerate(pieces):
        if number % 2:
            try:
                peer = base58_decode(piece)
            except ValueError as error:
                raise ConfigError(f"{piece!r} is not a peer id in base 58") from error
            packed += _P2P_PROTOCOL_CODE + bytes([len(peer)]) + peer
        elif piece:
            # Raises for a piece that is no multiaddress: "p2p" may also be the name of a zone.
            packed += parse_multiaddr(piece).to_bytes()
    return bytes(packed)


class ControlSocket:
    """Requests to p2pd; its errors become `PeerUnreachableError` with p2pd's own text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.scratch = bytearray(SCRATCH_BYTES)
        """Receive buffer shared by all pipes of this event loop."""

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """This node's peer id and the addresses at which it can be dialled, without `/p2p/`."""
        response = await self._request("IDENTIFY")
        addresses = tuple(str(Multiaddr(raw)) for raw in response.identify.addrs)
        return PeerId(base58_encode(response.identify.id)), addresses

    async def connect(self, peer: PeerId, packed: Sequence[bytes], timeout_s: float) -> None:
        """Dial `peer` at `packed` addresses; returns at once if it is already connected."""
        timeout = max(1, round(timeout_s))
        connect = p2pd_pb2.ConnectRequest(peer=base58_decode(peer), addrs=packed, timeout=timeout)
        await self._request("CONNECT", connect=connect)

    async def disconnect(self, peer: PeerId) -> None:
        disconnect = p2pd_pb2.DisconnectRequest(peer=base58_decode(peer))
        await self._request("DISCONNECT", disconnect=disconnect)

    async def connected_peers(self) -> tuple[PeerId, ...]:
        response = await self._request("LIST_PEERS")
        return tuple(PeerId(base58_encode(peer.id)) for peer in response.peers)

    async def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Remote addresses of the connections to `peer`; empty if it is not connected."""
        response = await self._request("LIST_PEERS")
        wanted = base58_decode(peer)
        return tuple(
            str(Multiaddr(address))
            for listed in response.peers
            if listed.id == wanted
            for address in listed.addrs
        )

    async def has_routing_peers(self) -> bool:
        """Whether libp2p's own routing table has a peer; false until the first handshake."""
        query = p2pd_pb2.DHTRequest(
            type=p2pd_pb2.DHTRequest.FIND_PEER, peer=PEER_ID_HEADER + bytes(32), timeout=1
        )
        try:
            await self._request("DHT", dht=query)
        except PeerUnreachableError as error:
            return "failed to find any peer in table" not in str(error)
        return True

    async def forward_streams(self, protocol: str, listener: Path) -> None:
        """Have p2pd connect to the unix socket `listener` for each incoming `protocol` stream."""
        handler = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False
        )
        await self._request("STREAM_HANDLER", streamHandler=handler)

    async def open_stream(self, peer: PeerId, protocol: str, timeout_s: float) -> Pipe:
        """Open a stream to `peer`, which the caller closes."""
        opening = p2pd_pb2.StreamOpenRequest(
            peer=base58_decode(peer), proto=[protocol], timeout=max(1, round(timeout_s))
        )
        pipe, _ = await self._exchange("STREAM_OPEN", streamOpen=opening)
        return pipe

    async def open_persistent(self) -> Pipe:
        pipe, _ = await self._exchange("PERSISTENT_CONN_UPGRADE")
        return pipe

    async def _request(self, kind: str, **fields: Any) -> Any:
        pipe, response = await self._exchange(kind, **fields)
        pipe.close()
        return response

    async def _exchange(self, kind: str, **fields: Any) -> tuple[Pipe, Any]:
        """Send a request; returns its connection, which is closed on errors, and the response."""
        response = p2pd_pb2.Response()
        try:
            pipe = await open_pipe(self._path, self.scratch)
            try:
                write_protobuf(pipe, p2pd_pb2.Request(type=kind, **fields))
                await pipe.drain()
                await read_protobuf(pipe, response)
                if response.type == p2pd_pb2.Response.ERROR:
                    raise PeerUnreachableError(escape_lines(response.error.msg))
                return pipe, response
            except BaseException:
                pipe.close()
                raise
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PeerUnreachableError("libp2p's daemon of this node is gone") from error


class UnaryCalls:
    """Unary calls (one request, one response) in both directions over the persistent connection.

    At most `_MAX_UNARY_TASKS` incoming calls with `_MAX_UNARY_BYTES` of requests are answered at
    once, and of each peer `_MAX_UNARY_TASKS_PER_PEER` with `_MAX_UNARY_BYTES_PER_PEER`; calls
    beyond that get an error.
    """

    def __init__(self, pipe: Pipe, tasks: TaskSet) -> None:
        self._pipe = pipe
        self._tasks = tasks
        self._handlers: dict[str, UnaryHandler] = {}
        self._pending_calls: dict[bytes, asyncio.Future[Any]] = {}
        self._num_incoming_calls: Counter[bytes] = Counter()
        """Incoming calls that are being answered, by peer; without refused ones."""
        self._incoming_bytes: Counter[bytes] = Counter()
        """Request bytes of those calls, by peer."""
        self._closed = False

    async def call(self, peer: PeerId, protocol: str, data: bytes) -> bytes:
        """Call `protocol` of `peer` and return its response.

        Raises `PeerUnreachableError`, or `RemoteError` when the peer's handler failed.
        """
        request = p2pd_pb2.CallUnaryRequest(peer=base58_decode(peer), proto=protocol, data=data)
        response = await self._request(callUnary=request)
        if response.HasField("callUnaryResponse"):
            result = response.callUnaryResponse
            if result.HasField("response"):
                return bytes(result.response)
            words = result.error.decode(errors="replace")[:200]
            raise RemoteError("unary_failed", escape_text(words))
        raise PeerUnreachableError(escape_text(response.daemonError.message[:200]))

    async def add_handler(self, protocol: str, handler: UnaryHandler) -> None:
        self._handlers[protocol] = handler
        added = p2pd_pb2.AddUnaryHandlerRequest(proto=protocol, balanced=False)
        await self._request(addUnaryHandler=added)

    async def remove_handler(self, protocol: str) -> None:
        if self._handlers.pop(protocol, None) is not None and not self._closed:
            removed = p2pd_pb2.RemoveUnaryHandlerRequest(proto=protocol)
            with suppress(SwarmError):
                await self._request(removeUnaryHandler=removed)

    def fail_pending(self) -> None:
        """End every call in flight with an error."""
        for future in self._pending_calls.values():
            if not future.done():
                future.set_exception(PeerUnreachableError("this node has left the network"))
                future.exception()  # its caller may have stopped waiting

    def close(self) -> None:
        """Fail every pending call, and every later one immediately."""
        self._closed = True
        self.fail_pending()
        self._pipe.close()

    async def receive(self) -> None:
        """Dispatch incoming messages until p2pd ends. Runs as a task."""
        while True:
            response = p2pd_pb2.PersistentConnectionResponse()
            try:
                await read_protobuf(self._pipe, response)
            except (OSError, asyncio.IncompleteReadError):
                return self.close()
            except SwarmError as error:
                log.error("p2pd_message_invalid", error=str(error))
                return self.close()
            future = self._pending_calls.get(response.callId)
            if response.HasField("requestHandling"):
                self._dispatch(response.callId, response.requestHandling)
            elif future is not None and not future.done():
                future.set_result(response)

    async def _request(self, **fields: Any) -> Any:
        if self._closed:
            raise PeerUnreachableError("this node has left the network")
        call_id = uuid.uuid4().bytes
        future = asyncio.get_running_loop().create_future()
        self._pending_calls[call_id] = future
        try:
            await self._send(call_id, **fields)
            return await future
        except asyncio.CancelledError:
            if not self._closed:
                cancel = p2pd_pb2.Cancel()
                message = p2pd_pb2.PersistentConnectionRequest(callId=call_id, cancel=cancel)
                write_protobuf(self._pipe, message)
            raise
        finally:
            del self._pending_calls[call_id]

    async def _send(self, call_id: bytes, **fields: Any) -> None:
        message = p2pd_pb2.PersistentConnectionRequest(callId=call_id, **fields)
        if message.ByteSize() > MAX_UNARY_MESSAGE_BYTES:
            raise SwarmError(f"a unary message of {message.ByteSize()} bytes is too large")
        write_protobuf(self._pipe, message)
        try:
            await self._pipe.drain()
        except OSError as error:
            raise PeerUnreachableError("libp2p's daemon of this node is gone") from error

    def _dispatch(self, call_id: bytes, request: Any) -> None:
        handler = self._handlers.get(request.proto)
        size = len(request.data)
        if handler is None or not self._has_room(request.peer, size):
            handler = _refuse
        else:
            self._num_incoming_calls[request.peer] += 1
            self._incoming_bytes[request.peer] += size
        self._tasks.start(self._answer(handler, call_id, request), name=f"unary {request.proto}")

    def _has_room(self, peer: bytes, size: int) -> bool:
        return (
            self._num_incoming_calls.total() < _MAX_UNARY_TASKS
            and self._num_incoming_calls[peer] < _MAX_UNARY_TASKS_PER_PEER
            and self._incoming_bytes.total() + size <= _MAX_UNARY_BYTES
            and self._incoming_bytes[peer] + size <= _MAX_UNARY_BYTES_PER_PEER
        )

    async def _answer(self, handler: UnaryHandler, call_id: bytes, request: Any) -> None:
        try:
            data = await handler(PeerId(base58_encode(request.peer)), request.data)
            result = p2pd_pb2.CallUnaryResponse(response=data)
        except Exception as error:  # a peer's malformed request fails only its own call
            log.debug("unary_handler_failed", protocol=request.proto, error=repr(error)[:200])
            result = p2pd_pb2.CallUnaryResponse(error=type(error).__name__.encode())
        finally:
            if handler is not _refuse:
                self._num_incoming_calls[request.peer] -= 1
                self._incoming_bytes[request.peer] -= len(request.data)
                if not self._num_incoming_calls[request.peer]:
                    del self._num_incoming_calls[request.peer], self._incoming_bytes[request.peer]
        with suppress(SwarmError):
            await self._send(call_id, unaryResponse=result)


async def _refuse(peer: PeerId, data: bytes) -> bytes:
    raise RemoteError("busy", "no handler or too many calls")


@asynccontextmanager
async def open_unary_calls(control: ControlSocket) -> AsyncIterator[UnaryCalls]:
    """Hold the persistent connection open; p2pd exits when it closes."""
    pipe = await control.open_persistent()
    tasks = TaskSet()
    calls = UnaryCalls(pipe, tasks)
    receiver = asyncio.create_task(calls.receive(), name="p2pd-unary")
    try:
        yield calls
    finally:
        calls.close()
        receiver.cancel()
        await asyncio.wait({receiver})
        await tasks.close()
        await pipe.wait_closed()
