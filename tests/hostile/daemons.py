"""What anybody can know of daemons of the tiny Llama, and whether they hold nothing at the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from nesa_node.cli.services.local_swarm import LocalNode
from nesa_node.core.ids import PeerId
from nesa_node.swarm.node import Swarm
from tests.engine.tiny_models import HEAD_DIM, HIDDEN
from tests.hostile.attacker import Attacker, Tally
from tests.hostile.frames import ROWS, Facts
from tests.hostile.session_attacks import full_session

KEY_VALUE_HEADS = 2


async def facts_of(nodes: Sequence[LocalNode], swarm: Swarm) -> list[Facts]:
    records = {record.peer_id: record for record in await swarm.directory.fetch_all()}
    heads = (KEY_VALUE_HEADS, HEAD_DIM)
    return [
        Facts(node.peer_id, node.addresses, record.model_id, record.span, HIDDEN, heads)
        for node in nodes
        for record in [records[node.peer_id]]
    ]


async def connect_to(targets: Sequence[Facts], swarm: Swarm) -> None:
    for target in targets:
        await swarm.transport.connect(PeerId(target.peer_id), target.addresses)


async def check_nothing_is_held(swarm: Swarm, targets: Sequence[Facts]) -> None:
    """Or is not any more after a while, by what the daemons announce."""
    deadline = time.monotonic() + 15
    while True:
        records = {record.peer_id: record for record in await swarm.directory.fetch_all()}
        # After a flood a record may be missing until it is renewed.
        held = {
            node.peer_id: record and record.total_cache_tokens - record.free_cache_tokens
            for node in targets
            for record in [records.get(node.peer_id)]
        }
        if all(tokens == 0 for tokens in held.values()):
            return
        assert time.monotonic() < deadline, f"cache tokens are still promised: {held}"
        await asyncio.sleep(0.2)


async def check_every_page_can_be_written(
    swarms: Sequence[Swarm], targets: Sequence[Facts], cache_tokens: int
) -> None:
    """Of daemons with `cache_tokens` each, by sessions of several clients that fill them.

    A page that somebody still holds although nobody was promised it would be missing.
    """
    for target in targets:
        async with AsyncExitStack() as sessions:
            for swarm in swarms:
                attacker = Attacker(swarm, target, random.Random(0), Tally())
                tokens = cache_tokens // len(swarms) // ROWS
                await sessions.enter_async_context(full_session(attacker, tokens))
    await check_nothing_is_held(swarms[0], targets)
