"""Failures that one participant sees, and what others make of them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.routing.reputation import (
    FULL_STANDING_S,
    LONG_STANDING_S,
    REPORTABLE_RATIO,
    SpeedClaims,
)
from nesa_node.server.orchestrator.launch import ClampedSpeeds
from nesa_node.swarm import reputation as reporter_module
from nesa_node.swarm.dht.records import RecordTable
from nesa_node.swarm.dht.sealing import MAX_REPORTED_PEERS, FailureReport, ReportedFailure
from nesa_node.swarm.dht.validator import PeerAges
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.reputation import ExitHistories, FailureReporter
from tests.swarm.local_swarm import eventually, local_swarm
from tests.swarm.notice_fields import PEERS
from tests.swarm.record_fields import MODEL_ID, make_record, make_status
from tests.turns import turns_of_the_loop

MODEL = ModelId(MODEL_ID)
OTHER = ModelId("other@0")


async def test_failure_that_a_client_sees_is_known_to_the_next_reader(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        failed, honest, reader = members
        for member in members:
            await member.directory.publish(make_status())
        before = await reader.directory.fetch(MODEL)
        async with open_swarm(
            Identity.ephemeral(tmp_path),
            initial_peers=members[2].transport.addresses,
            listen=False,
        ) as client:
            client.failure_reporter.record_failure(MODEL, failed.identity.peer_id, "lost")

            async def heard() -> bool:
                await reader.directory.fetch(MODEL)
                return bool(reader.directory.blames(MODEL))

            await eventually(heard)
            # What it says itself it does not take for news.
            await client.directory.fetch(MODEL)
            assert client.directory.blames(MODEL) == {}
        blames = reader.directory.blames(MODEL)
        assert set(blames) == {failed.identity.peer_id}
        assert 0.9 < blames[failed.identity.peer_id] <= 1.0
        after = reader.directory.snapshot(MODEL)
        for swarm, factor in ((failed, 0.5), (honest, 1.0)):
            now, then = (s.find_node(swarm.identity.peer_id) for s in (after, before))
            assert now is not None
            assert then is not None
            assert now.reliability == pytest.approx(then.reliability * factor, rel=0.05)


async def test_word_of_a_node_that_has_served_for_long_counts_in_full(tmp_path: Path) -> None:
    now = [time.time()]
    async with local_swarm(tmp_path, 2, clock=lambda: now[0], record_ttl_s=600) as members:
        witness, reader = members
        await witness.directory.publish(make_status(uptime_s=1e6))
        await reader.directory.fetch(MODEL)
        now[0] += FULL_STANDING_S - 5
        await witness.directory.publish(make_status(uptime_s=1e6))
        noise = [Identity.ephemeral(tmp_path) for _ in range(5)]
        for index, identity in enumerate(noise):
            async with open_swarm(
                identity,
                initial_peers=reader.transport.addresses,
                listen=False,
                clock=lambda: now[0],
            ) as sybil:
                failure = ReportedFailure(peer=PEERS[index], kind="lost", count=1000, at=now[0])
                await sybil.notices.publish(FailureReport, MODEL, ttl_s=100, failures=(failure,))
        failure = ReportedFailure(peer=PEERS[20], kind="lost", count=1, at=now[0])
        await witness.notices.publish(FailureReport, MODEL, ttl_s=100, failures=(failure,))
        await reader.directory.fetch(MODEL)
        blames = reader.directory.blames(MODEL)
        assert blames[PeerId(PEERS[20])] > 0.9
        assert sum(blames[PeerId(PEERS[index])] for index in range(5)) <= 1.0


async def test_two_who_are_known_for_long_can_say_that_a_node_boasts(tmp_path: Path) -> None:
    now = [time.time()]
    async with local_swarm(tmp_path, 4, clock=lambda: now[0], record_ttl_s=600) as members:
        witness, second, boaster, reader = members
        status = make_status(uptime_s=1e6, decode_tokens_per_s=1000.0)
        believed = ClampedSpeeds(reader.directory, SpeedClaims(lambda: 0.0))

        async def speed() -> float:
            node = believed.clamp(await reader.directory.fetch(MODEL)).find_node(
                boaster.identity.peer_id
            )
            assert node is not None
            return node.decode_tokens_per_s

        async def accuse(by: Swarm, *others: str) -> None:
            failures = tuple(
                ReportedFailure(peer=peer, kind="slow", count=9, at=now[0])
                for peer in (boaster.identity.peer_id, *others)
            )
            await by.notices.publish(FailureReport, MODEL, ttl_s=100, failures=failures)

        # Both are believed in full where it is about the next chain.
        for _ in range(2):
            for member in (witness, second, boaster):
                await member.directory.publish(status)
            await reader.directory.fetch(MODEL)
            now[0] += FULL_STANDING_S / 2
        for member in (witness, second, boaster):
            await member.directory.publish(status)
        async with open_swarm(
            Identity.ephemeral(tmp_path),
            initial_peers=reader.transport.addresses,
            listen=False,
            clock=lambda: now[0],
        ) as stranger:
            for accuser in (stranger, witness, second):
                await accuse(accuser)
            assert await speed() == 1000.0
        while now[0] < time.time() + LONG_STANDING_S:
            now[0] += 500
            for member in (witness, second, boaster):
                await member.directory.publish(status)
            await reader.directory.fetch(MODEL)
        await accuse(witness)
        assert await speed() == 1000.0
        await accuse(second)
        assert await speed() == pytest.approx(1000.0 / REPORTABLE_RATIO)
        (doubt,) = reader.directory.speed_doubts(MODEL).values()
        now[0] += 20
        for accuser in (witness, second):
            await accuse(accuser, *PEERS[:3])
        await reader.directory.fetch(MODEL)
        doubts = reader.directory.speed_doubts(MODEL)
        assert len(doubts) == 4
        assert max(doubts.values()) == pytest.approx(doubt / 4, rel=0.05)


class _Board:
    def __init__(self) -> None:
        self.published: list[tuple[ModelId, tuple[ReportedFailure, ...]]] = []

    async def publish(
        self, kind: type[FailureReport], model_id: ModelId, *, ttl_s: float, failures: Any
    ) -> None:
        self.published.append((model_id, failures))


async def test_reporter_tells_the_first_failure_at_once_and_the_rest_together() -> None:
    board = _Board()
    reporter = FailureReporter(
        board,  # type: ignore[arg-type]
        PeerId("me"),
        clock=time.time,
        interval_s=0.3,
    )
    task = asyncio.create_task(reporter.run())
    try:
        reporter.record_failure(MODEL, PeerId("me"), "lost")
        reporter.record_failure(MODEL, PeerId(PEERS[0]), "lost")
        await asyncio.sleep(0.05)
        assert len(board.published) == 1
        for index in range(40):
            reporter.record_failure(
                MODEL, PeerId(f"{PEERS[0]}{index}".replace("0", "z")), "stalled"
            )
        reporter.record_failure(OTHER, PeerId(PEERS[1]), "slow")
        await asyncio.sleep(0.1)
        assert len(board.published) == 1
        await asyncio.sleep(0.3)
        assert {model for model, _ in board.published[1:]} == {MODEL, OTHER}
        assert all(len(failures) <= MAX_REPORTED_PEERS for _, failures in board.published)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_reporter_does_not_repeat_failures_of_long_ago() -> None:
    board, now = _Board(), [1e9]
    reporter = FailureReporter(
        board,  # type: ignore[arg-type]
        PeerId("me"),
        clock=lambda: now[0],
        interval_s=0.01,
    )
    task = asyncio.create_task(reporter.run())
    try:
        for count, peer in enumerate(PEERS[:2], start=1):
            reporter.record_failure(MODEL, PeerId(peer), "lost")

            async def is_told(count: int = count) -> bool:
                return len(board.published) == count

            await eventually(is_told)
            now[0] += 241.0
    finally:
        task.cancel()
    told = [[failure.peer for failure in failures] for _, failures in board.published]
    assert told == [[PEERS[0]], [PEERS[1]]]


def test_a_peer_that_comes_back_after_a_week_is_a_newcomer() -> None:
    now = [1e9]
    acquaintance = PeerAges(lambda: now[0])
    peer = PeerId(PEERS[0])
    acquaintance.record_seen(peer, now[0] + 60)
    now[0] += 300
    acquaintance.record_seen(peer, now[0] + 60)
    assert acquaintance.known_s(peer) == 300
    now[0] += 7 * 86_400
    assert acquaintance.known_s(peer) == 0
    acquaintance.record_seen(peer, now[0] + 60)
    assert acquaintance.known_s(peer) == 0
    now[0] += 10
    assert acquaintance.known_s(peer) == 10


def test_reporter_remembers_a_bounded_number_of_models() -> None:
    reporter = FailureReporter(_Board(), PeerId("me"), clock=time.time)  # type: ignore[arg-type]
    for index in range(200):
        reporter.record_failure(ModelId(f"m{index}@0"), PeerId(PEERS[0]), "lost")
    assert len(reporter._failures) == reporter_module._MAX_REPORTED_MODELS


def test_ends_without_notice_and_planned_ones_are_told_apart(tmp_path: Path) -> None:
    identity, histories = Identity.ephemeral(tmp_path), ExitHistories()
    peer = identity.peer_id

    def record(**changes: Any) -> Any:
        return make_record(identity, 1000.0, **changes)

    histories.record_replacement(record(uptime_s=500.0), record(uptime_s=510.0))
    assert histories.counts(peer).failures == 0
    histories.record_replacement(record(uptime_s=510.0), record(state="draining", uptime_s=520.0))
    histories.record_replacement(record(state="draining", uptime_s=520.0), record(uptime_s=1.0))
    assert (histories.counts(peer).failures, histories.counts(peer).drains) == (0, 1)
    histories.record_replacement(record(uptime_s=500.0), record(uptime_s=3.0))
    histories.record_expiry(record())
    histories.record_expiry(record(state="draining"))
    assert (histories.counts(peer).failures, histories.counts(peer).drains) == (2, 1)


async def test_crash_lowers_what_is_thought_of_a_node_when_it_returns(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as (crasher, _, reader):
        peer = crasher.identity.peer_id
        for uptime_s in (1000.0, 1010.0):
            await crasher.directory.publish(make_status(uptime_s=uptime_s))
            before = (await reader.directory.fetch(MODEL)).find_node(peer)
        await crasher.directory.publish(make_status(uptime_s=1.0))
        after = (await reader.directory.fetch(MODEL)).find_node(peer)
        assert before is not None
        assert after is not None
        assert after.reliability < before.reliability - 0.05


class _Counted(str):
    """A peer id that counts how often any of them is looked up."""

    looks = 0

    def __hash__(self) -> int:
        _Counted.looks += 1
        return super().__hash__()


def ending(peer: str) -> Any:
    return SimpleNamespace(
        peer_id=peer,
        signer=peer,
        model_id=MODEL_ID,
        state="serving",
        uptime_s=10.0,
        span=(0, 10),
        num_blocks=30,
        shard_level=0,
        shard=None,
    )


def test_many_ends_of_new_peers_cost_the_same_each() -> None:
    histories = ExitHistories()
    for number in range(4096):
        histories.record_expiry(ending(_Counted(number)))
    _Counted.looks = 0
    for number in range(4096, 4096 + 1024):
        histories.record_expiry(ending(_Counted(number)))
    assert _Counted.looks <= 20 * 1024
    assert sum(histories.counts(PeerId(str(number))).failures for number in range(5120)) == 4096


def test_strangers_that_fail_once_push_out_no_peer_that_failed_often() -> None:
    histories = ExitHistories()
    for _ in range(2):
        histories.record_expiry(ending("often"))
    histories.record_expiry(ending("once"))
    leaving = SimpleNamespace(state="draining", uptime_s=20.0)
    histories.record_replacement(ending("planned"), cast(Any, leaving))
    for number in range(4093):
        histories.record_expiry(ending(f"stranger-{number}"))
    assert histories.counts(PeerId("planned")).drains == 1
    histories.record_expiry(ending("one more"))
    assert histories.counts(PeerId("planned")).drains == 0
    assert histories.counts(PeerId("once")).failures == 1
    for number in range(5000):
        histories.record_expiry(ending(f"late-{number}"))
    assert histories.counts(PeerId("once")).failures == 0
    assert histories.counts(PeerId("often")).failures == 2


def expiring(number: int, now: float) -> tuple[Any, RecordTable, ExitHistories]:
    """A directory that knows a node that lives, and so many records that end now."""
    own = PeerId("own")
    known, histories = RecordTable(own), ExitHistories()
    known.add(cast(Any, _lasting("alive", now, 60.0)))
    for index in range(number):
        known.add(cast(Any, _lasting(f"gone-{index}", now, 0.0)))
    directory: Any = Directory.__new__(Directory)
    directory.ttl_s, directory._records, directory._clock = 60.0, known, lambda: now
    directory._peer_id = own
    directory._reputation = SimpleNamespace(histories=histories)
    return directory, known, histories


def _lasting(peer: str, now: float, seconds: float) -> Any:
    record = ending(peer)
    record.issued_at, record.expires_at = now, now + seconds
    return record


async def test_other_tasks_get_turns_while_many_records_expire() -> None:
    directory, known, histories = expiring(1000, 1e9)
    async with turns_of_the_loop() as turns:
        await directory._drop_expired()
        assert turns[0] >= 60
    assert [record.peer_id for record in known] == ["alive"]
    assert sum(histories.counts(PeerId(f"gone-{i}")).failures for i in range(1000)) == 1000


async def test_looks_at_the_same_time_count_an_end_once_and_no_renewed_record() -> None:
    directory, known, histories = expiring(100, 1e9)
    looks = [asyncio.create_task(directory._drop_expired()) for _ in range(2)]
    await asyncio.sleep(0)
    known.add(_lasting("gone-99", 1e9, 30.0))
    await asyncio.gather(*looks)
    assert {record.peer_id for record in known} == {"alive", "gone-99"}
    ends = [histories.counts(PeerId(f"gone-{i}")).failures for i in range(100)]
    assert ends == [1] * 99 + [0]


def test_a_full_acquaintance_is_not_searched_for_each_newcomer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, searched = [1e9], 0

    class Counting(dict[PeerId, Any]):
        def items(self) -> Any:
            nonlocal searched
            searched += 1
            return super().items()

    acquaintance = PeerAges(lambda: now[0], max_peers=10)
    monkeypatch.setattr(acquaintance, "_known", Counting())
    for index in range(10):
        acquaintance.record_seen(PeerId(f"here-{index}"), 1e9 + 5 * index)
    for index in range(1000):
        acquaintance.record_seen(PeerId(f"new-{index}"), 1e9 + 60)
    assert searched == 1
    now[0] += 10
    acquaintance.record_seen(PeerId("late"), 1e9 + 60)
    now[0] += 10
    assert acquaintance.known_s(PeerId("late")) == 10, "room of those that are gone is used"
