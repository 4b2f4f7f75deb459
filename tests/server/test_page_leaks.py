"""However sessions are opened, used and ended, every page comes back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from nesa_node.core.errors import StreamClosedError
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.swarm.protocol.messages import (
    Busy,
    Cancel,
    Close,
    Opened,
    Ping,
    Pong,
    Prefix,
    Reordered,
)
from tests.server.bench import Node, Peer, open_node

MAX_TOKENS = 100
AT_ONCE = 24

Forks = Counter[tuple[bool, bool]]
"""Sessions by whether a fork of theirs went through, and whether any pages were shared then."""


def _prefix(rng: random.Random, rows: int) -> Prefix:
    """Digests of texts that often begin alike."""
    return _digests(
        ["".join(rng.choice("aab") for _ in range(rng.randint(0, 3))) for _ in range(rows)]
    )


def _digests(texts: list[str]) -> Prefix:
    """One of each text's pages, a letter a page."""
    return tuple(
        tuple(text[:end].encode().ljust(16) for end in range(1, len(text) + 1)) for text in texts
    )


class Ear:
    """Hears what a session is told; steps may be under way."""

    def __init__(self, peer: Peer, node: Node) -> None:
        self.forked = self.shared = False
        self._peer = peer
        self._pool = node.pool
        self._pongs: asyncio.Queue[Pong | None] = asyncio.Queue()

    async def listen(self) -> None:
        """Until the node ends the stream."""
        try:
            while True:
                message, _ = await self._peer.wire.hear()
                if isinstance(message, Pong):
                    self._pongs.put_nowait(message)
                elif isinstance(message, Reordered):
                    self.forked = True
                    self.shared |= max(self._pool._reference_counts) > 1
        except StreamClosedError:
            self._pongs.put_nowait(None)

    async def quiet(self) -> None:
        """Return when no step is under way, without which a fork is refused."""
        while True:
            self._peer.wire.say(Ping(nonce=1))
            pong = await self._pongs.get()
            if pong is None or not pong.busy:
                return
            await asyncio.sleep(0.001)


async def _session(node: Node, rng: random.Random, acts: int, forks: Forks) -> int:
    """One session that does random things, often before the last one is done."""
    peer = node.peer(rng.choice("abcd"))
    rows = rng.choice([1, 1, 2, 4])
    peer.open(rows=rows, max_tokens=rng.randint(1, MAX_TOKENS), prefix=_prefix(rng, rows))
    if rng.random() < 0.02:
        peer.wire.hang_up()
        await peer.wire.hear_the_end()
        return 1
    answer, _ = await peer.wire.hear()
    if isinstance(answer, Busy):
        await asyncio.sleep(0.005)
        return 1
    assert isinstance(answer, Opened)
    peer.lengths = [rng.choice([0, held, held]) for held in answer.held]
    peer.link()
    ear = Ear(peer, node)
    listening = asyncio.create_task(ear.listen())
    done = 1
    if rng.random() < 0.3:
        # However slow the machine is, some fill pages before they do random things.
        peer.step({0: 70}, want="none")
        await ear.quiet()
    for _ in range(rng.randint(0, acts)):
        done += 1
        chance = rng.random()
        if chance < 0.25:
            peer.rollback([rng.randint(0, length) for length in peer.lengths])
        elif chance < 0.45 and rows > 1:
            if rng.random() < 0.8:
                await ear.quiet()
            peer.reorder(rng.choices(range(rows), k=rows))
        else:
            chosen = rng.sample(range(rows), rng.randint(1, rows))
            peer.step({row: rng.choice([1, 1, 2, 30]) for row in chosen}, want="none")
        if rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0, 0.004))
    match rng.choice(["close", "cancel", "go"]):
        case "close":
            peer.wire.say(Close(prefix=_prefix(rng, rows)))
        case "cancel":
            peer.wire.say(Cancel())
        case _:
            peer.wire.hang_up()
    await listening
    forks[ear.forked, ear.shared] += 1
    return done + 1


async def _leave_a_text(node: Node) -> None:
    """One session that ends well: of those that do random things, few fill a page and keep it."""
    peer = node.peer("a")
    peer.open(max_tokens=MAX_TOKENS)
    answer, _ = await peer.wire.hear()
    assert isinstance(answer, Opened)
    peer.link()
    ear = Ear(peer, node)
    listening = asyncio.create_task(ear.listen())
    peer.step({0: MAX_TOKENS - 1}, want="none")
    await ear.quiet()
    peer.wire.say(Close(prefix=_digests(["aaa"])))
    await listening


async def _operate(blocks: ModelBlocks, operations: int, seed: int) -> None:
    rng = random.Random(seed)
    left = operations
    forks: Forks = Counter()

    async def work() -> None:
        nonlocal left
        while left > 0:
            done = await _session(node, rng, 20, forks)
            left -= done

    async with open_node(blocks, tokens=AT_ONCE * MAX_TOKENS) as node:
        await _leave_a_text(node)
        assert node.pool.cached_pages > 0
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())
        assert node.pool.held_pages == 0
        assert node.pool.unreserved_pages == node.pool.num_pages
        assert node.pool.prefixes.reused_tokens > 0
        node.pool._free_unheld(node.pool.prefixes.evict_oldest(node.pool.num_pages, lambda _: True))
        assert node.pool.cached_pages == 0
        assert node.admission.sessions == 0
    assert forks[True, True] > operations / 200, "pages were shared time and again"


async def test_a_thousand_random_operations_leave_every_page_free(blocks: ModelBlocks) -> None:
    await _operate(blocks, 1000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [2, 3])
async def test_ten_thousand_random_operations_leave_every_page_free(
    blocks: ModelBlocks, seed: int
) -> None:
    await _operate(blocks, 10_000, seed)
