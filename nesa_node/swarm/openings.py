"""Openings of seals: what a node sealed, for nodes with the same weights to compute again.

An opening shows hidden states, so that it goes to a few nodes which ask for it, and to no key of
the DHT. Whatever an accuser could choose and no seal is over has to be in the seal: a session with
an adapter, or with outputs that lost something, convicts no node.

T packed tokens, L tokens of a row, P positions of it whose outputs are known, D hidden.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from nesa_node.compression import tensors
from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.core.errors import NesaError, ProtocolError, RemoteError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import adapter_proof
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.messages import Busy, ErrorMessage, Message, RowSlice
from nesa_node.swarm.protocol.seal_messages import (
    EVIDENCE_PROTOCOL,
    Opening,
    OpeningOffer,
    OpeningTaken,
    OpeningWanted,
    Seal,
    SealStatement,
    open_seal,
    sealed_rows,
)
from nesa_node.swarm.protocol.stream import Stream
from nesa_node.verification.seal_tree import SessionSeals

log = get_logger(__name__)

MAX_OPENING_BYTES = 32 << 20
"""Values of an opening."""
MAX_CHECKERS = 3
"""Nodes that get an opening, and see its hidden states."""
_MAX_ASKED = 16
_SEND_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class OpenedRow:
    """What a node sealed of one row: all inputs, and the outputs that went anywhere."""

    row: int
    inputs_LD: torch.Tensor
    positions: tuple[int, ...]
    outputs_PD: torch.Tensor


def make_opening(seal: Seal, secret: bytes, rows: Sequence[OpenedRow]) -> tuple[Opening, bytes]:
    """The message and its tensor's bytes. The caller has checked that the seal is of these rows."""
    values_TD = torch.cat([*(row.inputs_LD for row in rows), *(row.outputs_PD for row in rows)])
    meta, payload = tensors.encode(values_TD.contiguous())
    opening = Opening(
        statement=seal.statement,
        signature=seal.signature,
        secret=secret,
        inputs=tuple(RowSlice(row.row, 0, len(row.inputs_LD)) for row in rows),
        outputs=tuple(itertools.chain.from_iterable(map(_output_slices, rows))),
        tensor=meta,
    )
    return opening, bytes(payload)


def read_opening(
    opening: Opening, payload: bytes | bytearray, accused: PeerId, hidden_size: int
) -> tuple[SealStatement, list[OpenedRow]]:
    """What `accused` sealed, and the values that its seal is of.

    Raises `ProtocolError`: "bad_seal"; "bad_opening" for values of another shape, dtype or rows
    than are sealed; "not_opened" for other values; "not_checkable" where an honest node may have
    sealed them: with an adapter, outputs that lost something, or inputs that it did not see. Blocks
    the thread.
    """
    stated = open_seal(Seal(statement=opening.statement, signature=opening.signature), accused)
    if stated.adapter or not stated.is_exact:
        raise ProtocolError("not_checkable", "the seal does not say what its outputs are of")
    rows = _split(opening, payload, stated, hidden_size)
    seals = SessionSeals(opening.secret, len(stated.rows))
    for row in rows:
        if len(row.inputs_LD) != stated.rows[row.row].length:
            raise ProtocolError("not_checkable", f"not all inputs of row {row.row} are opened")
        _add(seals.add_inputs, row.row, range(len(row.inputs_LD)), row.inputs_LD)
        _add(seals.add_outputs, row.row, row.positions, row.outputs_PD)
    made = sealed_rows(seals.roots())
    for row in rows:
        if made[row.row] != stated.rows[row.row]:
            raise ProtocolError("not_opened", f"the seal is of other values in row {row.row}")
    return stated, rows


