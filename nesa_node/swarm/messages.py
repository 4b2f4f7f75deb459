"""The messages of the session protocol. `docs/protocol.md` is their specification.

A message is a MessagePack map with its name under `t`. Unknown fields are ignored, so that minor
versions interoperate; every field is bounded here, so that a decoded message can be relied on.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.errors import FrameError
from nesa_node.core.plain_text import plain_text

PROTOCOL = "/nesa/session"
VERSION = (1, 5)

MAX_ROWS = 256
MAX_TOKENS = 1 << 24
MAX_EPOCH = 1 << 48
MAX_CODECS = 64
MAX_DIGESTS = 2048
"""In one message, of all rows together: more would not fit beside the rest of its header."""
PREFIX_TOKENS = 32
"""A row's digests stand for its first 32 tokens, its first 64, and so on."""

Version = tuple[Annotated[int, Meta(ge=0, le=65535)], Annotated[int, Meta(ge=0, le=65535)]]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Lengths = Annotated[tuple[Count, ...], Meta(max_length=MAX_ROWS)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Prefix = Annotated[tuple[tuple[Digest, ...], ...], Meta(max_length=MAX_ROWS)]
PeerName = Annotated[str, Meta(min_length=1, max_length=128, pattern="^[!-~]+$")]
BlockRange = tuple[Count, Count]
Mode = Literal["chain", "star"]
Want = Literal["all", "last", "none"]
Priority = Literal["interactive", "batch", "training"]
CodecName = Annotated[str, Meta(min_length=1, max_length=32, pattern="^[!-~]+$")]
Codecs = Annotated[tuple[CodecName, ...], Meta(max_length=MAX_CODECS)]


class RowSlice(msgspec.Struct, frozen=True, array_like=True):
    """`count` consecutive tokens of sequence `row`, the first of them at `position`."""

    row: Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
    position: Count
    count: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


Slices = Annotated[tuple[RowSlice, ...], Meta(min_length=1, max_length=MAX_ROWS)]


class Message(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    pass


class Open(Message, frozen=True, tag="open"):
    """Client to node: reserve a session. Nothing runs until `link`."""

    version: Version
    model: Annotated[str, Meta(max_length=256)]
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    blocks: BlockRange
    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    mode: Mode
    dtype: Literal["float32", "bfloat16", "float16"]
    epoch: Epoch
    upstream: PeerName | None
    """The peer whose pushes are accepted; None: the client itself sends the steps."""
    membership: Annotated[bytes, Meta(max_length=64)] = b""
    priority: Priority = "interactive"
    donor: PeerName | None = None
    """The peer that may hand over its cache of this session before it is linked."""
    prefix: Prefix = ()
    """Per row, the digests of what it will be fed first."""
    quality: CodecName = "exact"
    """What compression may do to its hidden states: `compression/quality.py`."""
    codecs: Codecs = ()
    """What the client decodes beside "none"."""
    trace: Annotated[bytes, Meta(max_length=64)] = b""
    """What the node's part in it belongs to, in a chain: 16 bytes of a trace's id, 8 of a span's.
    Anything else is ignored."""


class Opened(Message, frozen=True, tag="opened"):
    version: Version
    max_tokens: Count
    """Tokens promised per row."""
    context_length: Count
    step_timeout_s: Seconds
    held: Lengths = ()
    """Per row, how many of the tokens that `prefix` announced are in the cache already."""
    codecs: Codecs = ()
    """What the node decodes beside "none"."""


class Busy(Message, frozen=True, tag="busy"):
    retry_after_s: Seconds
    free_tokens: Count
    message: Annotated[str, Meta(max_length=1024)] = ""


class Downstream(msgspec.Struct, frozen=True):
    peer: PeerName
    blocks: BlockRange


class Link(Message, frozen=True, tag="link"):
    """Client to node: the neighbours from this epoch on, and what everybody holds."""

    epoch: Epoch
    upstream: PeerName | None
    downstream: Downstream | None
    """None: outputs go to the client on this stream."""
    lengths: Lengths
    """Cut the caches back to these."""
    emit_from: Lengths
    """Per row, the first position the receiver of the outputs lacks."""


class Linked(Message, frozen=True, tag="linked"):
    epoch: Epoch


class PushOpen(Message, frozen=True, tag="push_open"):
    """Node to the next node: from now on this stream carries the session's steps."""

    version: Version
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    epoch: Epoch


class PushOpened(Message, frozen=True, tag="push_opened"):
    epoch: Epoch
    codecs: Codecs = ()
    """What the node decodes beside "none"."""


class Step(Message, frozen=True, tag="step"):
    """Hidden states [T, D] of the packed `rows`, T being the sum of their counts."""

    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    epoch: Epoch
    step: Epoch
    rows: Slices
    tensor: TensorMeta
    want: Want = "all"
    via: Codecs = ()
    """How the session's hidden states travelled up to here, hop by hop; empty: as they are."""


class HandOver(Message, frozen=True, tag="hand_over"):
    """Client to node: give `to` what this node holds of the session, or what came since the last.

    `to` has the session open, with this node for its `donor`.
    """

    to: Downstream


class HandedOver(Message, frozen=True, tag="handed_over"):
    peer: PeerName
    lengths: Lengths
    """What `peer` holds now."""


class TransferOpen(Message, frozen=True, tag="transfer_open"):
    """Node to the node it hands over to: this stream carries the session's cache and outputs."""

    version: Version
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]


class TransferOpened(Message, frozen=True, tag="transfer_opened"):
    pass


class Pages(Message, frozen=True, tag="pages"):
    """Keys and values [2 x blocks, L, H, D] of a row's tokens: all keys, then all values."""

    row: Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
    position: Count
    tensor: TensorMeta


class Sync(Message, frozen=True, tag="sync"):
    """Forget the tokens from `lengths` on, and say when all that came before is in place."""

    lengths: Lengths


class Synced(Message, frozen=True, tag="synced"):
    lengths: Lengths
    """What is held now."""


class Output(Message, frozen=True, tag="output"):
    """What the last blocks made of a step: all of it, one token per slice, or nothing ([0, D])."""

    epoch: Epoch
    step: Epoch
    rows: Slices
    tensor: TensorMeta
    via: Codecs = ()
    """As in `step`."""


class Probe(Message, frozen=True, tag="probe"):
    """Bytes that mean nothing: how fast do they arrive?"""

    tensor: TensorMeta


class Received(Message, frozen=True, tag="received"):
    """Receiver to sender: so long the payload of a message took to come, once it had begun."""

    nbytes: Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
    seconds: Annotated[float, Meta(gt=0, le=86_400)]


class Rollback(Message, frozen=True, tag="rollback"):
    epoch: Epoch
    lengths: Lengths


class RolledBack(Message, frozen=True, tag="rolled_back"):
    epoch: Epoch


class Reorder(Message, frozen=True, tag="reorder"):
    """Client to node: each row goes on as a copy of row `sources[row]`, in a new epoch."""

    epoch: Epoch
    sources: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=MAX_ROWS)], ...], Meta(max_length=MAX_ROWS)
    ]


