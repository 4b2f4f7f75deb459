"""A lookup's bytes, and the load of the busiest DHT member, by the number of nodes of one model.

All nodes under one key, as with `MAX_ROOT_RECORDS` out of reach, against shards. Keys, records,
signatures, messages, storage bounds, lookups and directories are the package's; sockets are not
(`memory_dht.py`). Times of a process say nothing here and are not reported.

Where there are more than 1,024 nodes, 1,024 members stand for all: what a key costs its five
members does not depend on how many members there are, but for each doubling a lookup asks some more
of them, about 1.3 kB each. Where there are more than 3,200, every node has an identity, but only
some publish: under the one key 3,200, of which it refuses half; with shards those of one in four
buckets (of 10,000 nodes) or one in 32 (of 100,000), and all of the root's sample. Loads of shards
are scaled by their readers, loads of the one key by all nodes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.memory_dht import (
    Network,
    direct_stores,
    introduce,
    known_nearest,
    make_identity,
    open_directory,
    open_member,
)
from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht import rpc, shards
from nesa_node.swarm.dht.member import MemberNode
from nesa_node.swarm.dht.records import ALL_NODES_KEY, NodeStatus, model_key
from nesa_node.swarm.dht.rpc import CallBudget
from nesa_node.swarm.dht.shards import ShardWriter
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.p2p.hivemind_imports import DHTID
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.topology.links.matrix import MeasuredLink, pack_links

DEFAULTS = Options(nodes=(1000, 10_000, 100_000), runs=32)
QUICK = Options(nodes=(200, 1200), runs=4)
MODEL = ModelId("scale-70b@0123456789abcdef")
NUM_BLOCKS = 80
SPANS = (4, 5, 8, 10, 16, 20)
MAX_MEMBERS = 1024
MAX_PUBLISHING = 3200
ROUND_S = 20.0
ROUNDS = 5
PUBLICATIONS = 20
PLAIN_READERS = 2
ONE_KEY_READERS = 6
"""They all read the same key."""
READS_PER_MIN = 1.0
"""Assumed: each node, or a client in its place, reads the directory once a minute."""
RENEWED_IN_A_READ = 0.05
"""Share of the records of a read shard that are renewed while it is read: 1 s of 20."""


class Clock:
    """Stands still between rounds: records must not expire because this process is slow."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


class SettledWriter(ShardWriter):
    """Of a node whose shard is not simulated: it is there for its record under the root."""

    def record_stored(self, *_: Any) -> None:
        pass


@dataclass
class World:
    network: Network
    clock: Clock
    members: list[MemberNode]
    nodes: list[tuple[Directory, NodeStatus]]
    num_nodes: int
    share: float
    """Share of the model's buckets, and so of all shards and their readers, that is simulated."""

    async def publish(self, nodes: list[tuple[Directory, NodeStatus]]) -> None:
        for directory, status in nodes:
            await directory.publish(status)

    async def settle(self, rounds: int) -> None:
        """Publish at the level where nodes have arrived, then free to leave it."""
        with (
            patch.object(Directory, "_adopt_level", lambda *_: None),
            patch.object(ShardWriter, "record_stored", lambda *_: None),
        ):
            await self.publish(self.nodes)
            self.clock.now += ROUND_S
        for _ in range(rounds - 1):
            await self.publish(self.nodes)
            self.clock.now += ROUND_S


def run(options: Options) -> list[dict[str, Any]]:
    """One row for each number of nodes and each scheme."""
    rows = []
    for num_nodes in options.nodes:
        for is_sharded in (False, True):
            with keys_of_scheme(is_sharded):
                row = asyncio.run(measure(num_nodes, is_sharded, options.runs, options.seed))
            rows.append(row)
            print(f"{num_nodes} nodes, {row['scheme']}: done", flush=True)
    show(rows)
    return rows


