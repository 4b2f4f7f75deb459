"""Records on a real DHT."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.errors import BootstrapError, PeerUnreachableError
from nesa_node.core.ids import ModelId, Span
from nesa_node.swarm.dht import rejoin as rejoining
from nesa_node.swarm.dht.records import NodeRecord, model_key
from nesa_node.swarm.dht.sealing import CLOCK_SKEW_S, seal_statement
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.hivemind_imports import DHTID, MSGPackSerializer
from nesa_node.swarm.p2p.identity import Identity
from tests.swarm.local_swarm import LOOPBACK, dht_node, eventually, local_swarm
from tests.swarm.record_fields import MODEL_ID, make_record, make_status

MODEL = ModelId(MODEL_ID)
KEY = "a long enough swarm key"


class _Clock:
    """The real time, off by something."""

    offset_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


async def test_every_member_and_a_client_see_what_each_published(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members, AsyncExitStack() as stack:
        for index, member in enumerate(members):
            status = make_status(span=(10 * index, 10 * index + 10), load=index / 4)
            record = await member.directory.publish(status)
            assert member.directory.record(member.identity.peer_id) == record
        client = await stack.enter_async_context(
            open_swarm(
                Identity.ephemeral(tmp_path),
                initial_peers=members[2].transport.addresses,
                listen=False,
            )
        )
        for swarm in (*members, client):
            snapshot = await swarm.directory.fetch(MODEL)
            assert snapshot.num_blocks == 30
            assert snapshot.coverage() == (1,) * 30
            assert {state.peer_id: state.addresses for state in snapshot.nodes} == {
                member.identity.peer_id: member.transport.addresses for member in members
            }
            assert len(await swarm.directory.fetch_all()) == 3
            assert swarm.directory.dropped == {}
        state = (await client.directory.fetch(MODEL)).find_node(members[1].identity.peer_id)
        assert state is not None
        assert (state.span, state.load, state.decode_tokens_per_s) == (Span(10, 20), 0.25, 5.0)


async def test_new_record_replaces_the_old_one_everywhere_at_once(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        publisher = members[1].directory
        for load in (0.0, 0.5, 1.0, 1.5):
            await publisher.publish(make_status(load=load))
            for member in members:
                snapshot = await member.directory.fetch(MODEL)
                assert [state.load for state in snapshot.nodes] == [load]
                record = member.directory.record(members[1].identity.peer_id)
                assert record is not None
                assert record.load == load


async def test_withdrawn_node_is_gone_at_once(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        leaver, name = members[1].directory, members[1].identity.peer_id
        await leaver.withdraw()
        assert leaver.record(name) is None
        await leaver.publish(make_status())
        assert (await members[2].directory.fetch(MODEL)).find_node(name) is not None
        await leaver.withdraw()
        for member in members:
            assert (await member.directory.fetch(MODEL)).nodes == ()
            assert await member.directory.fetch_all() == []
            assert member.directory.record(name) is None
        await leaver.publish(make_status())
        assert (await members[2].directory.fetch(MODEL)).find_node(name) is not None


async def test_crashed_node_is_gone_after_its_time_to_live(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3, record_ttl_s=1.5) as members:
        name = members[1].identity.peer_id
        await members[1].directory.publish(make_status())
        published = time.monotonic()
        os.kill(members[1].transport.daemon_pid, signal.SIGKILL)

        async def gone() -> bool:
            snapshots = [await members[i].directory.fetch(MODEL) for i in (0, 2)]
            return all(snapshot.find_node(name) is None for snapshot in snapshots)

        assert not await gone()
        await eventually(gone)
        assert 1.0 < time.monotonic() - published < 4.0


async def test_only_serving_nodes_can_be_routed_through(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        for member, state in zip(members, ("serving", "joining", "draining"), strict=True):
            await member.directory.publish(make_status(state=state))
        snapshot = await members[0].directory.fetch(MODEL)
        assert [state.peer_id for state in snapshot.nodes] == [members[0].identity.peer_id]
        assert [state.peer_id for state in snapshot.joining] == [members[1].identity.peer_id]
        draining = members[0].directory.record(members[2].identity.peer_id)
        assert draining is not None
        assert draining.state == "draining"


async def test_other_models_are_seen_in_the_index_only(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as members:
        await members[0].directory.publish(make_status())
        await members[1].directory.publish(make_status(model_id="other@0", num_blocks=12))
        snapshot = await members[0].directory.fetch(MODEL)
        assert [state.peer_id for state in snapshot.nodes] == [members[0].identity.peer_id]
        assert len(await members[0].directory.fetch_all()) == 2
        other = await members[0].directory.fetch(ModelId("other@0"))
        assert other.num_blocks == 12
        assert (await members[0].directory.fetch(ModelId("nothing@0"))).num_blocks == 0


async def test_node_that_disagrees_on_the_number_of_blocks_is_dropped(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        for member in members[:2]:
            await member.directory.publish(make_status())
        await members[2].directory.publish(make_status(num_blocks=12))
        by_majority = await members[0].directory.fetch(MODEL)
        assert (by_majority.num_blocks, len(by_majority.nodes)) == (30, 2)
        as_known = await members[1].directory.fetch(MODEL, num_blocks=30)
        assert len(as_known.nodes) == 2
        assert members[1].directory.dropped == {"num_blocks": 1}


async def test_what_the_checkpoint_says_goes_before_any_number_of_records(tmp_path: Path) -> None:
    """Strangers outnumber the honest node; the number of blocks is known from elsewhere."""
    async with local_swarm(tmp_path, 4) as members:
        honest = members[0]
        await honest.directory.publish(make_status(num_blocks=12, span=(0, 12)))
        for stranger in members[1:3]:
            await stranger.directory.publish(make_status(num_blocks=13, span=(0, 1)))
        reader = members[3].directory
        assert (await reader.fetch(MODEL)).num_blocks == 13
        reader.set_num_blocks(MODEL, 12)
        snapshot = await reader.fetch(MODEL)
        assert (snapshot.num_blocks, snapshot.holes()) == (12, ())
        assert [node.peer_id for node in snapshot.nodes] == [honest.identity.peer_id]
        assert [record.num_blocks for record in await reader.fetch_all()] == [12]
        assert reader.count_holders_and_states(MODEL)[0] == (1,) * 12


async def test_restarted_node_continues_above_its_earlier_records(tmp_path: Path) -> None:
    """Even if its clock was set back meanwhile."""
    clock = _Clock()
    identity = Identity.ephemeral(tmp_path)
    async with local_swarm(tmp_path, 2) as members:
        initial_peers = members[0].transport.addresses
        for load, offset_s in ((0.5, 0.0), (1.0, -20.0)):
            clock.offset_s = offset_s
            async with open_swarm(
                identity, host_maddrs=LOOPBACK, initial_peers=initial_peers, clock=clock
            ) as swarm:
                await swarm.directory.fetch(MODEL)
                await swarm.directory.publish(make_status(load=load))
            state = (await members[1].directory.fetch(MODEL)).find_node(identity.peer_id)
            assert state is not None
            assert state.load == load


@pytest.mark.parametrize("offset_s", [-CLOCK_SKEW_S + 2, CLOCK_SKEW_S - 2])
async def test_clocks_may_differ(tmp_path: Path, offset_s: float) -> None:
    clock = _Clock()
    clock.offset_s = offset_s
    async with (
        local_swarm(tmp_path, 2) as members,
        open_swarm(
            Identity.ephemeral(tmp_path),
            host_maddrs=LOOPBACK,
            initial_peers=members[0].transport.addresses,
            clock=clock,
        ) as skewed,
    ):
        await skewed.directory.publish(make_status())
        await members[1].directory.publish(make_status())
        assert len((await members[0].directory.fetch(MODEL)).nodes) == 2
        assert len((await skewed.directory.fetch(MODEL)).nodes) == 2


async def test_lone_node_sees_itself(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 1) as (alone,):
        await alone.directory.publish(make_status())
        assert len((await alone.directory.fetch(MODEL)).nodes) == 1


async def test_many_records_are_not_read_in_one_turn_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the validator remembers are checked anew, a sixth of a millisecond each."""
    async with local_swarm(tmp_path, 1) as (alone,):
        storage, validator = (
            dht_node(alone).protocol.storage,
            alone.directory._validator,
        )
        key, now = DHTID.generate(model_key(MODEL)), time.time()
        for _ in range(64):
            other = Identity.ephemeral(tmp_path)
            record = make_record(other, now)
            value = MSGPackSerializer.dumps(seal_statement(record, other))
            assert storage.store_subkey(key, other.peer_id, value, record.expires_at)
        turn, opened_in, unseal = 0, Counter[int](), validator.open

        def noted(kind: type[NodeRecord], sealed: bytes) -> NodeRecord:
            opened_in[turn] += 1
            return unseal(kind, sealed)

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(validator, "open", noted)
        counting = asyncio.create_task(count_turns())
        assert len((await alone.directory.fetch(MODEL)).nodes) == 64
        counting.cancel()
        assert opened_in.total() == 64
        assert max(opened_in.values()) <= 16


