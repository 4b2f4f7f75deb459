"""Sessions of a node: whose they are, who waits for whom, and what is left of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.engine.cache.pages import PAGE_TOKENS
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk, TokenSlice
from nesa_node.server.scheduler import batch, scheduler
from nesa_node.server.scheduler import session_queue as work
from nesa_node.server.scheduler.batch import QueuedStep, SessionBatch
from nesa_node.server.scheduler.scheduler import INLINE_BUDGET_S
from nesa_node.server.session import session
from nesa_node.swarm.protocol.messages import (
    VERSION,
    Busy,
    Cancel,
    Close,
    Closed,
    ErrorMessage,
    Linked,
    Opened,
    PushOpen,
    PushOpened,
    RolledBack,
    RowSlice,
)
from tests.server.bench import Node, Peer, open_node

NEVER_S = 60.0
"""No step takes so long."""


async def opened(node: Node, client: str = "client", **options: object) -> Peer:
    peer = node.peer(client)
    peer.open(**options)  # type: ignore[arg-type]
    await peer.wire.hear_a(Opened)
    peer.link()
    await peer.wire.hear_a(Linked)
    return peer


async def end(*peers: Peer) -> None:
    for peer in peers:
        peer.wire.say(Close())
        await peer.wire.hear_a(Closed)


async def push(node: Node, peer: Peer, sender: str, secret: bytes) -> PushOpened | ErrorMessage:
    wire = node.connect(sender)
    wire.say(PushOpen(version=VERSION, session=peer.session, secret=secret, epoch=1))
    answer, _ = await wire.hear()
    wire.hang_up()
    assert isinstance(answer, PushOpened | ErrorMessage)
    return answer


class Spied:
    """Makes a node's blocks slow, or fail for a marked token, and counts what they run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 0.0) -> None:
        self.iterations: list[int] = []
        self.threads: list[str] = []
        run = ModelBlocks.forward_buffers

        def spied(
            blocks: ModelBlocks, pieces: Sequence[TokenSlice], runs: Sequence[RowChunk]
        ) -> None:
            self.iterations.append(len(runs))
            self.threads.append(threading.current_thread().name)
            time.sleep(seconds)
            if any(bool((piece.buffers.hidden.tensor_TD == 1e6).any()) for piece in pieces):
                raise RuntimeError("a kernel failed")
            run(blocks, pieces, runs)

        monkeypatch.setattr(ModelBlocks, "forward_buffers", spied)


