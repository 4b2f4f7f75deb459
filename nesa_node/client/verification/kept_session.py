"""Files of sessions whose audited hops can be audited again: their work, with seals and secrets.

One safetensors file for a session. The hidden states in it tell the session's text, so only the
user may read it. A digest finds damage; edits, also of the digest, are found by the nodes'
signatures, which nothing in the file can replace.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load, save

from nesa_node.client.verification.session_audit import HopWork, RowWork, SealedWith
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.swarm.protocol.messages import MAX_ROWS, BlockRange, Computation, Count, PeerName
from nesa_node.swarm.protocol.seal_messages import Seal

SUFFIX = ".safetensors"
FORMAT = "nesa-node session"
VERSION: Literal[1] = 1
MAX_FILE_BYTES = 16 << 30
_PARTS = ("prefix", "inputs", "outputs")


class KeptSessionError(ConfigError):
    """A file that is no kept session, is damaged, or is of another version."""


class _KeptRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    row: Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
    positions: tuple[Count, ...]


class _KeptHop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: PeerName
    blocks: BlockRange
    first_block: Count
    computation: Computation
    codec: Annotated[str, Meta(max_length=64)]
    is_own: bool
    drawn_with: Annotated[float, Meta(ge=0, le=1)]
    statement: bytes
    signature: bytes
    secret: bytes
    start_lengths: Annotated[tuple[Count, ...], Meta(max_length=MAX_ROWS)]
    rows: Annotated[tuple[_KeptRow, ...], Meta(min_length=1, max_length=MAX_ROWS)]
    adapter: Annotated[bytes, Meta(max_length=64)] = b""


class _KeptHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    session: bytes
    model: str
    model_id: str
    kept_at: float
    hops: Annotated[tuple[_KeptHop, ...], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class KeptSession:
    """Work of a session's audited hops, each with the chance with which it was drawn."""

    session: bytes
    """The session's id at the client."""
    model: str
    model_id: ModelId
    kept_at: float
    hops: Sequence[tuple[HopWork, float]]

    def check_fits(self, hidden_size: int, num_blocks: int) -> None:
        """Raise `KeptSessionError` for work that is not of such a model."""
        for work, _ in self.hops:
            sizes = {
                values.shape[1]
                for row in work.rows
                for values in (row.prefix_LD, row.inputs_LD, row.outputs_PD)
            }
            is_within = work.first_block <= work.span.start and work.span.end <= num_blocks
            if sizes != {hidden_size} or not is_within:
                raise KeptSessionError(
                    f"the session is of another model: blocks {work.span} with hidden states of "
                    f"{sorted(sizes)}, not {num_blocks} blocks with {hidden_size}"
                )


def is_kept_session(path: Path) -> bool:
    """Whether the file is named as kept sessions are."""
    return path.suffix == SUFFIX


def write_session(folder: Path, kept: KeptSession) -> Path:
    """Write a session to a new file in `folder`, which is created. Raises `OSError`."""
    tensors: dict[str, torch.Tensor] = {}
    for number, (work, _) in enumerate(kept.hops):
        for row in work.rows:
            for part, values in zip(
                _PARTS, (row.prefix_LD, row.inputs_LD, row.outputs_PD), strict=True
            ):
                tensors[f"{number}.{row.row}.{part}"] = values.contiguous().clone()
    header = msgspec.json.encode(
        _KeptHeader(
            version=VERSION,
            session=kept.session,
            model=kept.model,
            model_id=kept.model_id,
            kept_at=kept.kept_at,
            hops=tuple(_kept_hop(work, drawn_with) for work, drawn_with in kept.hops),
        )
    ).decode()
    metadata = {"format": FORMAT, "header": header, "digest": _digest(header, tensors)}
    return _write_private(folder / f"{kept.session.hex()}{SUFFIX}", save(tensors, metadata))


def _kept_hop(work: HopWork, drawn_with: float) -> _KeptHop:
    assert work.sealed is not None
    return _KeptHop(
        peer=work.peer,
        blocks=(work.span.start, work.span.end),
        first_block=work.first_block,
        computation=work.computation,
        codec=work.codec,
        is_own=work.is_own,
        adapter=work.adapter,
        drawn_with=drawn_with,
        statement=work.sealed.seal.statement,
        signature=work.sealed.seal.signature,
        secret=work.sealed.secret,
        start_lengths=work.sealed.start_lengths,
        rows=tuple(_KeptRow(row.row, row.positions) for row in work.rows),
    )


def _write_private(path: Path, data: bytes) -> Path:
    """Write a file at once, which only the user may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def read_session(path: Path) -> KeptSession:
    """Read a kept session. Raises `KeptSessionError`; seals are not checked here."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise KeptSessionError(f"{path} has more than {MAX_FILE_BYTES:,} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise KeptSessionError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        tensors, metadata = load(data), _read_metadata(data)
    except (SafetensorError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeptSessionError(f"{path} is no kept session: {error}") from None
    if metadata.get("format") != FORMAT:
        raise KeptSessionError(f"{path} is no kept session")
    header = metadata.get("header", "")
    if metadata.get("digest") != _digest(header, tensors):
        raise KeptSessionError(f"{path} is damaged: its digest differs")
    try:
        found = msgspec.json.decode(header, type=_KeptHeader)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise KeptSessionError(f"{path} is of another version, or edited: {error}") from None
    try:
        hops = [
            (_read_hop(number, hop, found, tensors), hop.drawn_with)
            for number, hop in enumerate(found.hops)
        ]
    except (KeyError, ValueError) as error:
        raise KeptSessionError(f"{path} is edited: {error}") from None
    return KeptSession(found.session, found.model, ModelId(found.model_id), found.kept_at, hops)


def _read_metadata(data: bytes) -> dict[str, str]:
    """Metadata of a safetensors file that `load` has accepted."""
    size = int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, msgspec.Raw])
    return msgspec.json.decode(header.get("__metadata__", b"{}"), type=dict[str, str])


def _read_hop(
    number: int, hop: _KeptHop, header: _KeptHeader, tensors: dict[str, torch.Tensor]
) -> HopWork:
    """Raises `KeyError` and `ValueError` for tensors that do not fit."""
    rows = tuple(_read_row(number, row, tensors) for row in hop.rows)
    return HopWork(
        peer=PeerId(hop.peer),
        span=Span(*hop.blocks),
        session=header.session,
        first_block=hop.first_block,
        computation=hop.computation,
        codec=hop.codec,
        rows=rows,
        is_own=hop.is_own,
        adapter=hop.adapter,
        sealed=SealedWith(
            Seal(statement=hop.statement, signature=hop.signature), hop.secret, hop.start_lengths
        ),
    )


def _read_row(number: int, row: _KeptRow, tensors: dict[str, torch.Tensor]) -> RowWork:
    prefix_LD, inputs_LD, outputs_PD = (tensors[f"{number}.{row.row}.{part}"] for part in _PARTS)
    length = len(prefix_LD) + len(inputs_LD)
    parts = prefix_LD, inputs_LD, outputs_PD
    if {each.ndim for each in parts} != {2} or not all(each.is_floating_point() for each in parts):
        raise ValueError("its tensors are no hidden states")
    if len(row.positions) != len(outputs_PD) or not all(at < length for at in row.positions):
        raise ValueError("its positions do not fit its tensors")
    return RowWork(prefix_LD, inputs_LD, row.positions, outputs_PD, row.row)


def _digest(header: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        values = tensors[name]
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