class Reordered(Message, frozen=True, tag="reordered"):
    epoch: Epoch


class Ping(Message, frozen=True, tag="ping"):
    nonce: Epoch


class Pong(Message, frozen=True, tag="pong"):
    nonce: Epoch
    epoch: Epoch
    step: int
    """The last step accepted in this epoch; -1 before the first."""
    busy: bool
    pushed: int | None = None
    """The last step of this epoch that it began to send to the next node; -1 before the first.

    None from nodes of protocol 1.4 or older, which do not tell it.
    """
    upstream_bytes: int | None = None
    """What has come on the stream of the node before it, also of a message that is not whole."""


class Leaving(Message, frozen=True, tag="leaving"):
    """Node to client: it drains and ends the session itself after `seconds`."""

    seconds: Seconds


class Cancel(Message, frozen=True, tag="cancel"):
    """Drop what is queued and end the session."""


class Close(Message, frozen=True, tag="close"):
    """End the session."""

    prefix: Prefix = ()
    """Per row, the digests of what it holds now: a later session may go on from there."""


class Closed(Message, frozen=True, tag="closed"):
    pass


class Error(Message, frozen=True, tag="error"):
    code: Annotated[str, Meta(min_length=1, max_length=64)]
    message: Annotated[str, Meta(max_length=2048)]
    fatal: bool = True
    """The sender ends the session after it."""
    answers: Annotated[str, Meta(max_length=32)] | None = None
    """The name of the message that is refused; None: it comes unasked."""
    peer: PeerName | None = None
    """Whom it is about, when that is a third party."""
    step: Epoch | None = None


AnyMessage = (
    Open | Opened | Busy | Link | Linked | PushOpen | PushOpened | Step | Output | Rollback
    | RolledBack | Ping | Pong | Leaving | Cancel | Close | Closed | Error | HandOver | HandedOver
    | TransferOpen | TransferOpened | Pages | Sync | Synced | Reorder | Reordered | Probe | Received
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(header: bytes | bytearray | memoryview) -> AnyMessage:
    """Raises `FrameError` for anything but one well-formed, bounded message.

    What a peer wrote for people to read is plain text (`core/plain_text.py`).
    """
    try:
        return _readable(_decoder.decode(header))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        words = plain_text(str(error)[:200])
        raise FrameError(f"not a message of this protocol: {words}") from None


def _readable(message: AnyMessage) -> AnyMessage:
    match message:
        case Busy():
            return msgspec.structs.replace(message, message=plain_text(message.message))
        case Error():
            return msgspec.structs.replace(
                message, code=plain_text(message.code), message=plain_text(message.message)
            )
        case _:
            return message


def tensor_of(message: Message) -> TensorMeta | None:
    """The description of the payload that follows `message`, if one does."""
    return message.tensor if isinstance(message, Step | Output | Pages | Probe) else None
