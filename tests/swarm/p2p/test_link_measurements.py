"""Pings over real p2pd processes, and what is kept of them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.node import Swarm, open_swarm, probe_rtts
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.link_measurements import (
    PING_PROTOCOL,
    LinkSpeeds,
    RttTable,
    choose_ping_target,
    ping,
)
from nesa_node.swarm.p2p.pipe import Pipe
from nesa_node.topology.links.matrix import MAX_LINKS_PER_RECORD, pack_links, peer_digest
from tests.swarm.local_swarm import eventually, local_swarm
from tests.swarm.record_fields import MODEL_ID, make_record, make_status

MODEL = ModelId(MODEL_ID)


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_every_member_answers_pings_and_a_client_may_ask(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as (one, two):
        peer = two.identity.peer_id
        assert 0 < await ping(one.transport, peer, two.transport.addresses) < 1000
        async with open_swarm(
            Identity.ephemeral(tmp_path), initial_peers=one.transport.addresses, listen=False
        ) as client:
            await client.rtts.ping_all(
                client.transport, {peer: two.transport.addresses, PeerId("12D3KooWnobody"): ()}
            )
            assert 0 < client.rtts.rtt_ms(peer) < 1000
            assert math.isnan(client.rtts.rtt_ms(PeerId("12D3KooWnobody")))


@pytest.mark.parametrize(
    "middle",
    ["ip6zone/p2p/tcp/2", f"p2p/f0172002408011220{'00' * 32}/p2p-circuit"],
)
async def test_peer_whose_address_cannot_be_packed_counts_as_unreachable(
    tmp_path: Path, middle: str
) -> None:
    """Its record is valid, and the address a multiaddress; the part that is dialled is none."""
    liar = Identity.ephemeral(tmp_path)
    address = f"/ip4/8.8.8.8/tcp/1/{middle}/p2p/{liar.peer_id}"
    record = make_record(liar, 1e9, addresses=(address,))
    async with local_swarm(tmp_path, 2) as (one, two):
        peer = two.identity.peer_id
        peers = {liar.peer_id: record.addresses, peer: two.transport.addresses}
        await one.rtts.ping_all(one.transport, peers)
        assert one.rtts.num_unanswered == 1
        assert one.rtts.rtt_ms(peer) > 0


@pytest.mark.parametrize("answer", [b"", b"short", b"not what was asked for here"])
async def test_whoever_answers_something_else_counts_as_unreachable(
    tmp_path: Path, answer: bytes
) -> None:
    async def lie(peer: PeerId, reader: Pipe, writer: Pipe) -> None:
        writer.write(answer)
        await writer.drain()

    async with local_swarm(tmp_path, 2) as (one, two):
        await two.transport.serve(PING_PROTOCOL, lie)
        one.rtts.record_ping(two.identity.peer_id, 5.0)
        peers = {two.identity.peer_id: two.transport.addresses}
        await one.rtts.ping_all(one.transport, peers)
        assert math.isnan(one.rtts.rtt_ms(two.identity.peer_id))


async def test_a_peer_that_keeps_silent_is_given_up(tmp_path: Path) -> None:
    async def keep_silent(peer: PeerId, reader: Pipe, writer: Pipe) -> None:
        await asyncio.sleep(60)

    async with local_swarm(tmp_path, 2) as (one, two):
        await two.transport.serve(PING_PROTOCOL, keep_silent)
        with pytest.raises(PeerUnreachableError, match="does not answer pings"):
            await ping(one.transport, two.identity.peer_id, two.transport.addresses, timeout_s=0.5)


async def test_time_for_a_ping_includes_dialling() -> None:
    class _Slow:
        """Takes half of the time to open a stream on which nothing comes."""

        async def open_stream(self, *_: object) -> tuple[Any, Any]:
            await asyncio.sleep(0.2)
            return (pipe := _Silent()), pipe

    class _Silent:
        def write(self, _: bytes) -> None: ...

        def close(self) -> None: ...

        async def readexactly(self, _: int) -> bytes:
            await asyncio.sleep(60)
            return b""

    started = asyncio.get_running_loop().time()
    with pytest.raises(PeerUnreachableError):
        await ping(_Slow(), PeerId("a"), timeout_s=0.4)  # type: ignore[arg-type]
    assert asyncio.get_running_loop().time() - started < 0.55


async def test_a_stream_of_pings_ends(tmp_path: Path) -> None:
    """Nobody holds a node's stream open by asking for ever."""
    async with local_swarm(tmp_path, 2) as (one, two):
        pipe, _ = await one.transport.open_stream(
            two.identity.peer_id, PING_PROTOCOL, two.transport.addresses
        )
        answered = 0
        with suppress(asyncio.IncompleteReadError, OSError):
            for _ in range(100):
                pipe.write(bytes(8))
                await pipe.readexactly(8)
                answered += 1
        pipe.close()
        assert 3 <= answered < 100


