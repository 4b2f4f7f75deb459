"""Messages of streams on which adapters are stored and fetched (`docs/protocol.md`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from nesa_node.swarm.protocol.messages import Message

ADAPTER_PROTOCOL = "/nesa/adapter/1"
"""Streams on which adapters are stored and fetched, one request each."""
MAX_ADAPTER_DIGESTS = 1024
"""Digests of adapters in one message."""
MAX_ADAPTER_CHUNK_BYTES = 60 * 1024
"""Bytes of an adapter's file in one message, which must fit into its header."""
MAX_ADAPTER_CONFIG_BYTES = 64 * 1024
MAX_ADAPTER_FILE_BYTES = 256 * 2**20
MAX_NOTICE_BYTES = 8192

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
