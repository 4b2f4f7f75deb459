"""Sessions that a donor fills: what it may send and when, and who is hurt if it sends nonsense.

T packed tokens, L tokens of one row, D hidden.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.errors import StreamClosedError
from nesa_node.engine.cache.pages import PAGE_TOKENS
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.swarm.protocol.messages import (
    VERSION,
    Close,
    Closed,
    Downstream,
    ErrorMessage,
    HandOver,
    Linked,
    Message,
    Opened,
    Output,
    Pages,
    PushOpen,
    PushOpened,
    Reordered,
    RowSlice,
    Step,
    Sync,
    Synced,
    TransferOpen,
    TransferOpened,
)
from tests.server.bench import Node, Peer, Wire, open_node
from tests.server.session.test_session_server import Spied, end, opened
from tests.server.test_sessions_together import assert_same

DONOR, UPSTREAM = "donor", "up"
TOKENS = 40


class Past:
    """A row of `TOKENS` tokens as another node has computed it, and what comes after."""

    def __init__(self, blocks: ModelBlocks) -> None:
        self.hidden_TD = torch.randn(TOKENS + 1, blocks.hidden_size)
        pool = blocks.new_pool(2 * TOKENS)
        table = pool.reserve(pool.num_pages).new_table()
        table.reserve(TOKENS + 1)
        outputs = [
            blocks.forward(part_LD, [RowChunk(table, len(part_LD))])
            for part_LD in torch.split(self.hidden_TD, [TOKENS, 1])
        ]
        self.output_TD = torch.cat(outputs)
        self.pages = pool.export_tokens(table.slots(0, TOKENS), blocks.span)

    def page(self, start: int, end: int) -> tuple[Pages, bytes]:
        return pages_of(self.pages[:, start:end], start)


def pages_of(tokens: Tensor, position: int = 0) -> tuple[Pages, bytes]:
    meta, payload = tensors.encode(tokens)
    return Pages(row=0, position=position, tensor=meta), bytes(payload)


async def filled(node: Node, **options: Any) -> Peer:
    """A session that waits for its donor."""
    peer = node.peer()
    peer.open(donor=DONOR, max_tokens=2 * TOKENS, **options)
    await peer.wire.hear_a(Opened)
    return peer


def transfer_open(peer: Peer) -> TransferOpen:
    return TransferOpen(version=VERSION, session=peer.session, secret=peer.secret)


async def transfer(node: Node, peer: Peer, sender: str = DONOR) -> Wire:
    wire = node.connect(sender)
    wire.say(transfer_open(peer))
    await wire.hear_a(TransferOpened)
    return wire


async def refusal(wire: Wire) -> str:
    return (await wire.hear_a(ErrorMessage)).code


async def synced(wire: Wire, *lengths: int) -> tuple[int, ...]:
    wire.say(Sync(lengths=lengths))
    return (await wire.hear_a(Synced)).lengths


async def goes_on(peer: Peer, past: Past) -> None:
    """The session has what it was handed, and computes on it."""
    peer.lengths = [TOKENS]
    peer.link()
    await peer.wire.hear_a(Linked)
    peer.step({0: 1}, past.hidden_TD[TOKENS:])
    _, output_TD = await peer.output()
    assert_same(output_TD, past.output_TD[TOKENS:])
    await end(peer)


async def test_a_donor_that_comes_after_the_link_leaves_the_push_alone(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = await filled(node, upstream=UPSTREAM)
        early = await transfer(node, peer)
        peer.link(upstream=UPSTREAM)
        await peer.wire.hear_a(Linked)
        push = node.connect(UPSTREAM)
        push.say(PushOpen(version=VERSION, session=peer.session, secret=peer.secret, epoch=1))
        await push.hear_a(PushOpened)
        await early.hear_the_end()
        for number in range(3):
            late = node.connect(DONOR)
            late.say(transfer_open(peer))
            assert await refusal(late) == "unexpected"
            meta, payload = tensors.encode(torch.randn(1, blocks.hidden_size))
            rows = (RowSlice(0, number, 1),)
            push.say(
                Step(session=peer.session, epoch=1, step=number, rows=rows, tensor=meta), payload
            )
            assert (await peer.wire.hear_a(Output)).step == number
        await end(peer)
        await push.hear_the_end()


async def test_a_second_transfer_goes_on_where_the_first_one_was(blocks: ModelBlocks) -> None:
    past = Past(blocks)
    async with open_node(blocks) as node:
        peer = await filled(node)
        first = await transfer(node, peer)
        first.say(*past.page(0, 10))
        assert await synced(first, 10) == (10,)
        first.say(*past.page(10, 20))
        second = await transfer(node, peer)
        await first.hear_the_end()
        [held] = await synced(second, TOKENS)
        assert held in (10, 20)
        second.say(*past.page(held, TOKENS))
        assert await synced(second, TOKENS) == (TOKENS,)
        await goes_on(peer, past)
        assert node.pool.held_pages == 0


async def test_transfers_that_take_turns_as_fast_as_they_can_hurt_nobody(
    blocks: ModelBlocks,
) -> None:
    past = Past(blocks)

    async def hurry(peer: Peer) -> None:
        wire = node.connect(DONOR)
        wire.say(transfer_open(peer))
        for at in range(0, TOKENS, 10):
            wire.say(*past.page(at, at + 10))
            await asyncio.sleep(0)
        await wire.hear_the_end()

    async with open_node(blocks) as node:
        bystander, peer = await opened(node, "bystander", max_tokens=2 * TOKENS), await filled(node)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(hurry(peer))
            bystander.step({0: TOKENS}, past.hidden_TD[:TOKENS])
            bystander.step({0: 1}, past.hidden_TD[TOKENS:])
            await asyncio.sleep(0.2)
            last = await transfer(node, peer)
        assert await synced(last, 0) == (0,)
        last.say(*past.page(0, TOKENS))
        assert await synced(last, TOKENS) == (TOKENS,)
        await goes_on(peer, past)
        outputs = [(await bystander.output())[1] for _ in range(2)]
        assert_same(torch.cat(outputs), past.output_TD)
        await end(bystander)
        assert node.pool.held_pages == 0


@pytest.mark.parametrize("change", ["rollback", "reorder"])
async def test_changes_wait_for_the_link_of_a_session_that_is_handed_over(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Else its pages could be another's already when what the donor sent is put there."""
    past = Past(blocks)
    Spied(monkeypatch, seconds=0.2)
    async with open_node(blocks) as node:
        bystander, peer = await opened(node, "bystander", max_tokens=2 * TOKENS), await filled(node)
        donor = await transfer(node, peer)
        bystander.step({0: TOKENS}, past.hidden_TD[:TOKENS])
        await asyncio.sleep(0.05)
        donor.say(*past.page(0, TOKENS))  # waits for the bystander's step
        await asyncio.sleep(0.05)
        if change == "rollback":
            peer.rollback([0])
        else:
            peer.reorder([0])
        assert await refusal(peer.wire) == "not_linked"
        peer.epoch = 0
        assert await synced(donor, TOKENS) == (TOKENS,)
        bystander.step({0: 1}, past.hidden_TD[TOKENS:])
        await goes_on(peer, past)
        outputs = [(await bystander.output())[1] for _ in range(2)]
        assert_same(torch.cat(outputs), past.output_TD)
        await end(bystander)