async def test_a_stranger_cannot_squat_on_a_session_id(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        squatter = Peer(node.connect("squatter"), blocks, session=b"i" * 16, secret=b"x" * 32)
        owner = Peer(node.connect("owner"), blocks, session=b"i" * 16, secret=b"y" * 32)
        for peer in (squatter, owner):
            peer.open(upstream="up")
            await peer.wire.hear_a(Opened)
            peer.link(upstream="up")
            await peer.wire.hear_a(Linked)
        again = Peer(node.connect("owner"), blocks, session=b"i" * 16, secret=b"z" * 32)
        again.open()
        assert (await again.wire.hear_a(ErrorMessage)).code == "session_exists"
        assert isinstance(await push(node, owner, "up", b"y" * 32), PushOpened)
        for sender, secret, code in (
            ("up", b"z" * 32, "unknown_session"),
            ("stranger", b"y" * 32, "not_upstream"),
        ):
            refused = await push(node, owner, sender, secret)
            assert isinstance(refused, ErrorMessage)
            assert refused.code == code
        await end(squatter, owner)


async def test_two_opens_of_one_session_at_once_open_one(blocks: ModelBlocks) -> None:
    """With a quality other than exact, an open waits for what is known of the link."""
    async with open_node(blocks) as node:
        both = asyncio.Event()

        async def is_local(_: PeerId) -> bool:
            await both.wait()
            return False

        transport: Any = node.server._swarm.transport
        transport.is_local = is_local
        first = node.peer()
        second = Peer(node.connect("client"), blocks, session=first.session)
        for peer in (first, second):
            peer.open(quality="high")
        await asyncio.sleep(0.01)
        both.set()
        heard = {peer: (await peer.wire.hear())[0] for peer in (first, second)}
        refused = [peer for peer, message in heard.items() if isinstance(message, ErrorMessage)]
        assert [heard[peer].code for peer in refused] == ["session_exists"]
        assert len(node.server._sessions) == node.admission.sessions == 1
        await end(*(heard.keys() - refused))
        assert node.admission.sessions == 0


async def test_only_the_upstream_brings_steps(blocks: ModelBlocks) -> None:
    """Not the client, and not the node that was upstream before."""
    async with open_node(blocks) as node:
        owner, other = (Peer(node.connect("owner"), blocks) for _ in range(2))
        for peer in (owner, other):
            peer.open(upstream="up")
            await peer.wire.hear_a(Opened)
            peer.link(upstream="up")
            await peer.wire.hear_a(Linked)
        owner.step({0: 1})
        assert (await owner.wire.hear_a(ErrorMessage)).code == "not_upstream"
        owner.wire.hang_up()
        former = Peer(node.connect("up"), blocks, session=other.session)
        former.wire.say(
            PushOpen(version=VERSION, session=other.session, secret=other.secret, epoch=1)
        )
        await former.wire.hear_a(PushOpened)
        other.link(upstream="next")
        await other.wire.hear_a(Linked)
        former.epoch, former.lengths = other.epoch, [0]
        former.step({0: 1})
        assert (await former.wire.hear_a(ErrorMessage)).code == "not_upstream"
        former.wire.hang_up()
        await end(other)


async def test_waiting_steps_of_all_sessions_run_together(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    spied = Spied(monkeypatch, seconds=0.01)
    async with open_node(blocks) as node:
        peers = [await opened(node, f"client {number % 3}") for number in range(12)]
        for _ in range(4):
            for peer in peers:
                peer.step({0: 1})
            for peer in peers:
                await peer.output()
        await end(*peers)
    assert sum(spied.iterations) == 4 * len(peers)
    assert len(spied.iterations) < 4 * len(peers) / 3


@pytest.mark.parametrize(("seconds", "sessions"), [(0.0, 1), (0.0, 2), (2 * INLINE_BUDGET_S, 1)])
async def test_only_short_steps_of_a_session_alone_run_where_they_arrive(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch, seconds: float, sessions: int
) -> None:
    if not seconds:
        # However long other processes keep this one from its processor.
        monkeypatch.setattr(scheduler, "INLINE_BUDGET_S", NEVER_S)
    spied = Spied(monkeypatch, seconds=seconds)
    async with open_node(blocks) as node:
        peer, *others = [await opened(node) for _ in range(sessions)]
        for _ in range(20):
            peer.step({0: 1})
            await peer.output()
        await end(peer, *others)
    alone = sessions == 1 and not seconds
    assert spied.threads[-1].startswith("MainThread" if alone else "nesa-device")


@pytest.mark.parametrize("large", [True, False])
async def test_what_ran_where_it_arrived_and_cannot_be_sent_there_is_sent_all_the_same(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(scheduler, "INLINE_BUDGET_S", NEVER_S)
    if large:
        monkeypatch.setattr(session, "MAX_INLINE_OUTPUT_BYTES", 0)
    spied = Spied(monkeypatch)
    async with open_node(blocks) as node, node.serving():
        peer = await opened(node, max_tokens=40)
        peer.wire.can_send_now = large  # or what was sent before is still on its way
        for _ in range(30):
            peer.step({0: 1})
            await peer.output()
        assert "MainThread" in spied.threads[-20:]
        await end(peer)


async def test_a_cancel_frees_the_pages_within_a_second_of_a_long_prefill(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spied(monkeypatch, seconds=0.2)
    async with open_node(blocks) as node:
        peer = await opened(node, max_tokens=1000)
        peer.step({0: 1000})
        await asyncio.sleep(0.3)
        assert node.pool.held_pages > 0
        started = time.monotonic()
        peer.wire.say(Cancel())
        await peer.wire.hear_a(Closed)
        assert time.monotonic() - started < 1.0
        assert node.pool.unreserved_pages == node.pool.num_pages
        assert node.pool.held_pages == 0


async def test_a_failing_step_ends_its_own_session_only(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spied(monkeypatch, seconds=0.01)
    async with open_node(blocks) as node:
        good = [await opened(node, f"good {number}") for number in range(4)]
        bad = await opened(node, "bad")
        for _ in range(3):
            for peer in good:
                peer.step({0: 2})
            bad.step({0: 1}, torch.full((1, blocks.hidden_size), 1e6))
            for peer in good:
                output, hidden_TD = await peer.output()
                assert hidden_TD.isfinite().all()
                assert output.rows[0].count == 2
        assert (await bad.wire.hear_a(ErrorMessage)).code == "not_computed"
        await bad.wire.hear_the_end()
        await end(*good)
        assert node.pool.unreserved_pages == node.pool.num_pages


async def test_a_session_that_cannot_take_part_ends_alone(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(queue: Sequence[QueuedStep], *args: Any) -> SessionBatch:
        if bool((queue[0].hidden.tensor_TD == 7).all()):
            raise RuntimeError("no place for it")
        return batch.take_tokens(queue, *args)

    monkeypatch.setattr(work, "take_tokens", take)
    async with open_node(blocks) as node:
        good, bad = await opened(node, "good"), await opened(node, "bad")
        good.step({0: 2})
        bad.step({0: 1}, torch.full((1, blocks.hidden_size), 7.0))
        await good.output()
        assert (await bad.wire.hear_a(ErrorMessage)).code == "not_computed"
        await bad.wire.hear_the_end()
        await end(good)
        assert node.pool.unreserved_pages == node.pool.num_pages


async def test_a_session_alone_whose_step_fails_is_told_and_ends(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spied(monkeypatch)
    async with open_node(blocks) as node:
        peer = await opened(node)
        for _ in range(3):
            peer.step({0: 1})
            await peer.output()
        peer.step({0: 1}, torch.full((1, blocks.hidden_size), 1e6))
        refused = await peer.wire.hear_a(ErrorMessage)
        assert (refused.code, refused.fatal) == ("not_computed", True)
        await peer.wire.hear_the_end()
        assert node.pool.unreserved_pages == node.pool.num_pages


async def test_beyond_its_promise_a_session_is_told_when_the_cache_is_full(
    blocks: ModelBlocks,
) -> None:
    async with open_node(blocks, tokens=3 * PAGE_TOKENS) as node:
        peer = await opened(node, max_tokens=PAGE_TOKENS)
        for _ in range(3):
            peer.step({0: PAGE_TOKENS})
            await peer.output()
        peer.step({0: 1})
        refused = await peer.wire.hear_a(ErrorMessage)
        assert (refused.code, refused.fatal, refused.answers) == ("cache_full", False, "step")
        peer.rollback([10])
        peer.step({0: 5})
        await peer.output()
        await end(peer)


async def test_large_steps_are_examined_off_the_event_loop(blocks: ModelBlocks) -> None:
    async with open_node(blocks, tokens=32_768) as node:
        peer = await opened(node, rows=6, max_tokens=1000)
        first = peer.step(dict.fromkeys(range(6), 900))  # 1.4 MB
        second = peer.step({3: 1})
        assert [(await peer.output())[0].step for _ in range(2)] == [first.step, second.step]
        broken = torch.full((5400, blocks.hidden_size), float("nan"))
        peer.rollback([0] * 6)
        peer.step(dict.fromkeys(range(6), 900), broken)
        assert (await peer.wire.hear_a(ErrorMessage)).code == "not_finite"
        await end(peer)


async def test_two_hundred_clients_all_get_through_a_pool_for_fifty(blocks: ModelBlocks) -> None:
    length = 2 * PAGE_TOKENS
    refusals: list[Busy] = []

    async def work(number: int) -> None:
        while True:
            peer = node.peer(f"client {number}")
            peer.open(max_tokens=length)
            answer, _ = await peer.wire.hear()
            if isinstance(answer, Opened):
                break
            assert isinstance(answer, Busy)
            assert 0 < answer.retry_after_s <= 5
            assert answer.free_tokens < length
            refusals.append(answer)
            await asyncio.sleep(answer.retry_after_s * (0.5 + number / 200))
        peer.link()
        peer.step({0: 20})
        await peer.output()
        for _ in range(10):
            peer.step({0: 1})
            await peer.output()
        await end(peer)

    async with open_node(blocks, tokens=50 * length) as node:
        async with asyncio.TaskGroup() as tasks:
            for number in range(200):
                tasks.create_task(work(number))
        assert len(refusals) >= 150
        assert node.pool.unreserved_pages == node.pool.num_pages
        assert node.pool.held_pages == 0


async def test_no_more_than_two_pushes_of_a_session_wait_for_its_epoch(blocks: ModelBlocks) -> None:
    """What comes on their streams meanwhile is held, 128 KiB of each."""
    async with open_node(blocks) as node:
        peer = node.peer()
        peer.open(upstream="up")
        await peer.wire.hear_a(Opened)
        streams = [node.connect("up") for _ in range(3)]
        for stream in streams:
            stream.say(PushOpen(version=VERSION, session=peer.session, secret=peer.secret, epoch=1))
            # Each is read before the next one comes.
            await asyncio.sleep(0.01)
        answer, _ = await streams[2].hear()
        assert isinstance(answer, ErrorMessage)
        assert (answer.code, answer.fatal) == ("future_epoch", True)
        peer.link(upstream="up")
        await streams[1].hear_a(PushOpened)
        assert (await push(node, peer, "up", peer.secret)).epoch == 1  # type: ignore[union-attr]
        await end(peer)


async def test_a_step_that_is_pushed_before_its_rollback_comes_is_waited_with(
    blocks: ModelBlocks,
) -> None:
    """A client rolls all nodes of a chain back at once, and sends the first its next step."""
    async with open_node(blocks) as node:
        peer = node.peer()
        peer.open(upstream="up")
        await peer.wire.hear_a(Opened)
        peer.link(upstream="up")
        await peer.wire.hear_a(Linked)
        upstream = Peer(node.connect("up"), blocks, session=peer.session)
        upstream.wire.say(
            PushOpen(version=VERSION, session=peer.session, secret=peer.secret, epoch=1)
        )
        await upstream.wire.hear_a(PushOpened)
        upstream.epoch, upstream.lengths = 1, [0]
        upstream.step({0: 6})
        assert (await peer.output())[0].rows == (RowSlice(0, 0, 6),)
        upstream.epoch, upstream.lengths = 2, [3]
        pushed = upstream.step({0: 2})
        await asyncio.sleep(0.05)
        peer.rollback([3])
        assert (await peer.wire.hear_a(RolledBack)).epoch == 2
        output, _ = await peer.output()
        assert (output.epoch, output.rows, output.decoding) == (2, pushed.rows, 1)
        upstream.wire.hang_up()
        await end(peer)


async def test_a_session_that_does_nothing_for_too_long_is_ended(blocks: ModelBlocks) -> None:
    async with open_node(blocks, idle_timeout_s=0.3) as node:
        idle, busy = await opened(node, "idle"), await opened(node, "busy")
        for _ in range(8):
            await asyncio.sleep(0.1)
            busy.step({0: 1})
            await busy.output()
        assert (await idle.wire.hear_a(ErrorMessage)).code == "idle_timeout"
        await idle.wire.hear_the_end()
        await end(busy)
        assert node.pool.held_pages == 0


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"model": ModelId("another@1")}, "wrong_model"),
        ({"version": (VERSION[0] + 1, 0)}, "version_mismatch"),
    ],
)
async def test_another_model_or_protocol_is_refused(
    blocks: ModelBlocks, changed: dict[str, Any], code: str
) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        peer.open(**changed)
        assert (await peer.wire.hear_a(ErrorMessage)).code == code
        assert node.pool.held_pages == 0
