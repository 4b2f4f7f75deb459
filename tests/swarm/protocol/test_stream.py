"""Framing: what was sent arrives; what is not a message is refused before it costs anything."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nesa_node.compression import tensors
from nesa_node.core.errors import FrameError, ProtocolError, StreamClosedError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.protocol import stream as stream_module
from nesa_node.swarm.protocol.any_message import decode_message, encode_message
from nesa_node.swarm.protocol.messages import (
    Busy,
    Close,
    Downstream,
    ErrorMessage,
    HandOver,
    Output,
    Ping,
    RowSlice,
    Step,
)
from nesa_node.swarm.protocol.stream import MAX_CHUNK_BYTES, MAX_HEADER_BYTES, Stream
from tests.swarm.pipes import pipe_pair

PEER = PeerId("12D3KooWTest")


@asynccontextmanager
async def piped() -> AsyncIterator[Stream]:
    """A stream that receives what it sends."""
    async with pipe_pair() as (here, there):
        yield Stream(PEER, here, there)


@asynccontextmanager
async def fed(data: bytes) -> AsyncIterator[Stream]:
    """A stream that brings `data` and ends."""
    async with pipe_pair() as (here, there):
        there.write(data)
        there.close()
        yield Stream(PEER, here, here)


def step_of(hidden_TD: torch.Tensor) -> tuple[Step, memoryview]:
    meta, payload = tensors.encode(hidden_TD)
    rows = (RowSlice(0, 0, len(hidden_TD)),)
    return Step(session=b"s" * 16, epoch=1, step=2, rows=rows, tensor=meta), payload


def frame(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<II", len(header), len(payload)) + header + payload


@pytest.mark.parametrize("tokens", [1, 7, 3000])
async def test_a_tensor_arrives_as_it_was_sent_in_chunks_if_it_must(tokens: int) -> None:
    hidden_TD = torch.randn(tokens, 256)
    step, payload = step_of(hidden_TD)
    async with piped() as stream:
        sending = asyncio.create_task(stream.send(step, payload))
        message, data = await stream.receive(max_tensor_bytes=len(payload))
        await sending
    assert message == step
    assert torch.equal(tensors.decode(step.tensor, data, max_bytes=len(data)), hidden_TD)
    assert stream.raw_bytes_received == stream.bytes_sent
    if tokens == 3000:
        assert len(payload) > 2 * MAX_CHUNK_BYTES


async def test_messages_sent_by_several_tasks_do_not_mix() -> None:
    step, payload = step_of(torch.randn(2000, 256))
    async with piped() as stream, asyncio.TaskGroup() as tasks:
        for nonce in range(5):
            tasks.create_task(stream.send(step, payload))
            tasks.create_task(stream.send(Ping(nonce=nonce)))
        got = [(await stream.receive(max_tensor_bytes=1 << 22))[0] for _ in range(10)]
    assert sum(message == step for message in got) == 5


async def test_the_end_of_the_stream_is_no_frame_error() -> None:
    for data in (b"", b"abc", frame(encode_message(Close()))[:-1]):
        async with fed(data) as stream:
            with pytest.raises(StreamClosedError):
                await stream.receive()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (struct.pack("<II", MAX_HEADER_BYTES + 1, 0), "header of"),
        (struct.pack("<II", 0, 5), "header of 0"),
        (struct.pack("<II", 10, MAX_CHUNK_BYTES + 1), "chunk of"),
        (frame(b"\xc1" * 10), "not a message"),
        (frame(encode_message(Close()) + b"\x00"), "not a message"),
        (frame(encode_message(Close()), b"payload"), "came for a tensor of 0"),
    ],
)
async def test_impossible_frames_are_refused(data: bytes, complaint: str) -> None:
    async with fed(data) as stream:
        with pytest.raises(FrameError, match=complaint):
            await stream.receive(max_tensor_bytes=1 << 20)


async def test_a_tensor_beyond_the_limit_is_refused_from_its_description_alone() -> None:
    step, _ = step_of(torch.zeros(10, 8))
    async with fed(frame(encode_message(step))) as stream:
        with pytest.raises(ProtocolError, match="at most 319 fit"):
            await stream.receive(max_tensor_bytes=319)


async def test_an_interrupted_tensor_is_refused() -> None:
    step, payload = step_of(torch.zeros(4000, 256))
    first = frame(encode_message(step), bytes(payload[:MAX_CHUNK_BYTES]))
    async with fed(first + frame(encode_message(Close()))) as stream:
        with pytest.raises(FrameError, match="interrupted"):
            await stream.receive(max_tensor_bytes=1 << 23)
    async with fed(first + 4 * frame(b"", bytes(MAX_CHUNK_BYTES))) as stream:
        with pytest.raises(FrameError, match="came for a tensor"):
            await stream.receive(max_tensor_bytes=1 << 23)


@pytest.mark.parametrize("sent", [3, 20, 200, 2000])
async def test_a_message_that_stops_midway_is_given_up(
    sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "FRAME_TIMEOUT_S", 0.1)
    step, payload = step_of(torch.zeros(4, 256))
    async with pipe_pair() as (here, there):
        there.write(frame(encode_message(step), bytes(payload))[:sent])
        with pytest.raises(FrameError, match="stopped midway"):
            await asyncio.wait_for(Stream(PEER, here, here).receive(max_tensor_bytes=1 << 20), 5)


async def test_silence_between_messages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "FRAME_TIMEOUT_S", 0.05)
    async with piped() as stream:
        receiving = asyncio.create_task(stream.receive())
        await asyncio.sleep(0.2)
        await stream.send(Ping(nonce=1))
        assert (await receiving)[0] == Ping(nonce=1)


async def test_a_receiver_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "FRAME_TIMEOUT_S", 0.1)
    step, payload = step_of(torch.zeros(4000, 256))
    async with pipe_pair() as (_, there):
        stream = Stream(PEER, there, there)
        with pytest.raises(StreamClosedError, match="took nothing"):
            await asyncio.wait_for(stream.send(step, payload), 5)


async def test_sending_to_a_peer_that_has_gone_is_noticed() -> None:
    async with pipe_pair() as (here, there):
        stream = Stream(PEER, there, there)
        here.abort()
        await asyncio.sleep(0.05)
        with pytest.raises(StreamClosedError):
            await _send_often(stream)
        await stream.close()
        await stream.close()


async def _send_often(stream: Stream) -> None:
    for nonce in range(100):
        await stream.send(Ping(nonce=nonce))
        await asyncio.sleep(0.01)


def test_unknown_fields_of_a_later_minor_version_are_ignored() -> None:
    newer = encode_message(ErrorMessage(code="busy", message="x")).replace(
        b"\xa5fatal", b"\xa5fatel"
    )
    assert decode_message(newer) == ErrorMessage(code="busy", message="x")


@settings(max_examples=300)
@given(data=st.data())
def test_a_mutated_message_decodes_to_a_bounded_one_or_is_refused(data: st.DataObject) -> None:
    step, _ = step_of(torch.zeros(3, 8))
    output = Output(epoch=1, step=1, rows=step.rows, tensor=step.tensor)
    header = bytearray(encode_message(data.draw(st.sampled_from([step, output]))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(header) - 1))
        header[at] = data.draw(st.integers(0, 255))
    try:
        message = decode_message(bytes(header))
    except FrameError:
        return
    meta = getattr(message, "tensor", None)
    if meta is not None:
        try:
            nbytes = tensors.check_meta(meta, max_bytes=1 << 20)
        except ProtocolError as error:
            nbytes = -1 if error.code == "bad_tensor" else -2
        assert -1 <= nbytes <= 1 << 20


def test_what_a_peer_wrote_for_people_is_plain_text() -> None:
    evil = "\x1b[2J\x1b]52;c;cm0gLXJmIH4=\x07 run this"
    shown = "\\x1b[2J\\x1b]52;c;cm0gLXJmIH4=\\x07 run this"
    error = decode_message(encode_message(ErrorMessage(code="not\x1ballowed", message=evil)))
    assert isinstance(error, ErrorMessage)
    assert (error.code, error.message) == ("not\\x1ballowed", shown)
    busy = decode_message(encode_message(Busy(retry_after_s=1, free_tokens=0, message=evil)))
    assert isinstance(busy, Busy)
    assert busy.message == shown


@pytest.mark.parametrize("name", ["a\x1bb", "a b", "\u202e", ""])
def test_name_of_a_peer_is_of_characters_that_can_be_seen(name: str) -> None:
    with pytest.raises(FrameError) as refused:
        decode_message(encode_message(HandOver(to=Downstream(peer=name, blocks=(0, 1)))))
    assert str(refused.value).isprintable()