async def test_a_refused_link_leaves_the_donor_its_place(blocks: ModelBlocks) -> None:
    past = Past(blocks)
    async with open_node(blocks) as node:
        peer = await filled(node)
        donor = await transfer(node, peer)
        peer.lengths = [TOKENS]
        peer.link()  # before anything came
        assert await refusal(peer.wire) == "bad_position"
        peer.epoch = 0
        donor.say(*past.page(0, TOKENS))
        assert await synced(donor, TOKENS) == (TOKENS,)
        await goes_on(peer, past)


def kept_output(
    peer: Peer, *rows: tuple[int, int, int], hidden_TD: Tensor | None = None
) -> tuple[Step, bytes]:
    """An output [T, D] that the donor says it kept, by default as wide as it should be."""
    if hidden_TD is None:
        hidden_TD = torch.ones(sum(count for *_, count in rows), peer._blocks.hidden_size)
    meta, payload = tensors.encode(hidden_TD)
    slices = tuple(RowSlice(*row) for row in rows)
    step = Step(session=peer.session, epoch=0, step=1, rows=slices, tensor=meta)
    return step, bytes(payload)


async def test_kept_outputs_that_cannot_be_are_refused_and_change_nothing(
    blocks: ModelBlocks,
) -> None:
    width, far = blocks.hidden_size, 2 * TOKENS + 1
    async with open_node(blocks) as node:
        peer = await filled(node, rows=2)
        for code, (step, payload) in (
            ("bad_rows", kept_output(peer, (0, 0, 5), (2, 0, 1))),
            ("bad_rows", kept_output(peer, (0, 0, 5), (0, 5, 5))),
            ("bad_position", kept_output(peer, (0, 0, far))),
            ("bad_tensor", kept_output(peer, (0, 0, 5), hidden_TD=torch.ones(5, width + 1))),
            ("bad_tensor", kept_output(peer, (0, 0, 5), hidden_TD=torch.ones(4, width))),
            ("bad_tensor", kept_output(peer, (0, 0, 5), hidden_TD=torch.ones(5, width).half())),
            (
                "not_finite",
                kept_output(peer, (0, 0, 1), hidden_TD=torch.full((1, width), math.nan)),
            ),
        ):
            donor = await transfer(node, peer)
            donor.say(step, payload)
            assert await refusal(donor) == code
        donor = await transfer(node, peer)
        donor.say(*kept_output(peer, (0, 0, 5), (1, 0, 1)))
        assert await synced(donor, 0, 0) == (0, 0)
        # Where a row began with a prefix nothing is kept of that, but then all.
        donor.say(*kept_output(peer, (0, 7, 5), (1, 3, 1)))
        donor.say(*kept_output(peer, (1, 4, 2), (0, 13, 1)))
        assert await refusal(donor) == "bad_position"
        await end(peer)


