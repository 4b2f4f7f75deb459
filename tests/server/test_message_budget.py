"""A peer's small messages hold up neither the event loop nor, beyond a rate, other peers."""

from __future__ import annotations

import pytest

from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.ids import PeerId
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.swarm.protocol import stream as message_budget
from nesa_node.swarm.protocol.messages import (
    VERSION,
    ErrorMessage,
    Link,
    Linked,
    Message,
    Opened,
    Ping,
    Pong,
    Probe,
    PushOpen,
    PushOpened,
    Received,
    Reorder,
    Rollback,
    Sync,
    TransferOpen,
)
from nesa_node.swarm.protocol.stream import MessageBudget
from tests.server.bench import Node, Peer, open_node
from tests.turns import turns_of_the_loop

A, B = PeerId("a"), PeerId("b")
PROBE = Probe(tensor=TensorMeta(dtype="float32", shape=(0,)))
RECEIVED = Received(nbytes=1 << 17, seconds=0.01)
MANY = 500


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_peer_that_floods_waits_and_others_do_not() -> None:
    clock = Clock()
    budget = MessageBudget(clock)
    waits_s = [budget.charge(A, Ping(nonce=nonce)) for nonce in range(3000)]
    assert not any(waits_s[:1990])
    # Each of many streams waits until those of the others are paid for, too.
    assert waits_s[-1] == pytest.approx(1.0)
    assert budget.charge(B, Ping(nonce=1)) == 0.0
    clock.now += 1.5
    assert budget.charge(A, Ping(nonce=1)) == 0.0


def test_what_64_sessions_send_at_fifty_tokens_a_second_never_waits() -> None:
    clock = Clock()
    budget = MessageBudget(clock)
    for _ in range(10):
        said = [RECEIVED, PROBE] * (64 * 50) + [Ping(nonce=1)] * (2 * 64 * 2)
        assert not any(budget.charge(A, message) for message in said)
        clock.now += 1.0


