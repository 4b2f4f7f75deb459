from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nesa_node.compression import tensors
from nesa_node.compression.codecs import allowed_codecs
from nesa_node.core.errors import ProtocolError, StreamClosedError
from nesa_node.core.ids import PeerId
from nesa_node.server.session.output_sender import OutputSender
from nesa_node.server.session.sealing import SessionSealer
from nesa_node.server.session.session_state import SessionState
from nesa_node.swarm.protocol.messages import (
    VERSION,
    Computation,
    Downstream,
    Message,
    Mode,
    RowSlice,
)
from nesa_node.swarm.protocol.replay_buffer import ReplaySlice, SentStep
from tests.turns import turns_of_the_loop

HIDDEN = 8


class _TakesAll:
    """A client, and its wire: each message is taken at once."""

    compresses = False
    can_send_now = True

    def __init__(self) -> None:
        self.heard: list[Message] = []

    async def prepare(self, *_: object) -> None:
        pass

    async def send(self, message: Message, payload: object = b"") -> None:
        self.heard.append(message)


async def _no_dial(*_: object) -> Any:
    raise AssertionError("this session sends to its client")


def state_of(mode: Mode) -> SessionState:
    opened: Any = SimpleNamespace(
        session=b"s" * 16,
        dtype="float32",
        rows=1,
        max_tokens=16,
        mode=mode,
        quality="balanced",
        epoch=0,
        donor="leaver",
        version=VERSION,
        secret=b"k" * 32,
        blocks=(0, 1),
    )
    table = SimpleNamespace(length=7, reuse_prefix=lambda _: None, truncate=lambda _: None)
    blocks = SimpleNamespace(hidden_size=HIDDEN)
    queue: Any = SimpleNamespace(tables=[table], blocks=blocks)
    limits: Any = SimpleNamespace(trusted=())
    return SessionState(
        opened,
        PeerId("client"),
        queue,
        cast(Any, None),
        limits,
        SessionSealer(cast(Any, None), opened, Computation("float32", "none", "cpu")),
    )


def stored_outputs(state: SessionState, end: int) -> list[ReplaySlice]:
    return list(state.replay_buffer.iter_steps([0], [end]))


def kept(number: int, position: int, count: int) -> SentStep:
    meta, payload = tensors.encode(torch.randn(count, HIDDEN))
    return SentStep(number, (RowSlice(0, position, count),), "all", meta, memoryview(payload))


def test_a_star_has_no_room_for_what_a_donor_kept() -> None:
    state = state_of("star")
    with pytest.raises(ProtocolError, match="keep no outputs"):
        state.store_output(kept(0, 0, 5))
    assert not stored_outputs(state, 16)


def test_a_rollback_cuts_what_is_kept_for_the_next_node() -> None:
    """A replacement would be sent outputs of tokens that the session no longer has."""
    state = state_of("chain")
    for number, (position, count) in enumerate([(0, 5), (5, 1), (6, 1)]):
        state.store_output(kept(number, position, count))
    state.truncate([3])
    left = [part for step in stored_outputs(state, 16) for part in step.rows]
    assert left == [RowSlice(0, 0, 3)]


async def test_all_else_gets_a_turn_while_what_was_kept_is_sent_again() -> None:
    client: Any = _TakesAll()
    state = state_of("chain")
    outlet = OutputSender(client, client, state, _no_dial, AsyncExitStack())
    for number in range(50):
        state.store_output(kept(number, 64 * number, 64))
    async with turns_of_the_loop() as turns:
        await outlet.link(None, 1, [0])
        assert turns[0] >= 49
    assert len(client.heard) == 50


async def test_nothing_is_sent_again_to_a_node_that_is_lost() -> None:
    sent: list[Message] = []

    class LosesAll(_TakesAll):
        async def send(self, message: Message, payload: object = b"") -> None:
            sent.append(message)
            raise StreamClosedError("gone")

        async def receive(self) -> None:
            await asyncio.Event().wait()

        async def close(self) -> None:
            pass

        def reencode(self, kept: SentStep) -> SentStep:
            copied.append(kept)
            return kept

    copied: list[SentStep] = []
    downstream: Any = LosesAll()
    downstream.peer = "next"

    async def dial(*_: object) -> Any:
        return downstream, downstream

    client: Any = _TakesAll()
    state, streams = state_of("chain"), AsyncExitStack()
    outlet = OutputSender(client, client, state, dial, streams)
    for number in range(50):
        state.store_output(kept(number, 64 * number, 64))
    await outlet.link(Downstream(peer="next", blocks=(4, 8)), 1, [0])
    await streams.aclose()
    assert len(sent) == len(copied) == 1


def test_texts_of_peers_are_not_kept_with_their_steps() -> None:
    """Each step can have 64 of them, for which no memory was promised."""
    state = state_of("chain")
    (lossless,) = (name for name in allowed_codecs("balanced") if name == "lossless")
    for number in range(3):
        via = ("".join(["loss", "less"]), *(f"{number}-{hop}" for hop in range(63)))
        state.store_output(replace(kept(number, 64 * number, 64), via=via))
    for held in stored_outputs(state, 200):
        assert held.last_step.via == ("lossless", *["?"] * 63)
        assert held.last_step.via[0] is lossless
