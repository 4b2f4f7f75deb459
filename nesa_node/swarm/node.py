"""One node's membership in the network: identity, transport, DHT and directory, opened together.

hivemind's p2pd has no flag for mDNS (its `-help` lists none), so that even on a LAN a node needs at
least one initial peer, unless it is the first.

Background pings by which a daemon measures its round-trip times.

Prometheus metrics of the network, and of the nodes that serve a model.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from nesa_node.compression.codecs import codec_names
from nesa_node.core.errors import BootstrapError, PeerUnreachableError, SwarmError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import (
    BLOCK_REPLICAS,
    HOP_RTT,
    KNOWN_NODES,
    REFUSED_RECORDS,
    UNANSWERED_PINGS,
    WIRE_BYTES,
    MetricSample,
    count_by_label,
)
from nesa_node.core.wait_tracking import track_wait
from nesa_node.swarm.dht.member import RPC_TIMEOUT_S, DhtStore, MemberNode
from nesa_node.swarm.dht.rejoin import DhtRejoiner
from nesa_node.swarm.dht.rpc import DhtRpc
from nesa_node.swarm.dht.storage import BoundedStorage
from nesa_node.swarm.dht.validator import RecordValidator
from nesa_node.swarm.directory import DEFAULT_TTL_S, Directory
from nesa_node.swarm.notice_store import NoticeStore
from nesa_node.swarm.p2p.dial_addresses import resolve_peer_ids
from nesa_node.swarm.p2p.hivemind_imports import DHTID, PeerID
from nesa_node.swarm.p2p.identity import Identity, Membership
from nesa_node.swarm.p2p.link_measurements import (
    PING_PROTOCOL,
    LinkSpeeds,
    RttTable,
    answer_pings,
    choose_ping_target,
)
from nesa_node.swarm.p2p.tasks import TaskSet, gather_until_first_answer
from nesa_node.swarm.p2p.transport import Transport, open_transport
from nesa_node.swarm.protocol.stream import MessageBudget
from nesa_node.swarm.reputation import FailureReporter

log = get_logger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Swarm:
    """Network services of one node, made by `open_swarm`."""

    identity: Identity
    transport: Transport
    directory: Directory
    notices: NoticeStore
    failure_reporter: FailureReporter
    link_speeds: LinkSpeeds = field(default_factory=LinkSpeeds)
    rtts: RttTable = field(default_factory=RttTable)
    message_budget: MessageBudget = field(default_factory=MessageBudget)


@asynccontextmanager
async def open_swarm(
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
    swarm_key: str | None = None,
    record_ttl_s: float = DEFAULT_TTL_S,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Swarm]:
    """Join the network and the DHT; leave both at the end, with no task, process or file left.

    An initial peer without a peer id (`host:port`) is asked for it (`dial_addresses.py`). With
    `listen=False` the node is a client, which accepts no connections, and with
    `asks_for_addresses=False` one that names no peer to another. `swarm_key` restricts the
    swarm to nodes that know it (`identity.py`). The caller withdraws its record before it stops
    serving; it is not withdrawn here.

    Raises what `open_transport` raises, and `BootstrapError` if initial peers answer but none is a
    member of this DHT (for example of another private swarm).
    """
    membership = Membership(swarm_key)
    initial_peers = await resolve_peer_ids(initial_peers)
    async with open_transport(
        identity,
        host_maddrs=host_maddrs,
        announce_maddrs=announce_maddrs,
        initial_peers=initial_peers,
        nat_port_map=nat_port_map,
        auto_nat=auto_nat,
        relay=relay,
        listen=listen,
        asks_for_addresses=asks_for_addresses,
    ) as transport:
        validator = RecordValidator(membership, clock)
        rpc = DhtRpc(identity.peer_id, transport.unary, validator, membership)
        async with _dht_node(rpc, validator, listen=listen) as node:
            await _join_dht(node, rpc, transport.initial_peers)
            store = DhtStore(node, membership)
            notices = NoticeStore(store, identity, validator, membership, clock=clock)
            rejoiner = DhtRejoiner(node, transport, transport.initial_peers)
            directory = Directory(
                identity, transport, validator, notices, rejoiner, clock=clock, ttl_s=record_ttl_s
            )
            reporter = FailureReporter(notices, identity.peer_id, clock=clock)
            if listen:
                await transport.serve(PING_PROTOCOL, answer_pings)
            tasks = TaskSet()
            tasks.start(rejoiner.run(), name="dht-rejoin")
            tasks.start(reporter.run(), name="reporter")
            try:
                yield Swarm(identity, transport, directory, notices, reporter)
            finally:
                await tasks.close()


@asynccontextmanager
async def _dht_node(
    rpc: DhtRpc, validator: RecordValidator, *, listen: bool
) -> AsyncIterator[MemberNode]:
    node = await MemberNode.create(rpc, validator, client_mode=not listen)
    node.protocol.storage = BoundedStorage(
        str(rpc.peer_id),
        validator.dropped,
        validator.peer_ages.known_s,
        DHTID.from_bytes(validator.index_id),
        validator.is_shard_record,
    )
    rpc.protocol = node.protocol
    try:
        yield node
    finally:
        await node.shutdown()
        await rpc.close()


async def _join_dht(
    node: MemberNode, rpc: DhtRpc, initial_peers: Mapping[PeerId, Sequence[str]]
) -> None:
    if not initial_peers:
        return
    with track_wait("initial peers to answer as members of the DHT", limit_s=RPC_TIMEOUT_S):
        outcomes = await gather_until_first_answer(
            _ping_member(node, PeerID.from_base58(peer)) for peer in initial_peers
        )
    if all(isinstance(outcome, PeerUnreachableError) for outcome in outcomes):
        tried = ", ".join(chain(*initial_peers.values()))
        raise BootstrapError(
            "the initial peers can be reached, but none of them is a member of this swarm's DHT: "
            f"{tried}; are they nesa-nodes, with the same --swarm-key?"
        )
    # In the background, since some of the neighbours may not answer.
    rpc.start(node.lookup(node.node_id))


async def _ping_member(node: MemberNode, member: PeerID) -> None:
    if await node.protocol.call_ping(member) is None:
        raise PeerUnreachableError(f"{member} is no member of this DHT")


PING_INTERVAL_S = 6.0
"""A ping costs 1 kB of traffic, with all protocol overhead."""
PING_REFRESH_S = 90.0
FETCH_INTERVAL_S = 60.0
MAX_FETCH_INTERVAL_S = 600.0
"""Fetching the records of a hundred nodes takes more than 100 kB. Pauses may be long, since a node
that joins later pings first and publishes what it measured."""


async def probe_rtts(
    swarm: Swarm,
    model_id: ModelId,
    num_blocks: int,
    rng: random.Random,
    *,
    ping_interval_s: float = PING_INTERVAL_S,
    refresh_s: float = PING_REFRESH_S,
    fetch_interval_s: float = FETCH_INTERVAL_S,
) -> None:
    """Ping the nodes of a model in turn until cancelled, and record round trips in `swarm.rtts`.

    Records are fetched at the start, since those read before the model was loaded may have expired,
    then after `fetch_interval_s`, and then after pauses that triple up to `MAX_FETCH_INTERVAL_S`. A
    node that has been seen is pinged until it does not answer, even when its record has expired
    here.
    """
    fetch_at_s = time.monotonic()
    addresses: dict[PeerId, Sequence[str]] = {}
    while True:
        await asyncio.sleep(ping_interval_s * rng.uniform(0.8, 1.2))
        try:
            if time.monotonic() >= fetch_at_s:
                fetch_at_s = time.monotonic() + fetch_interval_s
                fetch_interval_s = min(
                    3.0 * fetch_interval_s, max(MAX_FETCH_INTERVAL_S, fetch_interval_s)
                )
                await swarm.directory.fetch_one(model_id)
            # Only peers that have answered their last ping.
            addresses = {
                peer: known
                for peer, known in addresses.items()
                if not math.isnan(swarm.rtts.rtt_ms(peer))
            }
            addresses |= swarm.directory.addresses(model_id, num_blocks)
            addresses.pop(swarm.identity.peer_id, None)
            peer = choose_ping_target(swarm.rtts, sorted(addresses), rng, refresh_s=refresh_s)
            if peer is not None:
                await swarm.rtts.ping_all(swarm.transport, {peer: addresses[peer]})
        except (SwarmError, OSError) as error:
            log.info("ping_failed", reason=str(error))
        except Exception:  # a bug must end neither the node nor its pings
            log.exception("ping_failed")


DROP_REASONS = (
    "expired", "expiry", "foreign", "full", "future", "key", "malformed", "num_blocks", "oversized",
    "signature", "stale", "subkey", "too_soon", "unwanted", "version",
)  # fmt: skip
"""Reasons for which records and notices are dropped."""
MAX_REPORTED_BLOCKS = 1024
"""Blocks of a model with a sample each: untrusted records could announce a million blocks."""
STATES = ("joining", "serving", "draining")


def swarm_samples(swarm: Swarm) -> Iterator[MetricSample]:
    """Samples of this process, independent of any model."""
    for direction, counts in (
        ("sent", swarm.link_speeds.sent_bytes),
        ("received", swarm.link_speeds.received_bytes),
    ):
        for codec in ("none", *codec_names()):
            yield MetricSample(WIRE_BYTES, (codec, direction), counts[codec])
    yield MetricSample(HOP_RTT, (), swarm.rtts.round_trips_s)
    yield MetricSample(UNANSWERED_PINGS, (), swarm.rtts.num_unanswered)
    yield from count_by_label(REFUSED_RECORDS, swarm.directory.dropped, DROP_REASONS)


def model_samples(
    directory: Directory, model_id: ModelId, num_blocks: int | None = None
) -> Iterator[MetricSample]:
    """Samples of a model's nodes, from remembered records without network access."""
    holders, states = directory.count_holders_and_states(model_id, num_blocks)
    for state in STATES:
        yield MetricSample(KNOWN_NODES, (model_id, state), states[state])
    for block, count in enumerate(holders[:MAX_REPORTED_BLOCKS]):
        yield MetricSample(BLOCK_REPLICAS, (model_id, str(block)), count)


def run_in_swarm(
    work: Callable[[Swarm], Coroutine[Any, Any, _Result]],
    *,
    initial_peers: Sequence[str],
    swarm_key: str | None = None,
) -> _Result:
    """Join the swarm under an identity of its own, run `work`, and leave. Blocks the thread.

    Raises what `open_swarm` and `work` raise.
    """

    async def run() -> _Result:
        with tempfile.TemporaryDirectory(prefix="nesa-request-") as folder:
            async with open_swarm(
                Identity.ephemeral(Path(folder)),
                initial_peers=initial_peers,
                swarm_key=swarm_key,
                listen=False,
            ) as swarm:
                return await work(swarm)

    return asyncio.run(run())
