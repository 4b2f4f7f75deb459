"""Messages of the session protocol, which `docs/protocol.md` specifies.

A message is a MessagePack map with its name under `t`. Unknown fields are ignored, so that minor
versions interoperate. Every field is bounded, so that a decoded message needs no further checks of
its sizes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.errors import FrameError
from nesa_node.core.logging import escape_text

PROTOCOL = "/nesa/session"
ADAPTER_PROTOCOL = "/nesa/adapter/1"
"""Streams on which adapters are stored and fetched, one request each."""
VERSION = (1, 5)

MAX_ROWS = 256
MAX_TOKENS = 1 << 24
MAX_EPOCH = 1 << 48
MAX_CODECS = 64
MAX_PREFIX_DIGESTS = 2048
"""Digests of all rows in one message; more would exceed the limit of its header."""
MAX_ADAPTER_DIGESTS = 1024
"""Digests of adapters in one message."""
MAX_ADAPTER_CHUNK_BYTES = 60 * 1024
"""Bytes of an adapter's file in one message, which must fit into its header."""
MAX_ADAPTER_CONFIG_BYTES = 64 * 1024
MAX_ADAPTER_FILE_BYTES = 256 * 2**20
MAX_NOTICE_BYTES = 8192
PREFIX_TOKENS = 32
"""Tokens per digest: a row's digests cover its first 32 tokens, its first 64, and so on."""

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
    """`count` consecutive tokens of sequence `row`, starting at `position`."""

    row: Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
    position: Count
    count: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


Slices = Annotated[tuple[RowSlice, ...], Meta(min_length=1, max_length=MAX_ROWS)]