def _split(
    opening: Opening, payload: bytes | bytearray, stated: SealStatement, hidden_size: int
) -> list[OpenedRow]:
    meta, parts = opening.tensor, (*opening.inputs, *opening.outputs)
    shape = sum(part.count for part in parts), hidden_size
    declared = meta.codec, meta.dtype, meta.shape
    if declared != (UNCOMPRESSED, stated.computation.dtype, shape):
        raise ProtocolError("bad_opening", f"the values are {declared}, not {shape} as sealed")
    values_TD = tensors.decode(meta, payload, max_bytes=MAX_OPENING_BYTES)
    if not values_TD.isfinite().all():
        raise ProtocolError("bad_opening", "values that are not finite")
    pieces = list(zip(parts, torch.split(values_TD, [part.count for part in parts]), strict=True))
    rows = []
    for part, inputs_LD in pieces[: len(opening.inputs)]:
        own = [piece for piece in pieces[len(opening.inputs) :] if piece[0].row == part.row]
        positions = tuple(
            itertools.chain.from_iterable(
                range(piece.position, piece.position + piece.count) for piece, _ in own
            )
        )
        is_ordered = all(one < other for one, other in itertools.pairwise(positions))
        is_within = bool(positions) and is_ordered and positions[-1] < part.count
        if part.position or not is_within or part.row >= len(stated.rows):
            raise ProtocolError("bad_opening", f"row {part.row} has no such positions")
        outputs_PD = torch.cat([values for _, values in own])
        rows.append(OpenedRow(part.row, inputs_LD, positions, outputs_PD))
    numbers = {row.row for row in rows}
    if len(numbers) < len(rows) or not numbers.issuperset(part.row for part in opening.outputs):
        raise ProtocolError("bad_opening", "its rows are repeated, or have outputs only")
    return rows


def _output_slices(row: OpenedRow) -> Iterable[RowSlice]:
    start = 0
    for end in range(1, len(row.positions) + 1):
        if end == len(row.positions) or row.positions[end] != row.positions[end - 1] + 1:
            yield RowSlice(row.row, row.positions[start], end - start)
            start = end


def _add(
    add: Callable[[int, int, bytes | memoryview, int], None],
    row: int,
    positions: Sequence[int],
    values_PD: torch.Tensor,
) -> None:
    for position, values_D in zip(positions, values_PD, strict=True):
        _, values = tensors.encode(values_D[None].contiguous())
        add(row, position, memoryview(values).cast("B"), 1)


class OpeningSender:
    """Sends openings of one model's sessions to random nodes that serve the accused blocks."""

    def __init__(self, swarm: Swarm, model_id: ModelId, num_blocks: int) -> None:
        self._swarm = swarm
        self._model_id = model_id
        self._num_blocks = num_blocks

    async def send(
        self, accused: PeerId, span: Span, seal: Seal, secret: bytes, rows: Sequence[OpenedRow]
    ) -> None:
        """Send what `accused` sealed of blocks `span`. What fails is logged."""
        opening, payload = await asyncio.to_thread(make_opening, seal, secret, rows)
        if len(payload) > MAX_OPENING_BYTES:
            log.info("opening_not_sent", peer=accused, reason=f"{len(payload):,} bytes")
            return
        snapshot = self._swarm.directory.snapshot(self._model_id, self._num_blocks)
        holders = {
            node.peer_id: node.addresses
            for node in snapshot.nodes
            if node.span.covers(span) and node.peer_id != accused
        }
        blocks = span.start, span.end
        offer = OpeningOffer(model=self._model_id, accused=accused, blocks=blocks)
        taken = 0
        for peer in random.SystemRandom().sample(sorted(holders), min(_MAX_ASKED, len(holders))):
            try:
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    await self._send_to(peer, holders[peer], offer, opening, payload)
            except (NesaError, OSError, TimeoutError) as error:
                log.info("opening_not_taken", peer=peer, reason=str(error))
            else:
                log.info("opening_sent", peer=peer, accused=accused)
                taken += 1
            if taken == MAX_CHECKERS:
                return

    async def _send_to(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        offer: OpeningOffer,
        opening: Opening,
        payload: bytes,
    ) -> None:
        transport = self._swarm.transport
        proof = adapter_proof(self._swarm.notices.membership, transport.peer_id, peer)
        stream = Stream(peer, *await transport.open_stream(peer, EVIDENCE_PROTOCOL, addresses))
        try:
            await stream.send(msgspec.structs.replace(offer, membership=proof))
            _expect(OpeningWanted, (await stream.receive())[0])
            await stream.send(opening, payload)
            _expect(OpeningTaken, (await stream.receive())[0])
        finally:
            await stream.close()


def _expect(kind: type[Message], answer: AnyMessage) -> None:
    if isinstance(answer, Busy):
        raise RemoteError("busy", answer.message)
    if isinstance(answer, ErrorMessage):
        raise RemoteError(answer.code, answer.message)
    if not isinstance(answer, kind):
        raise RemoteError("unexpected", f"it answered with {type(answer).__name__}")
