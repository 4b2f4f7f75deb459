"""Sessions that begin alike share pages: with whom, what of, and never more than was promised.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from nesa_node.core.errors import FrameError
from nesa_node.engine.cache.pages import PAGE_TOKENS
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.swarm.protocol.any_message import decode_message, encode_message
from nesa_node.swarm.protocol.messages import (
    MAX_PREFIX_DIGESTS,
    MAX_ROWS,
    VERSION,
    Busy,
    Cancel,
    Close,
    ErrorMessage,
    Open,
    Opened,
    Prefix,
    Reorder,
    Reordered,
    RolledBack,
)
from tests.engine.chained import distance
from tests.server.bench import Node, Peer, open_node

TOKENS = 5 * PAGE_TOKENS


def digests(text: str) -> Prefix:
    """Of one row: a page for every letter."""
    return (tuple(text[:end].encode().ljust(16) for end in range(1, len(text) + 1)),)


def inputs(blocks: ModelBlocks, text: str) -> Tensor:
    """Hidden states [T, D] that are the same for the same beginning."""
    pages = []
    for letter in text:
        generator = torch.Generator().manual_seed(ord(letter))
        pages.append(torch.randn(PAGE_TOKENS, blocks.hidden_size, generator=generator))
    return torch.cat(pages)


async def fed(peer: Peer, hidden_TD: Tensor) -> Tensor:
    """The outputs [T, D] of what row 0 does not hold yet."""
    rest_TD = hidden_TD[peer.lengths[0] :]
    peer.step({0: len(rest_TD)}, rest_TD)
    return (await peer.output())[1]


async def left(node: Node, client: str, text: str, *, at_close: bool = False) -> Tensor:
    """A session that is fed `text` and ends; the outputs [T, D] of all of it."""
    peer = node.peer(client)
    held = await peer.begin(max_tokens=TOKENS, prefix=() if at_close else digests(text))
    output_TD = await fed(peer, inputs(node.blocks, text))
    await peer.end(digests(text) if at_close else ())
    assert held == (0,)
    return output_TD


async def found(node: Node, client: str, text: str) -> int:
    """How much of `text` a session of this client would begin with."""
    peer = node.peer(client)
    (held,) = await peer.begin(max_tokens=TOKENS, prefix=digests(text))
    await peer.end()
    return held // PAGE_TOKENS


@pytest.mark.parametrize("at_close", [False, True])
async def test_a_session_goes_on_from_what_another_of_the_same_peer_left(
    blocks: ModelBlocks, at_close: bool
) -> None:
    async with open_node(blocks) as node:
        await left(node, "client", "abcd", at_close=at_close)
        alone = await left(node, "other", "abcxy")
        peer = node.peer("client")
        assert await peer.begin(max_tokens=TOKENS, prefix=digests("abcxy")) == (3 * PAGE_TOKENS,)
        output_TD = await fed(peer, inputs(blocks, "abcxy"))
        assert len(output_TD) == 2 * PAGE_TOKENS
        assert distance(output_TD, alone[3 * PAGE_TOKENS :]) <= 1e-5
        assert node.pool.prefixes.reused_tokens == 3 * PAGE_TOKENS
        await peer.end()
        assert await found(node, "client", "abcxy") == 5
        assert node.pool.held_pages == 0
        assert node.pool.unreserved_pages == node.pool.num_pages


async def test_a_session_that_still_runs_is_shared_as_far_as_it_got(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        first, second = node.peer(), node.peer()
        await first.begin(max_tokens=TOKENS, prefix=digests("abcd"))
        first.step({0: 70}, inputs(blocks, "abcd")[:70])
        await first.output()
        assert await second.begin(max_tokens=TOKENS, prefix=digests("abcd")) == (64,)
        ours, theirs = (
            await fed(first, inputs(blocks, "abcd")),
            await fed(second, inputs(blocks, "abcd")),
        )
        assert distance(ours[-50:], theirs[-50:]) <= 1e-5
        assert node.pool.held_pages == 2 + 2 + 2
        for peer in (first, second):
            await peer.end()


async def test_a_stranger_finds_nothing_and_what_it_leaves_is_found_by_nobody(
    blocks: ModelBlocks,
) -> None:
    async with open_node(blocks) as node:
        stranger = node.peer("stranger")
        await stranger.begin(max_tokens=TOKENS, prefix=digests("abc"))
        await fed(stranger, inputs(blocks, "xyz"))
        await stranger.end(digests("abc"))
        assert await found(node, "client", "abc") == 0
        expected_TD = await left(node, "client", "abc")
        assert await found(node, "client", "abc") == 3
        assert await found(node, "another", "abc") == 0
        assert await found(node, "stranger", "abc") == 3
        peer = node.peer("client")
        await peer.begin(max_tokens=TOKENS, prefix=digests("ab"))
        assert distance(await fed(peer, inputs(blocks, "abc")), expected_TD[64:]) <= 1e-5
        await peer.end()


async def test_trusted_peers_share_with_each_other_only(blocks: ModelBlocks) -> None:
    async with open_node(blocks, trusted=["friend", "family"]) as node:
        await left(node, "friend", "abc")
        await left(node, "client", "xyz")
        assert await found(node, "family", "abcd") == 3
        assert await found(node, "client", "abc") == 0
        assert await found(node, "family", "xyz") == 0


async def test_rows_begin_where_each_of_them_can(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        await left(node, "client", "abcd")
        peer = node.peer("client")
        prefix = (*digests("abxy"), *digests("n"), *digests("abcd"))
        assert await peer.begin(rows=4, max_tokens=TOKENS, prefix=prefix) == (64, 0, 128, 0)
        peer.step({0: 1, 1: 1, 2: 1, 3: 1})
        await peer.output()
        await peer.end()


async def test_no_more_is_handed_out_than_a_row_may_hold(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        await left(node, "client", "abcd")
        peer = node.peer("client")
        assert await peer.begin(max_tokens=2 * PAGE_TOKENS + 5, prefix=digests("abcd")) == (64,)
        await peer.end()


async def test_other_tokens_after_a_rollback_are_not_taken_for_those_announced(
    blocks: ModelBlocks,
) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin(max_tokens=TOKENS, prefix=digests("abcd"))
        peer.step({0: 70}, inputs(blocks, "abcd")[:70])
        await peer.output()
        peer.rollback([40])
        await peer.wire.hear_a(RolledBack)
        await fed(peer, inputs(blocks, "axyz"))
        assert await found(node, "client", "abcd") == 2, "what was right once is kept as it was"
        twin = node.peer()
        await twin.begin(max_tokens=TOKENS, prefix=digests("abcd"))
        twin_TD = await fed(twin, inputs(blocks, "abcd"))
        for each in (peer, twin):
            await each.end()
        alone_TD = await left(node, "other", "abcd")
        assert distance(twin_TD, alone_TD[64:]) <= 1e-5


async def test_rows_that_change_places_take_their_digests_along(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin(rows=2, max_tokens=TOKENS, prefix=(*digests("abc"), *digests("xyz")))
        both = torch.cat([inputs(blocks, "a"), inputs(blocks, "x")])
        peer.step({0: 32, 1: 32}, both)
        await peer.output()
        peer.epoch += 1
        peer.wire.say(Reorder(epoch=peer.epoch, sources=(1, 0)))
        await peer.wire.hear_a(Reordered)
        peer.step({0: 32, 1: 32}, torch.cat([inputs(blocks, "y"), inputs(blocks, "b")]))
        await peer.output()
        assert await found(node, "client", "abc") == 2
        reader = node.peer()
        await reader.begin(max_tokens=TOKENS, prefix=digests("xyz"))
        ours_TD = await fed(reader, inputs(blocks, "xyz"))
        for each in (peer, reader):
            await each.end()
        assert distance(ours_TD, (await left(node, "other", "xyz"))[64:]) <= 1e-5


async def test_a_cancelled_session_leaves_only_what_it_announced_and_was_fed(
    blocks: ModelBlocks,
) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin(max_tokens=TOKENS, prefix=digests("abcd"))
        peer.step({0: 80}, inputs(blocks, "abcd")[:80])
        await peer.output()
        peer.wire.say(Cancel())
        await peer.wire.hear_the_end()
        assert await found(node, "client", "abcd") == 2


async def test_a_successor_begins_with_nothing_but_what_it_is_handed(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        await left(node, "client", "ab")
        peer = node.peer("client")
        peer.open(max_tokens=TOKENS, prefix=digests("ab"), donor="leaver")
        assert (await peer.wire.hear_a(Opened)).held == (0,)
        await peer.end()


async def test_pages_kept_for_later_are_given_up_for_sessions(blocks: ModelBlocks) -> None:
    """The pool is full of what sessions left; new ones still get all that they were promised."""
    async with open_node(blocks, tokens=20 * PAGE_TOKENS) as node:
        for text in ("abcde", "fghij", "klmno", "pqrst"):
            await left(node, "client", text)
        assert node.pool.cached_pages >= 12
        sharer = node.peer()
        assert await sharer.begin(max_tokens=TOKENS, prefix=digests("pqrs")) == (128,)
        others = [node.peer(f"other {number}") for number in range(3)]
        for other in others:
            await other.begin(max_tokens=TOKENS)
            await fed(other, inputs(blocks, "zyxwv"))
        late = node.peer("late")
        late.open(max_tokens=PAGE_TOKENS)
        assert isinstance((await late.wire.hear())[0], Busy)
        await late.wire.hear_the_end()
        ours_TD = await fed(sharer, inputs(blocks, "pqrst"))
        assert node.pool.held_pages == 20
        for peer in (sharer, *others):
            await peer.end()
        alone_TD = await left(node, "alone", "pqrst")
        assert distance(ours_TD, alone_TD[-len(ours_TD) :]) <= 1e-5


def _open(prefix: Any) -> bytes:
    message = Open(
        version=VERSION,
        model="m",
        session=bytes(16),
        secret=bytes(32),
        blocks=(0, 1),
        rows=1,
        max_tokens=1,
        mode="star",
        dtype="float32",
        epoch=0,
        upstream=None,
    )
    fields = msgspec.msgpack.decode(encode_message(message))
    return msgspec.msgpack.encode(fields | {"prefix": prefix})


@pytest.mark.parametrize(
    "prefix",
    [[[bytes(15)]], [[bytes(17)]], [["x" * 16]], [bytes(16)], [[]] * (MAX_ROWS + 1), 3, [[None]]],
)
def test_what_is_no_prefix_is_no_message(prefix: Any) -> None:
    with pytest.raises(FrameError):
        decode_message(_open(prefix))


def test_a_message_of_an_older_peer_has_no_prefix() -> None:
    opened = decode_message(_open([[bytes(16)]]))
    assert isinstance(opened, Open)
    assert opened.prefix == ((bytes(16),),)
    fields = msgspec.msgpack.decode(_open([]))
    del fields["prefix"]
    old = decode_message(msgspec.msgpack.encode(fields))
    assert isinstance(old, Open)
    assert old.prefix == ()
    assert decode_message(msgspec.msgpack.encode({"t": "close"})) == Close()


@pytest.mark.parametrize(
    "prefix", [((bytes(16),) * (MAX_PREFIX_DIGESTS + 1),), ((), ()), ((bytes(16),),) * 2]
)
async def test_too_much_of_a_prefix_is_refused_and_nobody_else_notices(
    blocks: ModelBlocks, prefix: Prefix
) -> None:
    async with open_node(blocks) as node:
        good, bad, closer = node.peer("good"), node.peer("bad"), node.peer("bad")
        await good.begin(max_tokens=TOKENS, prefix=digests("abc"))
        bad.open(max_tokens=TOKENS, prefix=prefix)
        refused = await bad.wire.hear_a(ErrorMessage)
        assert (refused.code, refused.fatal) == ("bad_prefix", True)
        await bad.wire.hear_the_end()
        await closer.begin(max_tokens=TOKENS)
        closer.wire.say(Close(prefix=prefix))
        refused = await closer.wire.hear_a(ErrorMessage)
        assert (refused.code, refused.fatal, refused.answers) == ("bad_prefix", False, "close")
        await closer.end()
        assert len(await fed(good, inputs(blocks, "abc"))) == 96
        await good.end()
        assert node.pool.unreserved_pages == node.pool.num_pages


async def test_the_same_digest_for_every_page_harms_nobody(blocks: ModelBlocks) -> None:
    same: Prefix = ((bytes(16),) * 5,)
    async with open_node(blocks, tokens=2 * TOKENS) as node:
        for _ in range(3):
            peer = node.peer("liar")
            await peer.begin(max_tokens=TOKENS, prefix=same)
            peer.rollback([peer.lengths[0] // 2])
            await fed(peer, inputs(blocks, "abcde"))
            await peer.end(same)
        async with asyncio.timeout(10):
            await left(node, "client", "abcde")
        assert node.pool.held_pages == 0
