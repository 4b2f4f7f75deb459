"""Framing: what was sent arrives; what is not a message is refused before it costs anything."""

import asyncio
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nesa_node.compression import tensors
from nesa_node.core.errors import FrameError, ProtocolError, StreamClosedError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.messages import (
    Close,
    Error,
    Output,
    Ping,
    RowSlice,
    Step,
    decode_message,
    encode_message,
)
from nesa_node.swarm.stream import CHUNK_BYTES, MAX_HEADER_BYTES, Stream

PEER = PeerId("12D3KooWTest")


class Pipe:
    """A writer whose bytes a reader gets."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()

    def write(self, data: bytes) -> None:
        self.reader.feed_data(bytes(data))

    async def drain(self) -> None:
        await asyncio.sleep(0)


def piped() -> Stream:
    pipe = Pipe()
    return Stream(PEER, pipe.reader, pipe)  # type: ignore[arg-type]


def fed(data: bytes) -> Stream:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return Stream(PEER, reader, None)  # type: ignore[arg-type]


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
    stream = piped()
    sending = asyncio.create_task(stream.send(step, payload))
    message, data = await stream.receive(max_tensor_bytes=len(payload))
    await sending
    assert message == step
    assert torch.equal(tensors.decode(step.tensor, data, max_bytes=len(data)), hidden_TD)
    assert stream.bytes_received == pytest.approx(stream.bytes_sent, abs=8 * 4)
    if tokens == 3000:
        assert len(payload) > 2 * CHUNK_BYTES


async def test_messages_sent_by_several_tasks_do_not_mix() -> None:
    stream = piped()
    step, payload = step_of(torch.randn(2000, 256))
    async with asyncio.TaskGroup() as tasks:
        for nonce in range(5):
            tasks.create_task(stream.send(step, payload))
            tasks.create_task(stream.send(Ping(nonce=nonce)))
        got = [(await stream.receive(max_tensor_bytes=1 << 22))[0] for _ in range(10)]
    assert sum(message == step for message in got) == 5


async def test_the_end_of_the_stream_is_no_frame_error() -> None:
    with pytest.raises(StreamClosedError):
        await fed(b"").receive()
    with pytest.raises(StreamClosedError):
        await fed(frame(encode_message(Close()))[:-1]).receive()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (struct.pack("<II", MAX_HEADER_BYTES + 1, 0), "header of"),
        (struct.pack("<II", 0, 5), "header of 0"),
        (struct.pack("<II", 10, CHUNK_BYTES + 1), "chunk of"),
        (frame(b"\xc1" * 10), "not a message"),
        (frame(encode_message(Close()) + b"\x00"), "not a message"),
        (frame(encode_message(Close()), b"payload"), "came for a tensor of 0"),
    ],
)
async def test_impossible_frames_are_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        await fed(data).receive(max_tensor_bytes=1 << 20)


async def test_a_tensor_beyond_the_limit_is_refused_from_its_description_alone() -> None:
    step, _ = step_of(torch.zeros(10, 8))
    with pytest.raises(ProtocolError, match="at most 319 fit"):
        await fed(frame(encode_message(step))).receive(max_tensor_bytes=319)


async def test_an_interrupted_tensor_is_refused() -> None:
    step, payload = step_of(torch.zeros(4000, 256))
    first = frame(encode_message(step), bytes(payload[:CHUNK_BYTES]))
    with pytest.raises(FrameError, match="interrupted"):
        await fed(first + frame(encode_message(Close()))).receive(max_tensor_bytes=1 << 23)
    with pytest.raises(FrameError, match="came for a tensor"):
        await fed(first + 4 * frame(b"", bytes(CHUNK_BYTES))).receive(max_tensor_bytes=1 << 23)


def test_unknown_fields_of_a_later_minor_version_are_ignored() -> None:
    newer = encode_message(Error(code="busy", message="x")).replace(b"\xa5fatal", b"\xa5fatel")
    assert decode_message(newer) == Error(code="busy", message="x")


@settings(max_examples=300, deadline=None)
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
            nbytes = tensors.check(meta, max_bytes=1 << 20)
        except ProtocolError as error:
            nbytes = -1 if error.code == "bad_tensor" else -2
        assert -1 <= nbytes <= 1 << 20