@pytest.mark.parametrize("message", [PROBE, RECEIVED])
def test_a_refused_message_costs_more(message: Message) -> None:
    budget = MessageBudget(Clock())
    assert not any(budget.charge(A, message) for _ in range(19_990))
    waits_s = [budget.charge(A, message, is_refused=True) for _ in range(1000)]
    assert waits_s[-1] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    "message", [Reorder(epoch=1, sources=(1, 0)), Rollback(epoch=1, lengths=(0,))]
)
def test_what_changes_rows_costs_most(message: Message) -> None:
    budget = MessageBudget(Clock())
    waits_s = [budget.charge(A, message) for _ in range(1200)]
    assert waits_s[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(("rows", "price"), [(4, 1), (16, 1), (17, 2), (256, 16)])
@pytest.mark.parametrize("change", ["reorder", "rollback", "link", "sync"])
def test_a_change_is_paid_for_by_its_rows(rows: int, price: int, change: str) -> None:
    lengths = (0,) * rows
    messages: dict[str, Message] = {
        "reorder": Reorder(epoch=1, sources=lengths),
        "rollback": Rollback(epoch=1, lengths=lengths),
        "sync": Sync(lengths=lengths),
        "link": Link(epoch=1, upstream=None, downstream=None, lengths=lengths, emit_from=lengths),
    }
    budget = MessageBudget(Clock())
    waits_s = [budget.charge(A, messages[change]) for _ in range(1200)]
    assert waits_s[-1] == pytest.approx(1200 * price / 400 - 2.0)


@pytest.mark.parametrize("refused", [False, True])
def test_what_must_be_decoded_is_paid_for_by_its_bytes(refused: bool) -> None:
    """Some hundred bytes can stand for millions of zeros."""
    budget = MessageBudget(Clock())
    bomb = TensorMeta(dtype="float32", shape=(1000, 1000), codec="lossless", size=600)
    waits_s = [budget.charge(A, Probe(tensor=bomb), is_refused=refused) for _ in range(1000)]
    assert waits_s[-1] == pytest.approx(1000 * (0.004 + (0.001 if refused else 0.0001)) - 2.0)


def test_no_more_than_so_many_peers_are_remembered() -> None:
    budget = MessageBudget(Clock())
    for number in range(message_budget.MAX_BUDGET_PEERS + 10):
        budget.charge(PeerId(str(number)), Ping(nonce=1))
    assert len(budget._paid_at) == message_budget.MAX_BUDGET_PEERS


@pytest.mark.parametrize("message", [RECEIVED, PROBE])
async def test_others_get_a_turn_between_two_messages_of_a_client(
    blocks: ModelBlocks, message: Message
) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin()
        async with turns_of_the_loop() as turns:
            for each in [message] * MANY + [Ping(nonce=1)]:
                peer.wire.say(each)
            await peer.wire.hear_a(Pong)
            assert turns[0] >= MANY
        await peer.end()


async def test_others_get_a_turn_between_two_messages_of_an_upstream(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        peer.open(upstream="up")
        await peer.wire.hear_a(Opened)
        peer.link(upstream="up")
        await peer.wire.hear_a(Linked)
        up = Peer(node.connect("up"), blocks, session=peer.session)
        up.wire.say(PushOpen(version=VERSION, session=peer.session, secret=peer.secret, epoch=1))
        await up.wire.hear_a(PushOpened)
        async with turns_of_the_loop() as turns:
            for each in [PROBE] * MANY + [Ping(nonce=1)]:
                up.wire.say(each)
            assert (await up.wire.hear_a(ErrorMessage)).code == "unexpected"
            assert turns[0] >= MANY
        await peer.end()


async def test_all_streams_of_a_peer_have_one_budget(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        node.server._budget = MessageBudget(Clock())
        peers = [node.peer("same") for _ in range(2)]
        for peer in peers:
            await peer.begin()
            for nonce in range(10):
                peer.wire.say(Ping(nonce=nonce))
                await peer.wire.hear_a(Pong)
        # An open is 1 ms, a link 2.5 ms. The last of a stream is counted after its answer.
        assert 2 * (3.5 + 9) <= paid_ms(node, "same") <= 2 * (3.5 + 10)
        for _ in range(5):
            peers[0].lengths = [0]
            peers[0].step({0: 5000})
            assert (await peers[0].wire.hear_a(ErrorMessage)).code == "context_length"
        # A refused step costs what a ping does.
        assert 2 * (3.5 + 9) + 4 <= paid_ms(node, "same") <= 2 * (3.5 + 10) + 5
        for peer in peers:
            await peer.end()


async def test_first_message_of_each_stream_is_counted(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        node.server._budget = MessageBudget(Clock())
        for _ in range(5):
            peer = Peer(node.connect("same"), blocks)
            peer.wire.say(Ping(nonce=1))
            assert (await peer.wire.hear_a(ErrorMessage)).code == "unexpected"
        assert paid_ms(node, "same") == 5


@pytest.mark.parametrize("opens", ["a push", "a transfer"])
async def test_what_ends_a_neighbours_stream_is_paid_for(blocks: ModelBlocks, opens: str) -> None:
    """Each message on a stream of its own would cost no more than the stream's first."""
    async with open_node(blocks) as node:
        node.server._budget = MessageBudget(Clock())
        peer = node.peer()
        session, secret = peer.session, peer.secret
        opening: Message
        if opens == "a push":
            peer.open(upstream="up")
            await peer.wire.hear_a(Opened)
            peer.link(upstream="up")
            await peer.wire.hear_a(Linked)
            opening = PushOpen(version=VERSION, session=session, secret=secret, epoch=1)
        else:
            peer.open(upstream="someone", donor="up")
            await peer.wire.hear_a(Opened)
            opening = TransferOpen(version=VERSION, session=session, secret=secret)
        for _ in range(5):
            up = Peer(node.connect("up"), blocks, session=session)
            up.wire.say(opening)
            up.epoch, up.lengths = 1, [99]
            up.step({0: 1})
            await up.wire.hear_a(ErrorMessage)
        assert paid_ms(node, "up") == 2 * 5
        await peer.end()


def paid_ms(node: Node, peer: str) -> int:
    """What a peer's messages have cost."""
    budget = node.server._budget
    return round(1000 * (budget._paid_at[PeerId(peer)] - Clock().now + message_budget._BURST_S))