async def test_directory_answers_from_memory_without_the_network(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as members:
        await members[0].directory.publish(make_status())
        assert len((await members[1].directory.fetch(MODEL)).nodes) == 1
        os.kill(members[1].transport.daemon_pid, signal.SIGKILL)
        await members[1].transport.daemon_exited.wait()
        assert len((await members[1].directory.fetch(MODEL)).nodes) == 1
        with pytest.raises(PeerUnreachableError, match="daemon of this node is gone"):
            await members[1].directory.publish(make_status())


async def test_fifty_concurrent_reads_agree(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        for member in members:
            await member.directory.publish(make_status())
        reads = [members[i % 3].directory.fetch(MODEL) for i in range(50)]
        snapshots = await asyncio.gather(*reads)
        assert {len(snapshot.nodes) for snapshot in snapshots} == {3}


async def test_cancelled_calls_leave_nothing(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        for delay_s in (0.0, 0.002, 0.01):
            calls = [
                asyncio.create_task(members[1].directory.publish(make_status())),
                asyncio.create_task(members[2].directory.fetch(MODEL)),
            ]
            await asyncio.sleep(delay_s)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        await members[1].directory.publish(make_status())
        assert len((await members[2].directory.fetch(MODEL)).nodes) == 1


async def test_swarm_key_keeps_others_out(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2, swarm_key=KEY) as members:
        await members[0].directory.publish(make_status())
        assert len((await members[1].directory.fetch(MODEL)).nodes) == 1
        for wrong_key in (None, "some other swarm key"):
            with pytest.raises(BootstrapError, match="--swarm-key"):
                async with open_swarm(
                    Identity.ephemeral(tmp_path),
                    host_maddrs=LOOPBACK,
                    initial_peers=members[0].transport.addresses,
                    swarm_key=wrong_key,
                ):
                    pass
        assert members[0].directory.dropped["foreign"] > 0


async def test_members_return_to_an_initial_peer_that_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejoining, "_REJOIN_INTERVAL_S", 0.2)
    identity = Identity.ephemeral(tmp_path)
    async with AsyncExitStack() as stack:
        async with open_swarm(identity, host_maddrs=LOOPBACK) as first:
            addresses = first.transport.addresses
            member = await stack.enter_async_context(
                open_swarm(
                    Identity.ephemeral(tmp_path), host_maddrs=LOOPBACK, initial_peers=addresses
                )
            )
            await member.directory.publish(make_status())
        await member.directory.publish(make_status())  # notices that the first has gone
        bare = addresses[0].partition("/p2p/")[0]
        again = await stack.enter_async_context(open_swarm(identity, host_maddrs=(bare,)))
        assert (await again.directory.fetch(MODEL)).nodes == ()

        async def is_back() -> bool:
            await member.directory.publish(make_status())
            return len((await again.directory.fetch(MODEL)).nodes) == 1

        await eventually(is_back, timeout_s=20)


async def test_node_that_drains_to_move_holds_a_place_where_it_will_be(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as (mover, other):
        await mover.directory.publish(make_status(state="serving", movable=True))
        await other.directory.publish(make_status(state="serving"))
        seen = await other.directory.fetch(MODEL)
        assert {node.peer_id for node in seen.nodes if node.movable} == {mover.identity.peer_id}
        await mover.directory.publish(make_status(state="draining", next_span=(10, 20)))
        seen = await other.directory.fetch(MODEL)
        assert [node.peer_id for node in seen.nodes] == [other.identity.peer_id]
        assert [(node.peer_id, node.span) for node in seen.joining] == [
            (mover.identity.peer_id, Span(10, 20))
        ]
        await mover.directory.publish(make_status(state="draining"))
        assert not (await other.directory.fetch(MODEL)).joining


async def test_who_announces_itself_does_not_fetch_what_others_announce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_swarm(tmp_path, 4) as members:
        for member in members:
            await member.directory.publish(make_status())
        fetched: list[object] = []
        for member in members:
            protocol = dht_node(member).protocol
            find = protocol.find

            async def listen(*arguments: Any, _find: Any = find) -> Any:
                answer = await _find(*arguments)
                fetched.extend(answer.records)
                return answer

            monkeypatch.setattr(protocol, "find", listen)
        record = await members[0].directory.publish(make_status(span=(20, 30)))
        assert not fetched
        snapshot = await members[3].directory.fetch(MODEL)
        assert fetched
        state = snapshot.find_node(members[0].identity.peer_id)
        assert state is not None
        assert state.seq == record.seq
        holders = [
            member
            for member in members
            if dht_node(member).protocol.storage.get(DHTID.generate(source=model_key(MODEL)))
        ]
        assert len(holders) == 4


async def test_a_client_that_knows_no_member_any_more_asks_nodes_whose_records_it_has(
    tmp_path: Path,
) -> None:
    async with local_swarm(tmp_path, 2) as (first, second):
        await second.directory.publish(make_status(span=(0, 2)))
        async with open_swarm(
            Identity.ephemeral(tmp_path), initial_peers=first.transport.addresses, listen=False
        ) as client:
            assert len((await client.directory.fetch(ModelId(MODEL_ID))).nodes) == 1
            await first.directory.publish(make_status(span=(2, 4)))
            table = dht_node(client).protocol.routing_table
            for node_id in list(table.uid_to_peer_id):
                del table[node_id]
                dht_node(client).blacklist.register_failure(node_id)
            assert len((await client.directory.fetch(ModelId(MODEL_ID))).nodes) == 2
