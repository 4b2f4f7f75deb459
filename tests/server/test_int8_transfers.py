"""Sessions that are handed over between nodes with caches of either kind, and hostile ones.

L tokens of one row, B bytes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype
from nesa_node.engine.cache.pages import PageTable
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks
from nesa_node.server.scheduler.batch import open_executor
from nesa_node.server.session.transfer import SessionDonor
from nesa_node.swarm.protocol.messages import (
    Downstream,
    Linked,
    Message,
    Pages,
    QuantizedPages,
    Sync,
    Synced,
    TransferOpened,
)
from tests.engine.chained import distance, forward, new_row, open_local
from tests.engine.tiny_models import save_tiny_model
from tests.server.bench import Wire, open_node
from tests.server.session.test_session_server import end
from tests.server.test_donor import state_of
from tests.server.test_transfers import (
    DONOR,
    TOKENS,
    filled,
    refusal,
    synced,
    transfer,
    transfer_open,
)

WITHIN = 2e-3
"""Of outputs, where a last bit can round a cached value to its next level."""


@pytest.fixture(scope="session")
def int8_blocks(models_dir: Path) -> ModelBlocks:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    return load_blocks(
        checkpoint, Span(1, 3), dtype=torch.float32, device="cpu", cache_dtype="int8"
    )


def row_of(blocks: ModelBlocks, hidden_LD: Tensor) -> PageTable:
    table = new_row(blocks, 128)
    forward(blocks, hidden_LD, table)
    return table


async def sent_by(table: PageTable, blocks: ModelBlocks, cache_dtype: str) -> list[Any]:
    """What a donor sends to a successor with such a cache: messages with payloads."""
    wire = Wire("successor")

    async def dial(_: Downstream) -> tuple[Any, TransferOpened]:
        return cast(Any, wire), TransferOpened(cache_dtype=cache_dtype)

    async with open_executor() as executor:
        donor = SessionDonor(dial, state_of(table, blocks), executor)
        for length in (0, table.length):
            wire.say(Synced(lengths=(length,)))
        span = blocks.span
        await donor.sync(Downstream(peer="successor", blocks=(span.start, span.end)))
        sent: list[tuple[Message, bytes]] = []
        while not sent or not isinstance(sent[-1][0], Sync) or sent[-1][0].lengths == (0,):
            message, payload = await wire.hear()
            sent.append((message, bytes(payload)))
            if isinstance(message, Sync) and blocks.cache_dtype == "int8" != cache_dtype:
                assert message.lengths == (0,)
                break
        await donor.close()
    return [each for each in sent if not isinstance(each[0], Sync)]


@pytest.mark.parametrize("giving", ["auto", "int8"])
@pytest.mark.parametrize("taking", ["auto", "int8", "of a later version"])
async def test_pages_go_over_in_the_form_that_both_nodes_have(
    blocks: ModelBlocks, int8_blocks: ModelBlocks, giving: CacheDtype, taking: str
) -> None:
    donors = int8_blocks if giving == "int8" else blocks
    takers = int8_blocks if taking == "int8" else blocks
    hidden_LD = torch.randn(TOKENS + 1, blocks.hidden_size)
    table = row_of(donors, hidden_LD[:TOKENS])
    sent = await sent_by(table, donors, taking)
    if giving == "int8" != taking:
        assert not sent, "its node would answer for what the donor rounded"
        return
    kind = QuantizedPages if giving == taking == "int8" else Pages
    assert {type(message) for message, _ in sent} == {kind}
    async with open_node(takers) as node:
        peer = await filled(node)
        wire = node.connect(DONOR)
        wire.say(transfer_open(peer))
        opened = await wire.hear_a(TransferOpened)
        assert opened.cache_dtype == takers.cache_dtype
        for message, payload in sent:
            wire.say(message, payload)
        assert await synced(wire, TOKENS) == (TOKENS,)
        peer.lengths = [TOKENS]
        peer.link()
        await peer.wire.hear_a(Linked)
        peer.step({0: 1}, hidden_LD[TOKENS:])
        _, output_LD = await peer.output()
        expected_LD = forward(donors, hidden_LD[TOKENS:], table)
        near = 1e-5 if giving == taking else 0.05
        assert distance(output_LD, expected_LD) <= (WITHIN if kind is QuantizedPages else near)
        await end(peer)


async def test_a_successor_goes_on_with_the_donors_own_codes(int8_blocks: ModelBlocks) -> None:
    table = row_of(int8_blocks, torch.randn(TOKENS, int8_blocks.hidden_size))
    [(pages, payload)] = await sent_by(table, int8_blocks, "int8")
    assert isinstance(pages, QuantizedPages)
    expected = table.pool.export_bytes(table.slots(0, TOKENS), int8_blocks.span)
    assert payload == expected.numpy().tobytes()
    full = TOKENS * int8_blocks.full_cache_bytes_per_token
    assert len(payload) < 0.3 * full, "a third of float32's"


async def test_impossible_codes_are_refused_and_change_nothing(
    blocks: ModelBlocks, int8_blocks: ModelBlocks
) -> None:
    hidden_LD = torch.randn(TOKENS + 1, blocks.hidden_size)
    table = row_of(int8_blocks, hidden_LD[:TOKENS])
    [(good, payload)] = await sent_by(table, int8_blocks, "int8")
    size = len(payload)
    per_token = size // TOKENS

    def pages(**changed: int) -> QuantizedPages:
        fields = {"row": 0, "position": 0, "count": TOKENS, "nbytes": size, **changed}
        return QuantizedPages(**fields)

    # The first block's keys: 2 heads of 32 codes, then their scales.
    nan, negative = bytearray(payload), bytearray(payload)
    nan[64:66], negative[64:66] = b"\xc0\x7f", b"\x80\xbf"
    lowest = bytearray(payload)
    lowest[5] = 0x80
    async with open_node(int8_blocks) as node:
        peer = await filled(node)
        for code, message, data in (
            ("bad_rows", pages(row=1), payload),
            ("bad_position", pages(position=1), payload),
            ("bad_position", pages(count=3 * TOKENS, nbytes=3 * size), 3 * payload),
            ("bad_tensor", pages(count=TOKENS - 1), payload),
            ("bad_tensor", pages(nbytes=size - 1), payload[:-1]),
            ("bad_tensor", pages(count=1), payload),
            ("bad_tensor", pages(count=1 << 24, nbytes=1 << 45), b""),
            ("not_finite", good, bytes(nan)),
            ("bad_tensor", good, bytes(negative)),
            ("bad_tensor", good, bytes(lowest)),
        ):
            donor = await transfer(node, peer)
            donor.say(message, data)
            assert await refusal(donor) == code, message
        donor = await transfer(node, peer)
        assert await synced(donor, 1 << 24) == (0,)
        donor.say(pages(count=10, nbytes=10 * per_token), payload[: 10 * per_token])
        rest = TOKENS - 10
        donor.say(
            pages(position=10, count=rest, nbytes=rest * per_token), payload[10 * per_token :]
        )
        assert await synced(donor, TOKENS) == (TOKENS,)
        peer.lengths = [TOKENS]
        peer.link()
        await peer.wire.hear_a(Linked)
        peer.step({0: 1}, hidden_LD[TOKENS:])
        _, output_LD = await peer.output()
        assert distance(output_LD, forward(int8_blocks, hidden_LD[TOKENS:], table)) <= WITHIN
        await end(peer)
        assert node.pool.held_pages == 0


async def test_codes_for_a_cache_that_has_none_are_refused(
    blocks: ModelBlocks, int8_blocks: ModelBlocks
) -> None:
    table = row_of(int8_blocks, torch.randn(TOKENS, int8_blocks.hidden_size))
    [(pages, payload)] = await sent_by(table, int8_blocks, "int8")
    async with open_node(blocks) as node:
        peer = await filled(node)
        donor = await transfer(node, peer)
        donor.say(pages, payload)
        assert await refusal(donor) == "bad_tensor"
        await end(peer)


async def test_rows_that_share_a_prompt_share_its_pages(int8_blocks: ModelBlocks) -> None:
    """Beam search over a cache in 8 bits: a reorder copies what is written later only."""
    blocks = int8_blocks
    pool = blocks.new_pool(256)
    reservation = pool.reserve(8)
    rows = [reservation.new_table() for _ in range(2)]
    prompt_LD, steps = torch.randn(40, blocks.hidden_size), torch.randn(2, blocks.hidden_size)
    forward(blocks, prompt_LD, rows[0])
    reservation.reorder(rows, [0, 0])
    for row in rows:
        row.reserve(41)
    outputs = blocks.forward(steps, [RowChunk(row, 1) for row in rows])
    for number, row in enumerate(rows):
        alone = row_of(blocks, prompt_LD)
        expected_LD = forward(blocks, steps[number : number + 1], alone)
        assert distance(outputs[number : number + 1], expected_LD) <= WITHIN
        assert row.pages[0] == rows[0].pages[0]
    assert rows[0].pages[1] != rows[1].pages[1]
    await asyncio.sleep(0)
