"""Leaders by lease on a real DHT."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from nesa_node.core.ids import ModelId
from nesa_node.routing.succession import LeaseTerms, rank_successors
from nesa_node.swarm.dht.sealing import Lease
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.notice_store import LeaseEligibility, LeaseKeeper
from tests.swarm.local_swarm import eventually, local_swarm
from tests.swarm.record_fields import MODEL_ID

MODEL = ModelId(MODEL_ID)
EVERY_SIGNER = LeaseEligibility()
QUICK = LeaseTerms(ttl_s=3.0, succession_delay_s=0.6)


def _keepers(members: Sequence[Swarm], whom: LeaseEligibility = EVERY_SIGNER) -> list[LeaseKeeper]:
    return [
        LeaseKeeper(
            member.notices,
            member.identity.peer_id,
            MODEL,
            clock=time.time,
            eligibility=whom,
            terms=QUICK,
        )
        for member in members
    ]


@asynccontextmanager
async def _running(keepers: Sequence[LeaseKeeper]) -> AsyncIterator[list[asyncio.Task[None]]]:
    async def run(keeper: LeaseKeeper) -> None:
        while True:
            await keeper.step()
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(run(keeper)) for keeper in keepers]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_first_in_order_leads_and_the_next_follows_where_it_dies(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        keepers = _keepers(members)
        peers = [member.identity.peer_id for member in members]
        order = [peers.index(peer) for peer in rank_successors(MODEL, peers)]
        async with _running(keepers) as tasks:

            def only(index: int) -> bool:
                return [keeper.is_leader for keeper in keepers] == [i == index for i in range(3)]

            async def first_leads() -> bool:
                return only(order[0])

            await eventually(first_leads)
            epoch = keepers[order[0]].epoch
            tasks[order[0]].cancel()

            async def second_leads() -> bool:
                return keepers[order[1]].is_leader

            await eventually(second_leads)
            assert keepers[order[1]].epoch == epoch + 1
            assert not keepers[order[2]].is_leader


async def test_leader_that_leaves_is_followed_without_waiting_for_its_lease(
    tmp_path: Path,
) -> None:
    async with local_swarm(tmp_path, 2) as members:
        one, other = _keepers(members)

        async def led() -> bool:
            await one.step()
            return one.is_leader

        await eventually(led)
        await other.step()
        await one.release()
        left = time.monotonic()

        async def follows() -> bool:
            await other.step()
            return other.is_leader

        await eventually(follows)
        assert time.monotonic() - left < QUICK.ttl_s - 0.2


async def test_leader_that_is_not_allowed_or_has_lied_is_not_yielded_to(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as (honest, stranger):
        await stranger.notices.publish(
            Lease, MODEL, epoch=int(time.time()) - 1, ttl_s=100, role="leading"
        )
        own = honest.identity.peer_id
        liars: set[str] = set()
        strict = LeaseKeeper(
            honest.notices,
            own,
            MODEL,
            clock=time.time,
            eligibility=LeaseEligibility(frozenset({own})),
            terms=QUICK,
        )
        open_to_all = LeaseKeeper(
            honest.notices,
            own,
            MODEL,
            clock=time.time,
            distrusted=liars,  # type: ignore[arg-type]
            terms=QUICK,
        )
        for keeper, leads in ((strict, True), (open_to_all, False)):
            await keeper.step()
            await asyncio.sleep(QUICK.succession_delay_s)
            await keeper.step()
            assert keeper.is_leader == leads
        liars.add(stranger.identity.peer_id)
        await open_to_all.step()
        await asyncio.sleep(QUICK.succession_delay_s)
        await open_to_all.step()
        assert open_to_all.is_leader