@contextmanager
def keys_of_scheme(is_sharded: bool) -> Iterator[None]:
    """Shards as they are; else no number of records makes a node leave the one key."""
    limit = shards.MAX_ROOT_RECORDS if is_sharded else 10**9
    with patch.object(shards, "MAX_ROOT_RECORDS", limit):
        yield


async def measure(num_nodes: int, is_sharded: bool, runs: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    clock = Clock()
    with (
        patch("hivemind.utils.timed_storage.get_dht_time", clock),
        patch.object(CallBudget, "charge", lambda *_: None),  # its clock is the real one
    ):
        world = await make_world(num_nodes, is_sharded, clock, rng)
        with known_nearest(world.members):
            with direct_stores(world.members):
                await world.settle(ROUNDS if is_sharded else 1)
            world.network.clear()
            await world.publish(world.nodes)
        writes = busiest_writes(world, is_sharded)
        writes |= await publication(world, rng, writes["busiest_stores_per_min"])
        row = {
            "nodes": num_nodes,
            "scheme": "shards" if is_sharded else "one key",
            "members": len(world.members),
            "publishing": len(world.nodes),
            "levels": dict(Counter(each._shard_writer.level for each, _ in world.nodes)),
            "record_bytes": record_bytes(world),
            **stored(world),
            **writes,
            **await read(world, runs if is_sharded else min(runs, ONE_KEY_READERS), rng),
        }
        for member in world.members:
            await member._rpc.close()
    return row


async def make_world(num_nodes: int, is_sharded: bool, clock: Clock, rng: random.Random) -> World:
    network = Network(clock)
    members = [
        await open_member(network, make_identity(rng).peer_id)
        for _ in range(min(num_nodes, MAX_MEMBERS))
    ]
    introduce(members, members, rng.randrange(2**32))
    level = expected_level(num_nodes) if is_sharded else 0
    identities = [make_identity(rng) for _ in range(num_nodes)]
    share = 1.0
    if num_nodes > MAX_PUBLISHING and not is_sharded:
        # Beyond what fits under the key only refusals are added.
        identities = identities[:MAX_PUBLISHING]
    elif num_nodes > MAX_PUBLISHING:
        num_buckets = sampled_of(num_nodes)
        share = 1 / num_buckets
        identities = [
            each
            for each in identities
            if in_sampled_buckets(each.peer_id, num_buckets)
            or shards.is_root_sample(each.peer_id, level)
        ]
    nodes = []
    for index, identity in enumerate(identities):
        directory = open_directory(network, identity, members[index % len(members)])
        if share == 1.0 or in_sampled_buckets(identity.peer_id, round(1 / share)):
            directory._shard_writer = ShardWriter()
        else:
            directory._shard_writer = SettledWriter()
        directory._shard_writer.level = level
        # As after a publication in a full shard: the first nodes here would find nothing.
        directory._shard_writer._num_records = shards.MAX_SHARD_RECORDS
        nodes.append((directory, make_status(identity, rng)))
    return World(network, clock, members, nodes, num_nodes, share)


def expected_level(num_nodes: int) -> int:
    """The level at which nodes that join one by one have arrived; 0 if all fit under the root."""
    if num_nodes <= shards.MAX_ROOT_RECORDS:
        return 0
    level = 1
    while num_nodes / shards.NUM_RANGES / 2 ** (level - 1) > shards.MAX_SHARD_RECORDS:
        level += 1
    return level


def sampled_of(num_nodes: int) -> int:
    """Number of buckets of which one is simulated: a power of 2."""
    return 1 << max(0, (num_nodes - 1) // MAX_PUBLISHING).bit_length()


def in_sampled_buckets(peer: PeerId, num_buckets: int) -> bool:
    return shards.find_bucket(peer, num_buckets.bit_length()) == 0


def make_status(identity: Identity, rng: random.Random) -> NodeStatus:
    length = rng.choice(SPANS)
    start = rng.randrange(NUM_BLOCKS - length + 1)
    links = [
        MeasuredLink(rng.randbytes(6), rng.uniform(1, 300), rng.uniform(1e6, 1e9), 60.0)
        for _ in range(16)
    ]
    return NodeStatus(
        state="serving",
        model_id=MODEL,
        model_name="example/scale-70b-instruct",
        num_blocks=NUM_BLOCKS,
        span=(start, start + length),
        dtype="bfloat16",
        protocol_version=(1, 0),
        prefill_tokens_per_s=rng.uniform(100, 5000),
        decode_tokens_per_s=rng.uniform(1, 100),
        free_cache_tokens=rng.randrange(100_000),
        total_cache_tokens=100_000,
        gpu_memory_total_bytes=24 * 2**30,
        gpu_memory_free_bytes=rng.randrange(24 * 2**30),
        cpu_memory_total_bytes=64 * 2**30,
        cpu_memory_free_bytes=rng.randrange(64 * 2**30),
        uptime_s=rng.uniform(0, 1e6),
        context_length=131_072,
        codecs=("float16", "int8", "int4:64"),
        measured=pack_links(links),
        max_blocks=20,
        location=(rng.uniform(-60, 60), rng.uniform(-180, 180)),
    )


def record_bytes(world: World) -> float:
    sizes = [
        len(value)
        for member in world.members
        for key in list(member.protocol.storage.data)
        for _, value, _ in member.protocol.storage.records_of(key)
    ]
    return statistics.mean(sizes)


def stored(world: World) -> dict[str, Any]:
    """Records under each kind of key, at the member that has most, and the number of keys."""
    listed = {DHTID.generate(source=model_key(MODEL)): "root"}
    listed[DHTID.generate(source=ALL_NODES_KEY)] = "index"
    most: Counter[str] = Counter()
    for member in world.members:
        for key in member.protocol.storage.data:
            kind = listed.get(key, "shard")
            most[kind] = max(most[kind], member.protocol.storage.num_records(key))
    in_full = [each for each, _ in world.nodes if not isinstance(each._shard_writer, SettledWriter)]
    records = [directory._own_record for directory in in_full]
    shard_keys = {record.shard for record in records if record is not None} - {None}
    return {
        "records": {kind: most[kind] for kind in ("root", "index", "shard")},
        "busiest_records": max(most.values()),
        "keys": round(len(shard_keys) / world.share) + 2,
    }


def busiest_writes(world: World, is_sharded: bool) -> dict[str, Any]:
    """Stores and their bytes a minute at the busiest member of one key, all nodes taken together.

    A member of the one key, or of the root, gets each publication of a node that writes there; the
    root sample is simulated in full, so that only the one key is scaled.
    """
    rounds_per_min = 60.0 / ROUND_S
    scale = 1.0 if is_sharded else world.num_nodes / len(world.nodes)
    peer, count = world.network.stores.most_common(1)[0]
    return {
        "busiest_stores_per_min": count * rounds_per_min * scale,
        "busiest_written_mb_per_min": world.network.store_bytes[peer]
        * rounds_per_min
        * scale
        / 1e6,
    }


async def publication(world: World, rng: random.Random, stores_per_min: float) -> dict[str, Any]:
    """Bytes of one publication with its lookups, and of a member's answer to such a lookup."""
    world.network.clear()
    await world.publish(rng.sample(world.nodes, PUBLICATIONS))
    calls = world.network.caller_calls.total()
    answers = sum(each.total() for each in world.network.served_to.values())
    answer_bytes = answers / calls
    return {
        "publication_kb": world.network.caller_bytes.total() / PUBLICATIONS / 1e3,
        "calls_of_a_publication": calls / PUBLICATIONS,
        "answer_to_a_writer_bytes": answer_bytes,
        "busiest_served_to_writers_mb_per_min": stores_per_min * answer_bytes / 1e6,
    }


async def read(world: World, runs: int, rng: random.Random) -> dict[str, Any]:
    """A first and a later read by each of `runs` readers, and what they make members serve."""
    first, later, plain, calls, known, holders, lacking = ([] for _ in range(7))
    served: Counter[PeerId] = Counter()
    for number in range(runs):
        identity = next(
            each
            for each in iter(partial(make_identity, rng), None)
            if in_sampled_buckets(each.peer_id, round(1 / world.share))
        )
        node = await open_member(world.network, identity.peer_id, reads=True)
        introduce([node], world.members, number)
        directory = open_directory(world.network, identity, node)
        first.append(await bytes_of_read(world, directory, identity))
        world.network.clear()
        column = [each for each in world.nodes if is_read_by(directory, each[0])]
        renewed = rng.sample(column, int(RENEWED_IN_A_READ * len(column)))
        with known_nearest(world.members):
            _, read_bytes = await asyncio.gather(
                world.publish(renewed), bytes_of_read(world, directory, identity)
            )
        later.append(read_bytes)
        calls.append(world.network.caller_calls[identity.peer_id])
        served.update(world.network.served_to[identity.peer_id])
        snapshot = directory.snapshot(MODEL, NUM_BLOCKS)
        known.append(len(snapshot.nodes))
        holders.append(min(snapshot.coverage()))
        lacking.append(bool(directory._num_fetches))
        if number < PLAIN_READERS:
            with without_digests():
                plain.append(await bytes_of_read(world, directory, identity))
        await node._rpc.close()
    readers = world.num_nodes * world.share * READS_PER_MIN
    busiest = max(served.values()) / runs * readers
    return {
        "first_read_mb": statistics.mean(first) / 1e6,
        "later_read_mb": statistics.mean(later) / 1e6,
        "later_read_mb_without_digests": statistics.mean(plain) / 1e6,
        "calls_of_a_later_read": statistics.mean(calls),
        "known_nodes": statistics.mean(known),
        "fewest_holders_of_a_block": min(holders),
        "reads_beyond_the_column": statistics.mean(lacking),
        "busiest_served_mb_per_min": busiest / 1e6,
        "readers": runs,
        "runs": [
            {"first_read_bytes": one, "later_read_bytes": other}
            for one, other in zip(first, later, strict=True)
        ],
    }


def is_read_by(reader: Directory, node: Directory) -> bool:
    record = node._own_record
    assert record is not None
    levels = reader._shard_levels(reader._model_records(MODEL))
    return record.shard is None or record.shard in shards.column_shards(reader._peer_id, levels)


async def bytes_of_read(world: World, directory: Directory, identity: Identity) -> int:
    """Bytes of requests and answers of one read of the model's nodes."""
    before = world.network.caller_bytes[identity.peer_id]
    await directory.fetch(MODEL, NUM_BLOCKS, reports=False)
    return world.network.caller_bytes[identity.peer_id] - before


@contextmanager
def without_digests() -> Iterator[None]:
    with patch.object(rpc, "MAX_UNASKED_BYTES", 2**30):
        yield


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        "One model's records on the DHT",
        "nodes|scheme|keys|records|stores/min|written\nMB/min|served\nMB/min|first\nMB|later\nMB|"
        "no digests\nMB|calls|known|fewest\nholders",
        [
            [
                str(row["nodes"]),
                row["scheme"],
                str(row["keys"]),
                str(row["busiest_records"]),
                f"{row['busiest_stores_per_min']:.0f}",
                f"{row['busiest_written_mb_per_min']:.1f}",
                f"{row['busiest_served_mb_per_min']:.0f}",
                f"{row['first_read_mb']:.2f}",
                f"{row['later_read_mb']:.2f}",
                f"{row['later_read_mb_without_digests']:.2f}",
                f"{row['calls_of_a_later_read']:.0f}",
                f"{row['known_nodes']:.0f}",
                str(row["fewest_holders_of_a_block"]),
            ]
            for row in rows
        ],
    )
