"""What a donor sends to the node that takes its session over, where it is cut meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from nesa_node.compression import tensors
from nesa_node.engine.cache.pages import PageTable
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.server.scheduler.batch import open_executor
from nesa_node.server.session.transfer import MAX_TRUNCATIONS, TransferSender
from nesa_node.swarm.protocol.messages import (
    Message,
    Pages,
    RowSlice,
    Step,
    Sync,
    Synced,
    TransferOpened,
    Want,
)
from nesa_node.swarm.protocol.replay_buffer import ReplayBuffer, SentStep
from tests.server.bench import Wire

TOKENS = 40


class _CutsInTheMiddle:
    """An executor in whose first run the session is cut, and its pages are given to another."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut: Callable[[], None] | None = cut

    async def run(self, work: Callable[[], Any]) -> Any:
        result = work()
        if self._cut is not None:
            self._cut()
            self._cut = None
            result = torch.full_like(result, 7.0)
        return result


def state_of(table: PageTable, blocks: ModelBlocks, outputs: ReplayBuffer | None = None) -> Any:
    return SimpleNamespace(
        tables=[table],
        blocks=blocks,
        opened=SimpleNamespace(session=b"s" * 16),
        replay_buffer=outputs or ReplayBuffer(),
    )


async def test_pages_that_were_read_while_the_session_was_cut_are_not_sent(
    blocks: ModelBlocks,
) -> None:
    """They may have been another session's meanwhile."""
    pool = blocks.new_pool(TOKENS)
    table = pool.reserve(pool.num_pages).new_table()
    table.reserve(TOKENS)
    blocks.forward(torch.randn(TOKENS, blocks.hidden_size), [RowChunk(table, TOKENS)])
    expected = pool.export_tokens(table.slots(0, 10), blocks.span)
    wire = Wire("successor")

    def cut() -> None:
        table.truncate(10)
        sending.truncate([10])

    executor: Any = _CutsInTheMiddle(cut)
    sending = TransferSender(cast(Any, wire), state_of(table, blocks), executor, TransferOpened())
    for length in (0, 0, 10):
        wire.say(Synced(lengths=(length,)))
    assert await sending.sync() == (10,)
    for _ in range(2):
        asked, _ = await wire.hear()
        assert isinstance(asked, Sync)
        assert asked.lengths == (0,)
    pages, payload = await wire.hear()
    assert isinstance(pages, Pages)
    sent = tensors.decode(pages.tensor, bytearray(payload), max_bytes=1 << 20)
    assert torch.equal(sent, expected)


class _Cuts(Wire):
    """A successor that takes the first message of a kind while the session is cut."""

    def __init__(self, peer: str, at: type[Message]) -> None:
        super().__init__(peer)
        self._at = at
        self.cut: Callable[[], None] | None = None
        self.times = 1

    async def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
        await super().send(message, payload)
        if isinstance(message, self._at) and self.cut is not None and self.times:
            self.times -= 1
            self.cut()


async def test_successor_lacks_no_kept_output_where_the_session_is_cut_meanwhile(
    blocks: ModelBlocks,
) -> None:
    """It would have none to give to a replacement of the node after it."""
    pool = blocks.new_pool(TOKENS)
    table = pool.reserve(pool.num_pages).new_table()
    table.reserve(TOKENS)
    blocks.forward(torch.randn(TOKENS, blocks.hidden_size), [RowChunk(table, TOKENS)])
    outbox = ReplayBuffer()
    for position in range(TOKENS):
        meta, payload = tensors.encode(torch.randn(1, blocks.hidden_size))
        # Alternating, or neighbours would be sent as one.
        want: Want = "all" if position % 2 else "last"
        outbox.append(SentStep(position, (RowSlice(0, position, 1),), want, meta, payload))
    wire = _Cuts("successor", Step)

    def cut() -> None:
        table.truncate(10)
        outbox.truncate([10])
        sending.truncate([10])

    wire.cut = cut
    async with open_executor() as executor:
        sending = TransferSender(
            cast(Any, wire), state_of(table, blocks, outbox), executor, TransferOpened()
        )
        for length in (0, 10, 10):
            wire.say(Synced(lengths=(length,)))
        assert await sending.sync() == (10,)
    assert (await wire.hear_a(Sync)).lengths == (0,)
    steps = [(await wire.hear_a(Step)).rows for _ in range(10)]
    assert steps == [(RowSlice(0, position, 1),) for position in range(10)]
    assert (await wire.hear_a(Sync)).lengths == (10,)