async def test_measuring_nodes_know_their_links_from_each_others_records(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members, asyncio.TaskGroup() as group:
        for member in members:
            await member.directory.publish(make_status())
        tasks = [
            group.create_task(
                probe_rtts(
                    member, MODEL, 30, random.Random(0), ping_interval_s=0.02, fetch_interval_s=0.1
                )
            )
            for member in members
        ]

        async def all_links_are_known() -> bool:
            for member in members:
                measured = pack_links(member.rtts.nearest_links(member.link_speeds))
                await member.directory.publish(make_status(measured=measured))
            return all(await asyncio.gather(*(_knows_all(member) for member in members)))

        await eventually(all_links_are_known, 20)
        for task in tasks:
            task.cancel()


async def test_whoever_took_long_to_start_looks_before_it_measures(tmp_path: Path) -> None:
    """What it saw when it joined has expired, and the next look is far away."""
    async with local_swarm(tmp_path, 2) as (one, two):
        await one.directory.publish(make_status())
        measuring = asyncio.create_task(
            probe_rtts(two, MODEL, 30, random.Random(0), ping_interval_s=0.02)
        )

        async def measured() -> bool:
            return not math.isnan(two.rtts.rtt_ms(one.identity.peer_id))

        await eventually(measured, 10)
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


async def test_who_was_seen_is_pinged_until_it_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks are rarer than records live."""
    async with local_swarm(tmp_path, 1) as (one,):
        async with open_swarm(
            Identity.ephemeral(tmp_path), initial_peers=one.transport.addresses
        ) as two:
            seen = iter([{two.identity.peer_id: two.transport.addresses}])
            monkeypatch.setattr(one.directory, "addresses", lambda *_: next(seen, {}))
            measuring = asyncio.create_task(
                probe_rtts(one, MODEL, 30, random.Random(0), ping_interval_s=0.02, refresh_s=0.05)
            )
            await eventually(_pinged(one, 4))
        await eventually(_not_answered(one, 1), 20)
        await asyncio.sleep(0.5)
        assert one.rtts.num_unanswered == 1
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


def _pinged(member: Swarm, times: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return member.rtts.round_trips_s.count >= times

    return condition


def _not_answered(member: Swarm, times: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return member.rtts.num_unanswered >= times

    return condition


async def test_measuring_goes_on_after_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_swarm(tmp_path, 1) as (one,):
        asked = asyncio.Event()
        answers = iter([False, False, True])

        def fail(*_: object) -> dict[PeerId, tuple[str, ...]]:
            if next(answers):
                asked.set()
                return {}
            raise KeyError("a mistake")

        monkeypatch.setattr(one.directory, "addresses", fail)
        task = asyncio.create_task(
            probe_rtts(one, MODEL, 30, random.Random(0), ping_interval_s=0.02)
        )
        async with asyncio.timeout(10):
            await asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _knows_all(member: Swarm) -> bool:
    links = member.directory.with_links(await member.directory.fetch(MODEL, 30)).links
    assert links is not None
    return len(links.peers) == 3 and bool((links.confidence_NN > 0.9).all())


def test_what_is_kept_is_the_median_of_the_last_pings() -> None:
    clock = _Clock()
    distances = RttTable(clock)
    peer = PeerId("a")
    assert math.isnan(distances.rtt_ms(peer))
    assert distances.age_s(peer) == math.inf
    for rtt_ms in (900.0, 10.0, 11.0, 12.0, 13.0, 400.0):
        distances.record_ping(peer, rtt_ms)
    clock.now = 7.0
    assert distances.rtt_ms(peer) == 12.0
    assert distances.age_s(peer) == 7.0


def test_a_record_names_the_nearest_and_the_freshest() -> None:
    clock = _Clock()
    distances = RttTable(clock)
    for index in range(100):
        clock.now = index
        distances.record_ping(PeerId(f"p{index}"), 100.0 + index)
    measured = distances.nearest_links(LinkSpeeds())
    assert len(measured) == MAX_LINKS_PER_RECORD
    expected = {*range(8), *range(92, 100)}
    assert {link.digest for link in measured} == {
        peer_digest(PeerId(f"p{index}")) for index in expected
    }
    assert all(math.isnan(link.rate_bytes_per_s) for link in measured)


def test_peers_whose_digests_clash_are_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ids that collide are found in 2^24 tries: the record must be valid all the same."""
    monkeypatch.setattr(
        "nesa_node.swarm.p2p.link_measurements.peer_digest",
        lambda peer: peer_digest(PeerId("thief" if peer.startswith("thief") else peer)),
    )
    distances = RttTable(_Clock())
    for name in ("thief1", "honest", "thief2"):
        distances.record_ping(PeerId(name), 1.0)
    measured = distances.nearest_links(LinkSpeeds())
    assert [link.digest for link in measured] == [peer_digest(PeerId("honest"))]


def test_a_small_swarm_is_pinged_in_turn_and_then_left_alone() -> None:
    clock, rng = _Clock(), random.Random(1)
    distances = RttTable(clock)
    peers = [PeerId(f"p{index}") for index in range(11)]
    for _ in range(2):
        asked = []
        for _ in range(11):
            peer = choose_ping_target(distances, peers, rng, refresh_s=60)
            assert peer is not None
            asked.append(peer)
            clock.now += 1
            distances.record_ping(peer, 10.0)
        assert sorted(asked) == sorted(peers)
        assert choose_ping_target(distances, peers, rng, refresh_s=60) is None
        clock.now += 60


def test_peer_that_does_not_answer_is_tried_less_and_less() -> None:
    clock, rng = _Clock(), random.Random(1)
    distances = RttTable(clock)
    dead, alive = PeerId("dead"), [PeerId(f"p{index}") for index in range(9)]
    tried: list[float] = []
    for _ in range(1200):
        peer = choose_ping_target(distances, [dead, *alive], rng, refresh_s=60)
        if peer == dead:
            tried.append(clock.now)
            distances.record_failure(dead)
            assert math.isnan(distances.rtt_ms(dead))
            assert distances.age_s(dead) == 0.0
        elif peer is not None:
            distances.record_ping(peer, 10.0)
        clock.now += 6
    assert len(tried) <= 9
    pauses = [after - before for before, after in pairwise(tried)]
    assert pauses[0] <= 70
    assert max(pauses) <= 1810
    assert all(distances.age_s(peer) <= 90 for peer in alive)
    distances.record_ping(dead, 1.0)
    clock.now += 60
    assert distances.is_due(dead, 60)


def test_memory_of_the_dead_is_bounded() -> None:
    distances = RttTable(_Clock())
    for index in range(3000):
        distances.record_failure(PeerId(f"p{index}"))
    assert len(distances._failed) <= 1024


def test_a_large_swarm_is_explored_while_the_nearest_stay_fresh() -> None:
    clock, rng = _Clock(), random.Random(1)
    distances = RttTable(clock)
    rtt_ms = {PeerId(f"p{index}"): 1.0 + index for index in range(500)}
    for _ in range(3000):
        peer = choose_ping_target(distances, sorted(rtt_ms), rng, refresh_s=60)
        if peer is not None:
            distances.record_ping(peer, rtt_ms[peer])
        clock.now += 6
    nearest = sorted(rtt_ms, key=lambda peer: rtt_ms[peer])[:MAX_LINKS_PER_RECORD]
    assert all(distances.age_s(peer) < 400 for peer in nearest)
    assert sum(distances.age_s(peer) < math.inf for peer in rtt_ms) > 400
