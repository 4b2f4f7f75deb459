"""Snapshots as versioned JSON documents.

Input is checked: sizes before anything is allocated, every number against its bounds. Link arrays
are float64, compressed with zlib, in base64: lossless, so the digest stays the same.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Iterable
from dataclasses import astuple
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.roofline import (
    MAX_FIGURE,
    MAX_OVERHEAD_S,
    BlockWork,
    Roofline,
    WeightFigures,
)
from nesa_node.topology.snapshot import LINK_ARRAYS, NodeState, Snapshot, canonical_bytes

VERSION = 1
FORMAT = "nesa-node snapshot"
MAX_NODES = 10_000
MAX_LINKED_NODES = 5_000
"""Maximum number of nodes with links; four float64 matrices of them take 800 MB."""
MAX_BLOCKS = 10_000
MAX_SNAPSHOT_BYTES = 1 << 30
_MAX_COMPRESSION_RATIO = 1100
"""Upper bound of zlib's compression ratio: a shorter text cannot hold the array that it claims."""
_ZLIB_LEVEL = 1

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Block = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
_Amount = Annotated[float, Meta(ge=0.0, le=1e15)]
_Figure = Annotated[float, Meta(gt=0.0, le=MAX_FIGURE)]
_Share = Annotated[float, Meta(ge=0.0, le=1.0)]
_Latitude = Annotated[float, Meta(ge=-90.0, le=90.0)]
_Longitude = Annotated[float, Meta(ge=-180.0, le=180.0)]
_Minor = Annotated[int, Meta(ge=0, le=1 << 16)]


class _SnapshotPart(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _SnapshotSpan(_SnapshotPart):
    start: _Block
    end: _Block


class _SnapshotFigures(_SnapshotPart):
    block_overhead_s: Annotated[float, Meta(ge=0.0, le=MAX_OVERHEAD_S)]
    read_bytes_per_s: _Figure
    flop_per_s: _Figure
    overlaps: bool
    wakeup_s: _Amount = 0.0


class _SnapshotWork(_SnapshotPart):
    read_bytes: _Figure
    flop: _Figure


class _SnapshotRoofline(_SnapshotPart):
    figures: _SnapshotFigures
    work: _SnapshotWork

    def roofline(self) -> Roofline:
        figures, work = (msgspec.structs.asdict(each) for each in (self.figures, self.work))
        return Roofline(WeightFigures(**figures), BlockWork(**work))


class _SnapshotNode(_SnapshotPart):
    """JSON form of a `NodeState`, field by field."""

    peer_id: _Name
    span: _SnapshotSpan
    dtype: _Name = "float32"
    quantization: _Name = "none"
    cache_dtype: _Name = "auto"
    prefill_tokens_per_s: _Amount = 0.0
    decode_tokens_per_s: _Amount = 0.0
    free_cache_tokens: _Count = 0
    total_cache_tokens: _Count = 0
    load: _Amount = 0.0
    uptime_s: _Amount = 0.0
    addresses: Annotated[tuple[_Name, ...], Meta(max_length=64)] = ()
    public_name: Annotated[str, Meta(max_length=256)] | None = None
    context_length: _Count = 0
    protocol_version: tuple[_Minor, _Minor] = (1, 0)
    seq: _Count = 0
    max_blocks: _Block = 0
    reliability: _Share = 1.0
    movable: bool = False
    location: tuple[_Latitude, _Longitude] | None = None
    gpu_memory_total_bytes: _Count = 0
    gpu_memory_free_bytes: _Count = 0
    cpu_memory_total_bytes: _Count = 0
    cpu_memory_free_bytes: _Count = 0
    roofline: _SnapshotRoofline | None = None
    operator: Annotated[str, Meta(max_length=64)] | None = None
    private_schemes: Annotated[tuple[_Name, ...], Meta(max_length=8)] = ()


class _SnapshotLinks(_SnapshotPart):
    peers: Annotated[tuple[_Name, ...], Meta(max_length=MAX_LINKED_NODES)]
    rtt_ms_NN: str
    rate_bytes_per_s_NN: str
    age_s_NN: str
    confidence_NN: str


class _SnapshotDocument(_SnapshotPart):
    format: str
    version: int
    model_id: _Name
    num_blocks: _Block
    taken_at: Annotated[float, Meta(ge=-1e15, le=1e15)]
    nodes: Annotated[tuple[_SnapshotNode, ...], Meta(max_length=MAX_NODES)]
    joining: Annotated[tuple[_SnapshotNode, ...], Meta(max_length=MAX_NODES)] = ()
    links: _SnapshotLinks | None = None


class _SnapshotVersion(msgspec.Struct):
    format: str = ""
    version: int = 0


def snapshot_to_json(snapshot: Snapshot) -> bytes:
    """Encode a snapshot. Raises `ValueError` for node figures that are NaN or infinite."""
    for node in (*snapshot.nodes, *snapshot.joining):
        _check_finite(node)
    links = snapshot.links
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model_id": snapshot.model_id,
        "num_blocks": snapshot.num_blocks,
        "taken_at": float(snapshot.taken_at),
        "nodes": snapshot.nodes,
        "joining": snapshot.joining,
        "links": None
        if links is None
        else {
            "peers": links.peers,
            **{name: _encode_array(getattr(links, name)) for name in LINK_ARRAYS},
        },
    }
    return msgspec.json.encode(document)