async def test_session_that_is_cut_while_its_pages_are_sent_is_handed_over(
    blocks: ModelBlocks,
) -> None:
    """The successor is told before more pages come, or they would not follow what it holds."""
    pool = blocks.new_pool(TOKENS)
    table = pool.reserve(pool.num_pages).new_table()
    table.reserve(TOKENS)
    blocks.forward(torch.randn(TOKENS, blocks.hidden_size), [RowChunk(table, TOKENS)])
    wire = _Cuts("successor", Pages)

    def cut() -> None:
        sending.truncate([0])

    wire.cut = cut
    async with open_executor() as executor:
        sending = TransferSender(
            cast(Any, wire), state_of(table, blocks), executor, TransferOpened()
        )
        for length in (0, 0, TOKENS):
            wire.say(Synced(lengths=(length,)))
        assert await sending.sync() == (TOKENS,)
    heard = [(await wire.hear())[0] for _ in range(5)]
    assert [type(message) for message in heard] == [Sync, Pages, Sync, Pages, Sync]
    assert [message.lengths for message in heard[::2]] == [(0,), (0,), (TOKENS,)]
    assert [message.position for message in heard[1::2]] == [0, 0]


async def test_session_that_is_cut_all_the_time_is_given_up_for_now(blocks: ModelBlocks) -> None:
    """As beams are, which change what rows hold with each step: the client asks again."""
    pool = blocks.new_pool(TOKENS)
    table = pool.reserve(pool.num_pages).new_table()
    table.reserve(TOKENS)
    blocks.forward(torch.randn(TOKENS, blocks.hidden_size), [RowChunk(table, TOKENS)])
    wire = _Cuts("successor", Pages)
    wire.times = 1000
    async with open_executor() as executor:
        sending = TransferSender(
            cast(Any, wire), state_of(table, blocks), executor, TransferOpened()
        )
        wire.cut = lambda: sending.truncate([20])
        for _ in range(MAX_TRUNCATIONS + 1):
            wire.say(Synced(lengths=(0,)))
        assert await sending.sync() == (0,)
    asked = [await wire.hear_a(Sync) for _ in range(MAX_TRUNCATIONS + 1)]
    assert [message.lengths for message in asked] == [(0,), (20,), (20,), (20,), (0,)]


async def test_cuts_of_the_last_tokens_do_not_keep_a_session_from_being_handed_over(
    blocks: ModelBlocks,
) -> None:
    """As speculation cuts it with each step: each time more of it is in place."""
    pool = blocks.new_pool(TOKENS)
    table = pool.reserve(pool.num_pages).new_table()
    table.reserve(TOKENS)
    blocks.forward(torch.randn(TOKENS, blocks.hidden_size), [RowChunk(table, TOKENS)])
    wire = _Cuts("successor", Pages)
    cuts = 3 * MAX_TRUNCATIONS
    wire.times = cuts
    lengths = iter(range(TOKENS - cuts, TOKENS))
    async with open_executor() as executor:
        sending = TransferSender(
            cast(Any, wire), state_of(table, blocks), executor, TransferOpened()
        )
        wire.cut = lambda: sending.truncate([next(lengths)])
        for _ in range(cuts + 2):
            wire.say(Synced(lengths=(TOKENS,)))
        assert await sending.sync() == (TOKENS,)
    asked = [await wire.hear_a(Sync) for _ in range(cuts + 2)]
    assert [message.lengths[0] for message in asked[1:]] == [*range(TOKENS - cuts, TOKENS + 1)]
