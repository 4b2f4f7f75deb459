"""Messages of inference sessions, which `docs/protocol.md` specifies."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.settings.choices import CacheDtype

PROTOCOL = "/nesa/session"
VERSION = (1, 11)
EARLY_STEPS_SINCE = (1, 10)
"""Version since which a node waits with a pushed step whose epoch the client has not begun there: a
client that rolls back needs no answer before it goes on."""

MAX_ROWS = 256
MAX_TOKENS = 1 << 24
MAX_EPOCH = 1 << 48
MAX_CODECS = 64
MAX_PREFIX_DIGESTS = 2048
"""Digests of all rows in one message; more would exceed the limit of its header."""
INT8_CACHE = "+kv-int8"
"""What `Computation.quantization` ends with if the KV cache is in 8 bits."""
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
AdapterName = Annotated[bytes, Meta(max_length=32)]
CacheName = Annotated[str, Meta(min_length=1, max_length=16, pattern="^[!-~]+$")]
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
    adapter: AdapterName = b""
    """Digest of the adapter to use beside the model; empty: none."""
    trace: Annotated[bytes, Meta(max_length=64)] = b""
    """Parent of the node's trace span, in a chain: 16 bytes of trace id and 8 of span id. Bytes of
    any other length are ignored."""


class Computation(msgspec.Struct, frozen=True):
    """What a node declares to compute with."""

    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: Annotated[str, Meta(max_length=16, pattern="^[!-~]+$")]
    """Of weights, and `INT8_CACHE` behind it where the KV cache is in 8 bits: bounds of honest
    errors, and auditors of protocol 1.10 or older, tell kinds apart by this text.
    """
    backend: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[ -~]+$")]
    """`cpu`, or the name of a GPU."""

    @property
    def weights(self) -> str:
        """The quantization of weights alone."""
        return self.quantization.removesuffix(INT8_CACHE)

    @property
    def cache_dtype(self) -> CacheDtype:
        return "int8" if self.quantization.endswith(INT8_CACHE) else "auto"


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
    adapter: AdapterName = b""
    """As in `open`. A node of protocol 1.5 or older knows none."""
    nonce: Annotated[bytes, Meta(max_length=16)] = b""
    """Drawn by the node, for its seals of this session: no session can be opened twice alike."""
    computation: Computation | None = None
    """None from nodes of protocol 1.6 or older, which seal nothing."""


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
    decoding: Count = 0
    """Most sessions that decode at one of the nodes before, this one included; 0: unknown."""


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
    """Successor to donor: send."""

    cache_dtype: CacheName = "auto"
    """What the successor's cache holds. A node of protocol 1.10 or older has no other."""


class Pages(Message, frozen=True, tag="pages"):
    """Keys and values [2 x blocks, L, H, D] of a row's tokens: all keys, then all values."""

    row: Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
    position: Count
    tensor: TensorMeta


class QuantizedPages(Message, frozen=True, tag="quantized_pages"):
    """Keys and values of a row's tokens as an int8 cache holds them (`engine/cache/pages.py`,
    `export_bytes`), to a successor with such a cache.
    """

    row: Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
    position: Count
    count: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    """Of tokens."""
    nbytes: Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
    """Of all of them; they follow."""


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
    decoding: Count = 0
    """As in `Step`, the sender included; 0 from nodes of protocol 1.9 or older."""


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