def snapshot_from_json(text: bytes | str, *, where: str = "snapshot") -> Snapshot:
    """Decode what `snapshot_to_json` wrote; `ConfigError`, which names `where`, for anything
    else."""
    if len(text) > MAX_SNAPSHOT_BYTES:
        raise ConfigError(f"{where} has {len(text)} bytes; at most {MAX_SNAPSHOT_BYTES} are read")
    document = _decode_document(text, where)
    nodes = tuple(_node_state(node, where) for node in document.nodes)
    joining = tuple(_node_state(node, where) for node in document.joining)
    names = [node.peer_id for node in (*nodes, *joining)]
    if len(set(names)) != len(names):
        raise ConfigError(f"{where} lists a peer twice; every node needs an id of its own")
    return Snapshot(
        ModelId(document.model_id),
        document.num_blocks,
        nodes,
        document.taken_at,
        joining,
        None if document.links is None else _decode_links(document.links, where),
    )


def _decode_document(text: bytes | str, where: str) -> _SnapshotDocument:
    try:
        about = msgspec.json.decode(text, type=_SnapshotVersion)
        if about.format != FORMAT:
            raise ConfigError(f"{where} is no snapshot: its format is {about.format!r}")
        if about.version != VERSION:
            raise ConfigError(
                f"{where} has version {about.version}, this program reads {VERSION}; use the"
                " program that wrote it, or record it again"
            )
        return msgspec.json.decode(text, type=_SnapshotDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _node_state(node: _SnapshotNode, where: str) -> NodeState:
    fields: dict[str, Any] = {name: getattr(node, name) for name in node.__struct_fields__}
    if node.span.start > node.span.end:
        raise ConfigError(
            f"{where}: node {node.peer_id!r} holds blocks {node.span.start}:{node.span.end};"
            " a span must not end before it starts"
        )
    fields["span"] = Span(node.span.start, node.span.end)
    fields["peer_id"] = PeerId(node.peer_id)
    fields["roofline"] = None if node.roofline is None else node.roofline.roofline()
    return NodeState(**fields)


def _decode_links(document: _SnapshotLinks, where: str) -> Links:
    size = len(document.peers)
    if len(set(document.peers)) != size:
        raise ConfigError(f"{where}: links list a peer twice")
    arrays = {
        name: _decode_array(getattr(document, name), size, name, where) for name in LINK_ARRAYS
    }
    rtt_ms_NN, confidence_NN = arrays["rtt_ms_NN"], arrays["confidence_NN"]
    if not np.array_equal(rtt_ms_NN, rtt_ms_NN.T, equal_nan=True):
        raise ConfigError(f"{where}: rtt_ms_NN is not symmetric")
    if np.diagonal(rtt_ms_NN).any() or np.isinf(rtt_ms_NN).any():
        raise ConfigError(f"{where}: rtt_ms_NN must be finite or NaN, and 0 on its diagonal")
    if not ((confidence_NN >= 0) & (confidence_NN <= 1)).all():
        raise ConfigError(f"{where}: confidence_NN must be between 0 and 1")
    if any((array < 0).any() for array in arrays.values()):
        raise ConfigError(f"{where}: links must not be negative")
    return Links(tuple(PeerId(peer) for peer in document.peers), **arrays)


def _encode_array(array: Floats) -> str:
    return base64.b64encode(zlib.compress(canonical_bytes(array), _ZLIB_LEVEL)).decode("ascii")


def _decode_array(text: str, size: int, name: str, where: str) -> Floats:
    """Array [size, size] in `text`; `ConfigError` if it holds fewer or more numbers.

    Never decompresses more than one byte beyond the expected size.
    """
    wanted = 8 * size * size
    complaint = f"{where}: {name} does not hold {size} x {size} numbers"
    if len(text) * _MAX_COMPRESSION_RATIO < wanted:
        raise ConfigError(complaint)
    try:
        packed = base64.b64decode(text, validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, max(1, wanted))
        # Excess data shows only when more is requested: one byte, so that a zip bomb stays small.
        more = unpacker.decompress(unpacker.unconsumed_tail, 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise ConfigError(f"{complaint}: {error}") from error
    if len(data) != wanted or more or not unpacker.eof or unpacker.unused_data:
        raise ConfigError(complaint)
    return np.frombuffer(data, dtype="<f8").astype(np.float64).reshape(size, size)


def _check_finite(node: NodeState) -> None:
    values: Iterable[float] = (
        node.prefill_tokens_per_s,
        node.decode_tokens_per_s,
        node.load,
        node.uptime_s,
        node.reliability,
        *(node.location or ()),
        *(() if node.roofline is None else astuple(node.roofline.figures)),
        *(() if node.roofline is None else astuple(node.roofline.work)),
    )
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"node {node.peer_id!r} has numbers that are not finite")