async def test_star_has_no_donor_since_nothing_is_reserved_for_what_that_kept(
    blocks: ModelBlocks,
) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        peer.open(donor=DONOR, mode="star")
        assert await refusal(peer.wire) == "not_donor"


async def test_pages_that_cannot_be_are_refused_and_change_nothing(blocks: ModelBlocks) -> None:
    past = Past(blocks)
    good, payload = past.page(0, TOKENS)
    shape = good.tensor.shape

    def pages(row: int = 0, position: int = 0, dtype: str = "float32", *dims: int) -> Pages:
        meta = TensorMeta(dtype=dtype, shape=dims or shape)
        return Pages(row=row, position=position, tensor=meta)

    async with open_node(blocks) as node:
        peer = await filled(node)
        for code, message, data in (
            ("bad_rows", pages(row=1), payload),
            ("bad_position", pages(position=1), payload),
            ("bad_position", *pages_of(past.pages.repeat(1, 3, 1, 1))),
            ("bad_tensor", pages(0, 0, "float16"), payload[: len(payload) // 2]),
            ("bad_tensor", pages(0, 0, "float32", *reversed(shape)), payload),
            ("bad_tensor", pages(0, 0, "float32", *shape[:3]), payload),
            ("bad_tensor", pages(0, 0, "float32", shape[0], 0, *shape[2:]), memoryview(b"")),
            ("not_finite", good, b"\xff" * len(payload)),
        ):
            donor = await transfer(node, peer)
            donor.say(message, data)
            assert await refusal(donor) == code
        donor = await transfer(node, peer)
        donor.say(Sync(lengths=(0, 0)))
        assert await refusal(donor) == "bad_rows"
        donor = await transfer(node, peer)
        assert await synced(donor, 1 << 24) == (0,)
        donor.say(good, payload)
        assert await synced(donor, 1 << 24) == (TOKENS,)
        await goes_on(peer, past)


async def test_the_end_of_a_session_ends_its_transfer(blocks: ModelBlocks) -> None:
    past = Past(blocks)
    async with open_node(blocks) as node:
        peer = await filled(node)
        donor = await transfer(node, peer)
        donor.say(*past.page(0, TOKENS))
        peer.wire.say(Close())
        await peer.wire.hear_a(Closed)
        assert node.pool.held_pages == 0
        assert node.pool.unreserved_pages == node.pool.num_pages
        with pytest.raises(StreamClosedError):
            await donor.hear_a(Synced)


class Unread(Wire):
    """A stream whose other end takes nothing."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.taking = asyncio.Event()

    async def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
        await self.taking.wait()
        await super().send(message, payload)


async def test_hand_overs_wait_until_the_answers_to_earlier_ones_are_taken(
    blocks: ModelBlocks,
) -> None:
    async with open_node(blocks) as node:
        wire = Unread("client")
        peer = Peer(wire, blocks)
        wire.taking.set()
        node.serve(wire)
        peer.open()
        await wire.hear_a(Opened)
        peer.link()
        await wire.hear_a(Linked)
        wire.taking.clear()
        before = len(asyncio.all_tasks())
        for _ in range(1000):
            wire.say(HandOver(to=Downstream(peer="nobody", blocks=(7, 9))))
        await asyncio.sleep(0.1)
        assert len(asyncio.all_tasks()) <= before + 2
        wire.taking.set()
        assert {await refusal(wire) for _ in range(1000)} == {"bad_link"}
        await end(peer)


async def test_rows_that_are_copied_have_room_for_what_they_get(blocks: ModelBlocks) -> None:
    """A row that outgrew its promise must not be multiplied into room that nobody has."""
    page = PAGE_TOKENS
    async with open_node(blocks, tokens=4 * page, peer_tokens=3 * page) as node:
        other = await opened(node, "other", max_tokens=page)
        peer = await opened(node, rows=2, max_tokens=page)
        peer.step({0: page + 8})
        await peer.output()
        peer.reorder([0, 0])
        assert await refusal(peer.wire) == "cache_full"
        peer.epoch -= 1
        peer.lengths = [page + 8, 0]
        await end(other)
        peer.reorder([0, 0])
        assert await refusal(peer.wire) == "cache_full", "the quota of a peer counts copies"
        peer.epoch -= 1
        peer.lengths = [page + 8, 0]
        peer.step({0: 1, 1: 1})
        await peer.output()
        await end(peer)
        assert node.pool.held_pages == 0
        assert node.pool.unreserved_pages == node.pool.num_pages


async def test_rows_that_are_copied_take_room_where_there_is_some(blocks: ModelBlocks) -> None:
    page = PAGE_TOKENS
    async with open_node(blocks, tokens=4 * page) as node:
        peer = await opened(node, rows=2, max_tokens=page)
        peer.step({0: page + 8})
        await peer.output()
        peer.reorder([0, 0])
        await peer.wire.hear_a(Reordered)
        assert node.pool.held_pages == 2
        assert node.pool.unreserved_pages == 0, "both may write to all of it"
        hidden_TD = torch.randn(1, blocks.hidden_size).repeat(2, 1)
        peer.step({0: 1, 1: 1}, hidden_TD)
        _, output_TD = await peer.output()
        assert_same(output_TD[:1], output_TD[1:])
        assert node.pool.held_pages == 3
        await end(peer)
        assert node.pool.held_pages == 0
        assert node.pool.unreserved_pages == node.pool.num_pages


async def test_no_other_peer_than_the_donor_may_fill_a_session(blocks: ModelBlocks) -> None:
    past = Past(blocks)
    async with open_node(blocks) as node:
        peer = await filled(node)
        stranger = node.connect("stranger")
        stranger.say(transfer_open(peer))
        assert await refusal(stranger) == "not_donor"
        donor = await transfer(node, peer)
        donor.say(*past.page(0, TOKENS))
        assert await synced(donor, TOKENS) == (TOKENS,)
        await goes_on(peer, past)
