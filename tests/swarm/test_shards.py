"""Sharded keys, with directories and DHT members in memory."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median_low

import msgspec
import pytest

from benchmarks.memory_dht import (
    Network,
    direct_stores,
    introduce,
    known_nearest,
    make_identity,
    open_directory,
    open_member,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.swarm.dht import digests, records, rpc, shards
from nesa_node.swarm.dht.digests import FetchedParts, digest_parts
from nesa_node.swarm.dht.member import MemberNode
from nesa_node.swarm.dht.records import (
    ALL_NODES_KEY,
    MAX_NODES_PER_MODEL,
    model_key,
)
from nesa_node.swarm.dht.shards import (
    MAX_LEVEL,
    NUM_RANGES,
    Shard,
    ShardWriter,
    adjacent_shards,
    choose_level,
    column_shards,
    even_sample,
    find_block_range,
    find_bucket,
    find_shard,
    further_shards,
    interleave,
    is_root_sample,
    median_levels,
)
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.p2p.hivemind_imports import DHTID
from tests.swarm.record_fields import MODEL_ID, make_status

MODEL = ModelId(MODEL_ID)
NUM_BLOCKS = 32
NUM_NODES = 64
RNG = random.Random(3)
PEERS = [PeerId(f"peer{index}") for index in range(4000)]


def test_small_swarm_has_one_key_and_a_shard_has_a_quarter_of_the_root() -> None:
    assert choose_level(0, shards.MAX_ROOT_RECORDS) == 0
    assert choose_level(0, shards.MAX_ROOT_RECORDS + 1) == 1
    assert choose_level(0, None) == 0
    assert NUM_RANGES * shards.MAX_SHARD_RECORDS <= MAX_NODES_PER_MODEL, "a column fits a reader"


@pytest.mark.parametrize("start", [1, 4, 9, MAX_LEVEL])
@pytest.mark.parametrize("in_range", [100, 1000, 25_000, 250_000])
def test_level_settles_where_a_shard_has_some_hundred_records(start: int, in_range: int) -> None:
    level = start
    for _ in range(2 * MAX_LEVEL):
        level = choose_level(level, in_range // 2 ** (level - 1), highest_level=2)
    fill = in_range / 2 ** (level - 1)
    assert shards.MIN_SHARD_RECORDS <= fill + 1 <= shards.MAX_SHARD_RECORDS + 2
    assert choose_level(level, int(fill), highest_level=2) == level


def test_last_range_goes_back_to_one_key_only_if_no_range_has_two_shards() -> None:
    assert choose_level(1, 10, highest_level=1) == 0
    assert choose_level(1, 10, highest_level=2) == 1


def test_node_in_a_shard_that_was_left_follows_the_nodes_of_its_range() -> None:
    assert choose_level(2, 5, range_level=4, highest_level=4) == 4
    assert choose_level(2, 100, range_level=4, highest_level=4) == 2
    assert choose_level(4, 5, range_level=2, highest_level=4) == 3


def test_bucket_is_one_of_its_level_and_halves_one_level_up() -> None:
    for peer in PEERS[:200]:
        buckets = [find_bucket(peer, level) for level in range(1, MAX_LEVEL + 1)]
        assert buckets[0] == 0
        assert all(after // 2 == before for before, after in itertools.pairwise(buckets))
    counts = Counter(find_bucket(peer, 4) for peer in PEERS)
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.3 * len(PEERS) / 8


def test_root_sample_is_a_share_of_every_bucket() -> None:
    sampled = [peer for peer in PEERS if is_root_sample(peer, 4)]
    assert len(sampled) == pytest.approx(len(PEERS) / 8, rel=0.2)
    assert len({find_bucket(peer, 4) for peer in sampled}) == 8
    assert all(is_root_sample(peer, 1) for peer in PEERS)


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 30, 80])
def test_every_span_has_a_range(num_blocks: int) -> None:
    ranges = {
        find_block_range(Span(start, end), num_blocks)
        for start in range(num_blocks)
        for end in range(start + 1, num_blocks + 1)
    }
    assert min(ranges) >= 0
    assert max(ranges) < NUM_RANGES
    assert len(ranges) >= min(num_blocks, NUM_RANGES)


def test_column_has_one_shard_of_each_range_and_further_ones_take_turns() -> None:
    peer = PEERS[0]
    column = column_shards(peer, (3, 0, 2, 1))
    assert [shard.block_range for shard in column] == [0, 2, 3]
    assert all(shard.bucket == find_bucket(peer, shard.level) for shard in column)
    seen = {
        shard for turn in range(4) for shard in further_shards(peer, (4, 1, 1, 1), [0], turn, 3)
    }
    assert seen == {Shard(4, 0, bucket) for bucket in range(8)} - {
        Shard(4, 0, find_bucket(peer, 4))
    }
    assert further_shards(peer, (1, 0, 1, 1), [0, 1, 3], 5, 8) == []


def test_medians_need_a_majority_and_an_empty_range_has_the_highest() -> None:
    low, high = Span(0, 2), Span(30, 32)
    announced = [(low, 32, 2)] * 5 + [(low, 32, 9)] * 4 + [(high, 32, 1)]
    assert median_levels(announced) == (2, 2, 2, 1)
    assert median_levels([]) == (0, 0, 0, 0)
    assert median_levels([(low, 32, 0), (low, 32, 5)]) == (0, 0, 0, 0)


def test_planner_counts_the_same_share_of_each_range() -> None:
    """Range 0 has eight times the nodes of range 3, and a column has as many of both."""
    own = PEERS[0]
    crowd = [(peer, Span(0, 8)) for peer in PEERS[:3200]]
    rest = [(peer, Span(24, 32)) for peer in PEERS[3200:3600]]
    few = [(peer, Span(8, 24)) for peer in PEERS[3600:3604]]
    known = [
        *((peer, span) for peer, span in crowd if find_bucket(peer, 5) == find_bucket(own, 5)),
        *((peer, span) for peer, span in rest if find_bucket(peer, 2) == find_bucket(own, 2)),
        *few,
    ]
    kept = even_sample(known, own, (5, 1, 1, 2), 32)
    counts = Counter(span for (_, span), is_kept in zip(known, kept, strict=True) if is_kept)
    assert counts[Span(0, 8)] == pytest.approx(200, rel=0.2)
    assert shards.MIN_HOLDERS <= counts[Span(24, 32)] <= 50
    assert counts[Span(8, 24)] == 4, "blocks with few holders keep all of them"
    assert even_sample(known, own, (0, 0, 0, 0), 32) == [True] * len(known)


def test_writer_lists_what_no_reader_of_its_shard_may_see() -> None:
    peer = next(peer for peer in PEERS if not is_root_sample(peer, 3))
    writer = ShardWriter()
    writer.adopt(3)
    assert writer.is_listed(peer), "nothing is known of its shard"
    writer.record_stored(200, 3, 3)
    assert not writer.is_listed(peer)
    writer.adopt(9)
    assert writer.level == 3, "it has counts of its own by now"
    writer.record_stored(shards.MIN_SHARD_RECORDS - 1, 2, 3)
    assert writer.level == 2
    assert writer.is_listed(peer)
    writer.record_refused(None)
    assert writer.level == 1
    writer.record_refused(shards.MAX_SHARD_RECORDS + 1)
    assert writer.level == 2, "a full shard sends its nodes up, not back to the root"


@pytest.mark.parametrize("is_even", [True, False])
def test_nodes_that_all_come_at_once_find_their_levels_in_three_minutes(is_even: bool) -> None:
    """With records of 60 s, published every 20 s; uneven ranges have most nodes in the first."""
    rng = random.Random(5)
    writers = [ShardWriter() for _ in PEERS]
    ranges = [rng.randrange(4) if is_even else min(3, int(rng.expovariate(1.5))) for _ in PEERS]
    stored: defaultdict[Shard | None, dict[int, int]] = defaultdict(dict)

    def place(node: int) -> Shard | None:
        level = writers[node].level
        return Shard(level, ranges[node], find_bucket(PEERS[node], level)) if level else None

    def publish(node: int, now: int, levels: list[int]) -> None:
        writer, found = writers[node], stored[place(node)]
        count = len(found)
        if writer.level and writer.is_listed(PEERS[node]):
            stored[None][node] = now + 60
        if node in found or count < 2048:
            found[node] = now + 60
            writer.record_stored(count, levels[ranges[node]], len(PEERS), max(levels))
        else:
            writer.record_refused(count)

    for now in range(0, 200, 20):
        for key, found in stored.items():
            stored[key] = {node: until for node, until in found.items() if until > now}
        levels = [
            median_low([w.level for w, index in zip(writers, ranges, strict=True) if index == each])
            for each in range(NUM_RANGES)
        ]
        before = [writer.level for writer in writers]
        for node in range(len(PEERS)):
            publish(node, now, levels)
    assert [writer.level for writer in writers] == before, "settled"
    sizes = Counter(map(place, range(len(PEERS))))
    assert None not in sizes
    assert max(sizes.values()) <= shards.MAX_SHARD_RECORDS
    assert len(stored[None]) <= 2048


def test_reader_looks_for_its_bucket_one_level_up_and_down() -> None:
    peer = PEERS[7]
    assert adjacent_shards(peer, (3, 0, 1, MAX_LEVEL), [0, 1, 2, 3]) == [
        Shard(4, 0, find_bucket(peer, 4)),
        Shard(2, 0, find_bucket(peer, 2)),
        Shard(2, 2, find_bucket(peer, 2)),
        Shard(MAX_LEVEL - 1, 3, find_bucket(peer, MAX_LEVEL - 1)),
    ]


def test_fetched_parts_need_each_member_s_own_records() -> None:
    records = [(f"peer{index}", b"x", 100.0 + index) for index in range(50)]
    fetched = FetchedParts()
    everything = digests.KeySummary(50, digest_parts(records))
    assert fetched.lacking(everything) == 2**digests.NUM_PARTS - 1
    fetched.add(records[:-1])
    lacking = fetched.lacking(everything)
    assert lacking == 1 << digests.part_of(records[-1][0])
    fetched.add(digests.select_parts(records, lacking))
    assert fetched.lacking(everything) == 0
    assert sorted(fetched.known_records(everything)) == sorted(records)
    newer = [*records[1:], ("peer0", b"y", 1000.0)]
    changed = digests.KeySummary(50, digest_parts(newer))
    assert fetched.lacking(changed) == 1 << digests.part_of("peer0")


def test_lists_are_interleaved() -> None:
    assert interleave([[1, 2, 3], [], [4], [5, 6]]) == [1, 4, 5, 2, 6, 3]


class _Clock:
    """Stands still between rounds, however slow the machine is."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@dataclass
