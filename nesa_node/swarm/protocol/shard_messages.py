"""Messages by which a model's owner places shards of it on nodes (`docs/protocol.md`)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from nesa_node.swarm.protocol.messages import Message

SHARD_PROTOCOL = "/nesa/shard/1"
"""Streams of owners, one for each request. Sessions of a shard are those of `PROTOCOL`, with the
shard's id as model."""
SHARD_ID_PATTERN = "^[0-9a-f]{32}$"
MAX_CONFIG_BYTES = 1 << 16
MAX_SHARD_BLOCKS = 1024
MAX_PART_BYTES = 4 << 20
MAX_CACHE_TOKENS = 1 << 24

ShardId = Annotated[str, Meta(pattern=SHARD_ID_PATTERN)]
Proof = Annotated[bytes, Meta(max_length=64)]
"""In a private swarm that the sender knows its key (`adapter_proof`)."""


class ShardPut(Message, frozen=True, kw_only=True, tag="shard_put"):
    """Owner to node: hold these blocks. Their weights follow, without names: those of each block in
    the order of its parameters in transformers.
    """

    shard: ShardId
    membership: Proof = b""
    config: Annotated[bytes, Meta(max_length=MAX_CONFIG_BYTES)]
    """JSON of a model with these blocks only, and no vocabulary."""
    blocks: Annotated[int, Meta(ge=1, le=MAX_SHARD_BLOCKS)]
    dtype: Literal["float32", "bfloat16", "float16"]
    """Of weights and activations."""
    layout: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 of a block's parameters and their shapes, as both sides' transformers has them."""
    cache_tokens: Annotated[int, Meta(ge=1, le=MAX_CACHE_TOKENS)]


class ShardWanted(Message, frozen=True, kw_only=True, tag="shard_wanted"):
    """Node to owner: there is room for these weights; send them."""

    nbytes: Annotated[int, Meta(ge=1, lt=1 << 53)]


class ShardPart(Message, frozen=True, kw_only=True, tag="shard_part"):
    """Owner to node: the next bytes of the weights, as payload."""

    nbytes: Annotated[int, Meta(ge=1, le=MAX_PART_BYTES)]


class ShardQuery(Message, frozen=True, kw_only=True, tag="shard_query"):
    """Owner or client to node: whether it holds a shard."""

    shard: ShardId
    membership: Proof = b""


class ShardRename(Message, frozen=True, kw_only=True, tag="shard_rename"):
    """Owner to node: the shard has this id, too, from now on."""

    shard: ShardId
    membership: Proof = b""
    new: ShardId


class ShardDrop(Message, frozen=True, kw_only=True, tag="shard_drop"):
    """Owner to node: forget this id, and weights that have no other one; sessions may end first."""

    shard: ShardId
    membership: Proof = b""


class ShardHeld(Message, frozen=True, kw_only=True, tag="shard_held"):
    """Node to owner or client: a shard is held, with such speed and cache."""

    prefill_tokens_per_s: Annotated[float, Meta(ge=0)]
    decode_tokens_per_s: Annotated[float, Meta(ge=0)]
    total_cache_tokens: Annotated[int, Meta(ge=0)]
    free_cache_tokens: Annotated[int, Meta(ge=0)]


class ShardDropped(Message, frozen=True, kw_only=True, tag="shard_dropped"):
    """Node to owner: the id is forgotten."""


ShardRequest = ShardPut | ShardQuery | ShardRename | ShardDrop
"""The first message of a stream."""
