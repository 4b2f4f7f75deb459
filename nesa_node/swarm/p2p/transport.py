"""Streams between peers, over this node's own p2pd.

libp2p finds a peer by its id, encrypts, and proves the ids of both ends: the `peer` that a handler
gets is authenticated. Opening a stream to a peer that has just failed can succeed, and only the
first read then fails, so that every protocol acknowledges its opening and gives reads a deadline.
"""

from __future__ import annotations

import asyncio
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

from nesa_node.core.errors import (
    BootstrapError,
    ConfigError,
    NoAddressError,
    PeerUnreachableError,
    SwarmError,
)
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.wait_tracking import track_wait
from nesa_node.swarm.p2p.control import (
    ControlSocket,
    UnaryCalls,
    open_unary_calls,
    pack_multiaddr,
    read_protobuf,
)
from nesa_node.swarm.p2p.dial_addresses import (
    choose_dial_addresses,
    interface_addresses,
    is_public_node,
    resolve_names,
)
from nesa_node.swarm.p2p.hivemind_imports import p2pd_pb2
from nesa_node.swarm.p2p.identity import Identity, base58_encode
from nesa_node.swarm.p2p.p2pd import P2pdProcess, parse_multiaddr, start_p2pd
from nesa_node.swarm.p2p.pipe import Pipe, listen_for_pipes
from nesa_node.swarm.p2p.tasks import TaskSet, gather_until_first_answer

log = get_logger(__name__)

MAX_STREAMS_PER_PEER = 768
"""Limit of a peer's streams, including those without a first message. The server answers `busy` at
a lower limit (`server.admission.Limits.streams_per_peer`), after it has read a first message."""

_BOOTSTRAP_TIMEOUT_S = 15.0
_PREAMBLE_TIMEOUT_S = 10.0
_CLOSE_GRACE_S = 1.0
_CONNECTION_REUSE_S = 10.0
"""Time after opening a stream in which the next one is opened without connecting first, which would
double the cost."""
_MAX_RECENT_PEERS = 4096
_ROUTING_ATTEMPTS = 100
_LOOPBACK_PREFIXES = ("/ip4/127.", "/ip6/::1/", "/dns4/localhost/")

StreamHandler = Callable[[PeerId, Any, Any], Awaitable[None]]