class _Swarm:
    network: Network
    clock: _Clock
    members: list[MemberNode]
    nodes: dict[int, Directory]
    is_fast: bool = True
    """Whether stores reach the nearest members without lookups and messages."""

    async def publish_all(self, rounds: int = 1) -> None:
        """Every node publishes, and 20 s pass, as often as told."""
        for _ in range(rounds):
            with ExitStack() as stack:
                if self.is_fast:
                    stack.enter_context(known_nearest(self.members))
                    stack.enter_context(direct_stores(self.members))
                for index, node in self.nodes.items():
                    start = index % 8 * 4
                    status = make_status(num_blocks=NUM_BLOCKS, span=(start, start + 4))
                    await node.publish(status)
            self.clock.now += 20.0

    def records_under(self, key: str) -> int:
        found = DHTID.generate(source=key)
        return max(int(each.protocol.storage.num_records(found)) for each in self.members)

    async def reader(self) -> Directory:
        identity = make_identity(RNG)
        node = await open_member(self.network, identity.peer_id, reads=True)
        introduce([node], self.members, 1)
        return open_directory(self.network, identity, node)


@pytest.fixture
async def swarm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_Swarm]:
    """64 nodes on 8 members, with small bounds."""
    RNG.seed(3)
    monkeypatch.setattr(shards, "MAX_ROOT_RECORDS", NUM_NODES // 2)
    monkeypatch.setattr(shards, "MAX_SHARD_RECORDS", 12)
    monkeypatch.setattr(shards, "MIN_SHARD_RECORDS", 3)
    clock = _Clock()
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", clock)
    network = Network(clock)
    members = [await open_member(network, make_identity(RNG).peer_id) for _ in range(8)]
    introduce(members, members, 0)
    for member in members:
        member._rpc._budget.charge = lambda peer, units: None  # type: ignore[method-assign]
    nodes = {
        i: open_directory(network, make_identity(RNG), members[i % 8]) for i in range(NUM_NODES)
    }
    yield _Swarm(network, clock, members, nodes)
    for member in members:
        await member._rpc.close()


async def test_nodes_of_a_large_model_leave_the_one_key_and_readers_find_a_chain(
    swarm: _Swarm,
) -> None:
    await swarm.publish_all(6)
    levels = {node._shard_writer.level for node in swarm.nodes.values()}
    assert levels <= {1, 2, 3}
    assert len(levels - {0, 1}) >= 1
    assert swarm.records_under(model_key(MODEL)) < NUM_NODES
    assert swarm.records_under(ALL_NODES_KEY) < NUM_NODES
    reader = await swarm.reader()
    for _ in range(2):
        snapshot = await reader.fetch(MODEL, reports=False)
        assert snapshot.num_blocks == NUM_BLOCKS
        assert min(snapshot.coverage()) >= 1
    swarm.network.clear()
    await reader.fetch_one(MODEL)
    assert all(count >= 1 for count in reader.snapshot(MODEL).coverage())


async def test_swarm_that_shrinks_goes_back_to_one_key(swarm: _Swarm) -> None:
    await swarm.publish_all(5)
    swarm.nodes = {index: swarm.nodes[index] for index in range(8)}
    for _ in range(9):
        for node in swarm.nodes.values():
            await node.fetch(MODEL, reports=False)
        await swarm.publish_all()
    assert {node._shard_writer.level for node in swarm.nodes.values()} == {0}
    assert swarm.records_under(model_key(MODEL)) == 8
    reader = await swarm.reader()
    assert len((await reader.fetch(MODEL, reports=False)).nodes) == 8


async def test_members_of_an_earlier_version_keep_all_records_under_the_one_key(
    swarm: _Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They refuse shards and answer finds without options."""
    original = type(swarm.network.validator)._keys

    def old_keys(self: object, statement: object) -> tuple[bytes, ...]:
        return original(self, statement)[:2]  # type: ignore[arg-type]

    monkeypatch.setattr(type(swarm.network.validator), "_keys", old_keys)
    monkeypatch.setattr(rpc, "read_option", lambda key: None)
    swarm.is_fast = False
    await swarm.publish_all()
    for index in range(40):
        swarm.nodes[index]._shard_writer.adopt(2)
    await swarm.publish_all()
    assert all(node.is_stored for node in swarm.nodes.values())
    assert {node._shard_writer.level for node in swarm.nodes.values()} == {0, 1}, "one lower"
    await swarm.publish_all()
    assert swarm.records_under(model_key(MODEL)) == NUM_NODES
    reader = await swarm.reader()
    assert len((await reader.fetch(MODEL, reports=False)).nodes) == NUM_NODES


async def test_withdrawal_goes_where_the_record_was(swarm: _Swarm) -> None:
    await swarm.publish_all(4)
    node = swarm.nodes[5]
    record = node._own_record
    assert record is not None
    shard = record.shard
    assert shard is not None
    node._shard_writer.level = record.shard_level + 1
    await node.withdraw()
    key = DHTID.generate(source=shard.key(MODEL))
    nearest = sorted(swarm.members, key=lambda member: member.node_id.xor_distance(key))
    kept = [{s: e for s, _, e in m.protocol.storage.records_of(key)} for m in nearest[:5]]
    assert all(each[record.peer_id] > record.expires_at for each in kept)


async def test_node_that_a_reader_no_longer_reads_has_not_failed(swarm: _Swarm) -> None:
    await swarm.publish_all(6)
    reader = await swarm.reader()
    failed: list[str] = []
    reader._reputation.histories.record_expiry = lambda record: failed.append(record.peer_id)  # type: ignore[method-assign]
    for _ in range(5):
        await reader.fetch(MODEL, reports=False)
        await swarm.publish_all()
    assert failed == []
    gone = swarm.nodes.pop(0)
    column = column_shards(reader._peer_id, reader._shard_levels(reader._model_records(MODEL)))
    assert gone._own_record is not None
    is_read = gone._own_record.shard in column
    for _ in range(4):
        await swarm.publish_all()
        await reader.fetch(MODEL, reports=False)
    assert failed == ([gone._peer_id] if is_read else [])


async def test_digests_save_the_other_members_copies_and_hide_none(
    swarm: _Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in swarm.nodes.values():
        node._shard_writer.record_stored = lambda *_: None  # type: ignore[method-assign]
    await swarm.publish_all()
    reader = await swarm.reader()
    key = model_key(MODEL)
    nearest = sorted(
        swarm.members,
        key=lambda member: member.node_id.xor_distance(DHTID.generate(source=key)),
    )[:5]
    # Each member lacks another record.
    for index, member in enumerate(nearest):
        records = member.protocol.storage.data[DHTID.generate(source=key)].value
        del records[swarm.nodes[index]._peer_id]
    traffic, found = [], []
    for limit in (10**9, digests.MAX_UNASKED_BYTES):
        monkeypatch.setattr(rpc, "MAX_UNASKED_BYTES", limit)
        swarm.network.clear()
        sealed = list(await reader._dht_store.find(key))
        found.append(set(sealed))
        traffic.append(swarm.network.caller_bytes[reader._peer_id])
    assert len(found[0]) == NUM_NODES
    assert found[0] == found[1]
    assert traffic[1] < 0.55 * traffic[0]


async def test_filled_shard_leaves_a_reader_room_for_the_others(
    swarm: _Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_NODES_PER_MODEL", 20)
    network, node = swarm.network, swarm.members[0]
    sealed = {}
    for key, count in (("filled", 40), ("other", 8)):
        writers = [open_directory(network, make_identity(RNG), node) for _ in range(count)]
        for writer in writers:
            await writer.publish(make_status(num_blocks=NUM_BLOCKS))
        own = {str(writer._peer_id) for writer in writers}
        stored = node.protocol.storage.records_of(DHTID.generate(source=model_key(MODEL)))
        sealed[key] = [msgspec.msgpack.decode(value) for peer, value, _ in stored if peer in own]
    reader = await swarm.reader()

    async def find(key: str, **_: object) -> list[bytes]:
        return sealed[key]

    monkeypatch.setattr(reader._dht_store, "find", find)
    await reader._fetch_keys(["filled", "other"])
    known = {record.peer_id for record in reader._records}
    assert len(known) == 20
    assert own <= known


async def test_member_that_stalls_does_not_keep_the_records_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digests, "_MAX_WAIT_S", 0.05)
    fetched = FetchedParts()
    async with fetched.turn():
        started = time.monotonic()
        async with fetched.turn():
            assert time.monotonic() - started < 1.0
    async with fetched.turn():
        pass


def test_shard_of_a_record_is_the_one_it_announces() -> None:
    shard = find_shard(PEERS[0], Span(0, 8), 32, 3)
    assert shard == Shard(3, 0, find_bucket(PEERS[0], 3))
    assert shard.key(MODEL) == f"nesa/1/shard/3/0/{shard.bucket}/{MODEL}"