class Message(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    """Base class of all messages."""


class Open(Message, frozen=True, tag="open"):
    """Client to node: reserve a session, in which nothing runs until `link`."""

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
    """The peer that may push steps; None: the client sends the steps."""
    membership: Annotated[bytes, Meta(max_length=64)] = b""
    priority: Priority = "interactive"
    donor: PeerName | None = None
    """The peer that may hand over its cache of this session before it is linked."""
    prefix: Prefix = ()
    """Per row, the digests of its first tokens."""
    quality: CodecName = "exact"
    """Lowest quality that hidden states may be compressed to (`compression/codecs.py`)."""
    codecs: Codecs = ()
    """Codecs that the client decodes beside "none"."""
    trace: Annotated[bytes, Meta(max_length=64)] = b""
    """Parent of the node's trace span, in a chain: 16 bytes of trace id and 8 of span id. Bytes of
    any other length are ignored."""


class Opened(Message, frozen=True, tag="opened"):
    """Node to client: the session is reserved."""

    version: Version
    max_tokens: Count
    """Tokens reserved per row."""
    context_length: Count
    step_timeout_s: Seconds
    held: Lengths = ()
    """Per row, how many of the tokens that `prefix` covers are in the cache already."""
    codecs: Codecs = ()
    """Codecs that the node decodes beside "none"."""


class Busy(Message, frozen=True, tag="busy"):
    """Node to client: the session does not fit now."""

    retry_after_s: Seconds
    free_tokens: Count
    message: Annotated[str, Meta(max_length=1024)] = ""


class Downstream(msgspec.Struct, frozen=True):
    peer: PeerName
    blocks: BlockRange


class Link(Message, frozen=True, tag="link"):
    """Client to node: the neighbours from this epoch on, and the cache lengths to start from."""

    epoch: Epoch
    upstream: PeerName | None
    downstream: Downstream | None
    """None: outputs go to the client on this stream."""
    lengths: Lengths
    """Per row, the cache length to truncate to."""
    emit_from: Lengths
    """Per row, the first position that the receiver of the outputs lacks."""


class Linked(Message, frozen=True, tag="linked"):
    epoch: Epoch


class PushOpen(Message, frozen=True, tag="push_open"):
    """Node to the next node: this stream carries the session's steps."""

    version: Version
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    epoch: Epoch


class PushOpened(Message, frozen=True, tag="push_opened"):
    epoch: Epoch
    codecs: Codecs = ()
    """Codecs that the node decodes beside "none"."""


class Step(Message, frozen=True, tag="step"):
    """Hidden states [T, D] of the packed `rows`, where T is the sum of their counts."""

    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    epoch: Epoch
    step: Epoch
    rows: Slices
    tensor: TensorMeta
    want: Want = "all"
    via: Codecs = ()
    """Codec of each link that the hidden states have passed; empty if none compressed them."""


class HandOver(Message, frozen=True, tag="hand_over"):
    """Client to node: transfer the session's cache to `to`, or what is new since the last transfer.

    `to` has opened the session with this node as `donor`.
    """

    to: Downstream


class HandedOver(Message, frozen=True, tag="handed_over"):
    peer: PeerName
    lengths: Lengths
    """Per row, the cache length at `peer` now."""


class TransferOpen(Message, frozen=True, tag="transfer_open"):
    """Donor to successor: this stream carries the session's cache and outputs."""

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
    """Truncate each row to `lengths`, and answer when everything sent before is in place."""

    lengths: Lengths


class Synced(Message, frozen=True, tag="synced"):
    lengths: Lengths
    """Per row, the cache length now."""


class Output(Message, frozen=True, tag="output"):
    """Output of a step's last blocks: all tokens, the last of each slice, or none ([0, D])."""

    epoch: Epoch
    step: Epoch
    rows: Slices
    tensor: TensorMeta
    via: Codecs = ()
    """As in `Step`."""


class Probe(Message, frozen=True, tag="probe"):
    """Bytes without meaning, sent to measure the throughput of a link."""

    tensor: TensorMeta


class Received(Message, frozen=True, tag="received"):
    """Receiver to sender: time from the first to the last payload byte of a message."""

    nbytes: Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
    seconds: Annotated[float, Meta(gt=0, le=86_400)]


class Rollback(Message, frozen=True, tag="rollback"):
    epoch: Epoch
    lengths: Lengths


class RolledBack(Message, frozen=True, tag="rolled_back"):
    epoch: Epoch


class Reorder(Message, frozen=True, tag="reorder"):
    """Client to node: each row becomes a copy of row `sources[row]`, in a new epoch."""

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
    """The last step of this epoch that is being sent to the next node; -1 before the first.

    None from nodes of protocol 1.4 or older.
    """
    upstream_bytes: int | None = None
    """Bytes received from the previous node, including those of an incomplete message."""


class Leaving(Message, frozen=True, tag="leaving"):
    """Node to client: the node drains, and ends the session itself after `seconds`."""

    seconds: Seconds


class Cancel(Message, frozen=True, tag="cancel"):
    """Drop queued steps and end the session."""


class Close(Message, frozen=True, tag="close"):
    """End the session."""

    prefix: Prefix = ()
    """Per row, the digests of its tokens, which later sessions may reuse as a prefix."""


class Closed(Message, frozen=True, tag="closed"):
    pass


AdapterDigest = Annotated[bytes, Meta(min_length=32, max_length=32)]
AdapterDigests = Annotated[tuple[AdapterDigest, ...], Meta(max_length=MAX_ADAPTER_DIGESTS)]


class AdapterRequest(Message, frozen=True, kw_only=True):
    """Base class of the first messages on a stream of `ADAPTER_PROTOCOL`."""

    model: Annotated[str, Meta(max_length=256)]
    membership: Annotated[bytes, Meta(max_length=64)] = b""
    """In a private swarm the proof that the sender knows its key (`adapter_proof`)."""


class AdapterQuery(AdapterRequest, frozen=True, kw_only=True, tag="adapter_query"):
    """Any peer to node: which of these adapters it holds; without digests, which at all."""

    digests: AdapterDigests = ()


class AdapterHeld(Message, frozen=True, tag="adapter_held"):
    digests: AdapterDigests


class AdapterGet(AdapterRequest, frozen=True, kw_only=True, tag="adapter_get"):
    """Any peer to node: send both files of an adapter."""

    digest: AdapterDigest


class AdapterFiles(Message, frozen=True, tag="adapter_files"):
    """Node to peer: the sizes of both files, of which chunks follow, those of the config first."""

    config_bytes: Annotated[int, Meta(ge=1, le=MAX_ADAPTER_CONFIG_BYTES)]
    weights_bytes: Annotated[int, Meta(ge=1, le=MAX_ADAPTER_FILE_BYTES)]


class AdapterPut(AdapterRequest, frozen=True, kw_only=True, tag="adapter_put"):
    """Any peer to node: store an adapter that `notice`, sealed by its author, lists."""

    digest: AdapterDigest
    notice: Annotated[bytes, Meta(max_length=MAX_NOTICE_BYTES)]
    config_bytes: Annotated[int, Meta(ge=1, le=MAX_ADAPTER_CONFIG_BYTES)]
    weights_bytes: Annotated[int, Meta(ge=1, le=1 << 53)]
    """Not bounded by what nodes store: they say in their refusal what is too large."""


class AdapterWanted(Message, frozen=True, tag="adapter_wanted"):
    """Node to peer: send the chunks."""


class AdapterChunk(Message, frozen=True, tag="adapter_chunk"):
    """The next bytes of a file; none continues into the next file."""

    data: Annotated[bytes, Meta(min_length=1, max_length=MAX_ADAPTER_CHUNK_BYTES)]


class AdapterStored(Message, frozen=True, tag="adapter_stored"):
    """Node to peer: the adapter is held, checked, and will be served."""


class ErrorMessage(Message, frozen=True, tag="error"):
    code: Annotated[str, Meta(min_length=1, max_length=64)]
    message: Annotated[str, Meta(max_length=2048)]
    fatal: bool = True
    """Whether the sender ends the session."""
    answers: Annotated[str, Meta(max_length=32)] | None = None
    """Name of the refused message; None: the error answers no message."""
    peer: PeerName | None = None
    """The third peer that the error concerns, if any."""
    step: Epoch | None = None


AnyMessage = (
    Open | Opened | Busy | Link | Linked | PushOpen | PushOpened | Step | Output | Rollback
    | RolledBack | Ping | Pong | Leaving | Cancel | Close | Closed | ErrorMessage | HandOver
    | HandedOver | TransferOpen | TransferOpened | Pages | Sync | Synced | Reorder
    | Reordered | Probe | Received | AdapterQuery | AdapterHeld | AdapterGet | AdapterFiles
    | AdapterPut | AdapterWanted | AdapterChunk | AdapterStored
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(header: bytes | bytearray | memoryview) -> AnyMessage:
    """Decode a header. Raises `FrameError` for anything but one well-formed, bounded message.

    Texts for people are made plain: control characters are escaped (`core/logging.py`).
    """
    try:
        return _with_plain_text(_decoder.decode(header))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        words = escape_text(str(error)[:200])
        raise FrameError(f"not a message of this protocol: {words}") from None


def _with_plain_text(message: AnyMessage) -> AnyMessage:
    match message:
        case Busy():
            return msgspec.structs.replace(message, message=escape_text(message.message))
        case ErrorMessage():
            return msgspec.structs.replace(
                message, code=escape_text(message.code), message=escape_text(message.message)
            )
        case _:
            return message


def tensor_of(message: Message) -> TensorMeta | None:
    """Description of the tensor that follows `message`; None if none follows."""
    return message.tensor if isinstance(message, Step | Output | Pages | Probe) else None