class Transport:
    """Connections and streams of this node; made by `open_transport`."""

    def __init__(
        self,
        peer_id: PeerId,
        daemon: P2pdProcess,
        control: ControlSocket,
        unary: UnaryCalls,
        *,
        dials_quic: bool = False,
    ) -> None:
        self.peer_id = peer_id
        self.control = control
        self.unary = unary
        self.daemon_exited = daemon.exited
        """Set when p2pd has ended, after which the node must restart."""
        self.addresses: tuple[str, ...] = ()
        """Addresses at which this node can be dialled, each ending in `/p2p/<peer id>`."""
        self.announce_addresses: tuple[str, ...] = ()
        """Addresses that the operator announces."""
        self.initial_peers: Mapping[PeerId, Sequence[str]] = {}
        """Addresses by peer id."""
        self.initial_peer_addresses: tuple[str, ...] = ()
        """Addresses of initial peers; a node without addresses infers its network from them."""
        self._daemon = daemon
        self._dials_quic = dials_quic
        self._handlers: dict[str, StreamHandler] = {}
        self._opened_at: dict[PeerId, float] = {}
        """By peer: when a stream to it was opened last."""
        self._streams = TaskSet()
        self._num_streams_by_peer: Counter[PeerId] = Counter()

    @property
    def daemon_pid(self) -> int:
        return self._daemon.process.pid

    def check_alive(self) -> None:
        """Raise `SwarmError` if p2pd has ended."""
        if self.daemon_exited.is_set():
            raise SwarmError("libp2p's daemon (p2pd) of this process has ended")

    @contextmanager
    def check_alive_during(self) -> Iterator[None]:
        """Run the body, and raise `SwarmError` if p2pd has ended.

        This replaces a `CancelledError` of a task that the body awaits, if the end of p2pd has
        cancelled that task and not the caller.
        """
        self.check_alive()
        try:
            yield
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or not caller.cancelling():
                self.check_alive()
            raise

    async def wait_until_lost(self) -> None:
        """Wait for the end of p2pd, then raise `SwarmError`."""
        await self.daemon_exited.wait()
        self.check_alive()

    async def refresh_addresses(self) -> tuple[str, ...]:
        """Update `addresses` from p2pd: interfaces change, and NAT mappings are found late."""
        _, addresses = await self.control.identify()
        self.addresses = tuple(f"{address}/p2p/{self.peer_id}" for address in addresses)
        return self.addresses

    async def connect(
        self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float = 10.0
    ) -> None:
        """Dial `peer` at `addresses`, or where libp2p's own DHT finds it. A no-op when connected.

        Malformed addresses and those of other peers are ignored, and QUIC addresses unless this
        node listens on QUIC itself. Raises `PeerUnreachableError`.
        """
        known = [address for address in addresses if self._dials_quic or "/udp/" not in address]
        packed = [each for address in known if (each := _pack_address_of(peer, address))]
        try:
            async with asyncio.timeout(timeout_s):
                await self.control.connect(peer, packed, timeout_s)
        except TimeoutError as error:
            raise PeerUnreachableError(f"{peer} did not answer within {timeout_s:g} s") from error
        except PeerUnreachableError as error:
            raise PeerUnreachableError(f"cannot reach {peer}: {error}") from error

    @property
    def is_public(self) -> bool:
        """Whether this node is on the internet, where private addresses must not be dialled."""
        return is_public_node(self.addresses, self.announce_addresses, interface_addresses())

    async def is_connected(self, peer: PeerId) -> bool:
        return peer in await self.control.connected_peers()

    async def is_local(self, peer: PeerId) -> bool:
        """Whether `peer` is connected over the loopback interface."""
        try:
            addresses = await self.control.addresses_of(peer)
        except PeerUnreachableError:
            return False
        return any(address.startswith(_LOOPBACK_PREFIXES) for address in addresses)

    async def open_stream(
        self,
        peer: PeerId,
        protocol: str,
        addresses: Sequence[str] = (),
        timeout_s: float = 10.0,
    ) -> tuple[Any, Any]:
        """Open a duplex stream to `peer`, which the caller closes.

        `addresses` are the peer's own claims, of which `choose_dial_addresses` chooses those to
        dial. `timeout_s` bounds dialling and opening. Raises `PeerUnreachableError`, also if the
        peer does not speak `protocol`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                pipe = None
                if addresses:
                    pipe = await self._open_on_recent_connection(peer, protocol, timeout_s)
                if pipe is None:
                    await self.dial(peer, addresses, timeout_s)
                    pipe = await self.control.open_stream(peer, protocol, timeout_s)
                if len(self._opened_at) >= _MAX_RECENT_PEERS:
                    self._opened_at.clear()
                self._opened_at[peer] = time.monotonic()
                return pipe, pipe
        except TimeoutError as error:
            raise PeerUnreachableError(f"{peer} did not answer within {timeout_s:g} s") from error
        except PeerUnreachableError as error:
            raise type(error)(f"no stream to {peer}: {error}") from error

    async def dial(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Connect to `peer` at a few of the addresses that it announces, if there are any.

        Raises `PeerUnreachableError`. On a node of the internet, raises `NoAddressError` if no
        address is public and the peer is not connected: p2pd would search for other addresses
        itself.
        """
        public = self.is_public
        own = self.addresses or self.initial_peer_addresses
        dialled = choose_dial_addresses(addresses, own, public_only=public)
        if public:
            dialled = await resolve_names(dialled)
            if not dialled and not await self.is_connected(peer):
                raise NoAddressError(f"{peer} has no address on the internet that is known")
        if dialled:
            await self.connect(peer, dialled, timeout_s)

    async def _open_on_recent_connection(
        self, peer: PeerId, protocol: str, timeout_s: float
    ) -> Pipe | None:
        """Open a stream over a recently used connection; None if there is none any more."""
        if time.monotonic() - self._opened_at.get(peer, -math.inf) > _CONNECTION_REUSE_S:
            return None
        try:
            return await self.control.open_stream(peer, protocol, timeout_s)
        except PeerUnreachableError:
            self._opened_at.pop(peer, None)
            return None

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler(peer, reader, writer)` in a task for each stream that a peer opens.

        The stream is closed soon after the handler has returned. An exception in it is logged and
        ends that stream only; closing the transport cancels all handlers. One peer may hold
        `MAX_STREAMS_PER_PEER` streams, all peers together half of the files that this process may
        open; further streams are closed at once. A later handler of a protocol replaces the earlier
        one.
        """
        is_new = protocol not in self._handlers
        self._handlers[protocol] = handler
        if is_new:
            await self.control.forward_streams(protocol, self._daemon.streams_path)

    def accept(self, pipe: Pipe) -> None:
        """Handle p2pd's connection for an incoming stream."""
        if len(self._streams) >= _max_streams():
            log.debug("stream_refused", reason="too many streams of all peers together")
            pipe.abort()
            return
        self._streams.start(self._handle(pipe), name="incoming-stream")

    async def close(self) -> None:
        await self._streams.close()

    async def _handle(self, pipe: Pipe) -> None:
        try:
            info = p2pd_pb2.StreamInfo()
            async with asyncio.timeout(_PREAMBLE_TIMEOUT_S):
                await read_protobuf(pipe, info)
            peer = PeerId(base58_encode(info.peer))
            await self._run_handler(info.proto, peer, pipe)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            log.debug("incoming_stream_broke")
        finally:
            pipe.close()
            await pipe.wait_closed()

    async def _run_handler(self, protocol: str, peer: PeerId, pipe: Pipe) -> None:
        handler = self._handlers.get(protocol)
        if handler is None or self._num_streams_by_peer[peer] >= MAX_STREAMS_PER_PEER:
            log.warning("stream_refused", peer=peer, protocol=protocol)
            return
        self._num_streams_by_peer[peer] += 1
        try:
            await handler(peer, pipe, pipe)
            await _wait_for_peer_close(pipe)
        except (OSError, asyncio.IncompleteReadError):
            log.debug("stream_broke", peer=peer, protocol=protocol)
        except Exception:  # the edge of a task: one stream's failure must not end the node
            log.exception("stream_handler_failed", peer=peer, protocol=protocol)
        finally:
            self._num_streams_by_peer[peer] -= 1
            if not self._num_streams_by_peer[peer]:
                del self._num_streams_by_peer[peer]


async def _wait_for_peer_close(pipe: Pipe) -> None:
    """Wait up to `_CLOSE_GRACE_S` for the peer to close first, after it has read all bytes.

    If the writing end closes first, p2pd may reset the stream and drop the last bytes: it closes
    reading before writing, and treats the end of its own reading in between as an error.
    """
    with suppress(OSError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_CLOSE_GRACE_S):
            while True:
                await pipe.wait_readable()
                pipe.read_nowait(pipe.unread_bytes)


def _max_streams() -> int:
    """Limit of incoming streams: half of the files that this process may open.

    With no file left, a node could not even request p2pd to publish its record.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files // 2


@asynccontextmanager
async def open_transport(
    identity: Identity,
    *,
    host_maddrs: Sequence[str] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"),
    announce_maddrs: Sequence[str] = (),
    initial_peers: Sequence[str] = (),
    nat_port_map: bool = False,
    auto_nat: bool = False,
    relay: bool = False,
    listen: bool = True,
    asks_for_addresses: bool = True,
) -> AsyncIterator[Transport]:
    """Join the network as `identity`, and leave it at the end without leftovers.

    With `listen=False` this node accepts no connections, and with `asks_for_addresses=False` it
    names no peer to another one. Port 0 lets the system choose.
    `nat_port_map` requests a port from the router by UPnP, `auto_nat` asks peers whether this node
    is reachable and traverses NATs where possible, and `relay` routes streams through the initial
    peers where no direct connection is possible.

    Raises `IdentityError` if the key is in use, `ConfigError` for malformed addresses,
    `AddressInUseError` for a taken port, and `BootstrapError` if no initial peer answers.
    """
    peers = parse_initial_peers(initial_peers, own=identity.peer_id)
    async with AsyncExitStack() as stack:
        stack.enter_context(identity.lock())
        daemon = await stack.enter_async_context(
            start_p2pd(
                identity_path=identity.path,
                host_maddrs=host_maddrs,
                announce_maddrs=announce_maddrs,
                trusted_relays=initial_peers,
                nat_port_map=nat_port_map,
                auto_nat=auto_nat,
                relay=relay,
                listen=listen,
                asks_for_addresses=asks_for_addresses,
            )
        )
        control = ControlSocket(daemon.control_path)
        unary = await stack.enter_async_context(open_unary_calls(control))
        transport = Transport(
            identity.peer_id,
            daemon,
            control,
            unary,
            dials_quic=any("/udp/" in address for address in host_maddrs),
        )
        transport.announce_addresses = tuple(announce_maddrs)
        transport.initial_peers = peers
        local = [address for address in initial_peers if address.startswith(_LOOPBACK_PREFIXES)]
        transport.initial_peer_addresses = tuple(local or initial_peers)
        server = await listen_for_pipes(daemon.streams_path, control.scratch, transport.accept)
        stack.push_async_callback(transport.close)
        stack.callback(server.close)
        if not await transport.refresh_addresses() and listen:
            raise SwarmError(f"libp2p's daemon listens on none of {', '.join(host_maddrs)}")
        await _connect_initial_peers(transport, peers)
        watcher = TaskSet()
        stack.push_async_callback(watcher.close)
        watcher.start(_log_daemon_exit(daemon), name="p2pd-watcher")
        log.info("transport_opened", peer_id=transport.peer_id, addresses=transport.addresses)
        yield transport


async def _log_daemon_exit(daemon: P2pdProcess) -> None:
    await daemon.exited.wait()
    log.error("p2pd_exited", returncode=daemon.process.returncode, output=list(daemon.last_lines))


def split_peer_address(address: str) -> tuple[bytes, PeerId]:
    """Split `/ip4/.../p2p/<id>` into the packed address and the id. Raises `ConfigError`."""
    parse_multiaddr(address)
    bare, separator, peer = address.rpartition("/p2p/")
    if not separator or not bare or "/" in peer:
        raise ConfigError(f"the peer address {address!r} must end in /p2p/<peer id>")
    return pack_multiaddr(bare), PeerId(peer)


def _pack_address_of(peer: PeerId, address: str) -> bytes | None:
    try:
        packed, owner = split_peer_address(address)
    except ConfigError:
        return None
    return packed if owner == peer else None


def parse_initial_peers(addresses: Sequence[str], own: PeerId) -> dict[PeerId, list[str]]:
    """Addresses of each peer but `own`. Raises `ConfigError` for one that is no peer's."""
    peers: dict[PeerId, list[str]] = {}
    for address in addresses:
        _, peer = split_peer_address(address)
        if peer != own:
            peers.setdefault(peer, []).append(address)
    return peers


async def _connect_initial_peers(transport: Transport, peers: dict[PeerId, list[str]]) -> None:
    """Connect to all initial peers concurrently. Raises `BootstrapError` if none answers."""
    if not peers:
        return
    with track_wait("initial peers to answer", peers=list(peers), limit_s=_BOOTSTRAP_TIMEOUT_S):
        outcomes = await gather_until_first_answer(
            transport.connect(peer, addresses, _BOOTSTRAP_TIMEOUT_S)
            for peer, addresses in peers.items()
        )
    failures = dict(zip(peers, outcomes, strict=True))
    for peer, failure in failures.items():
        if failure is not None:
            log.warning("initial_peer_unreachable", peer=peer, error=str(failure))
    if all(failure is not None for failure in failures.values()):
        tried = ", ".join(address for addresses in peers.values() for address in addresses)
        raise BootstrapError(
            f"none of the initial peers answered: {tried}; check that one of them runs, and that "
            "its address and port can be reached from here (`nesa-node doctor`)"
        )
    for _ in range(_ROUTING_ATTEMPTS):
        if await transport.control.has_routing_peers():
            return
        await asyncio.sleep(0.02)
