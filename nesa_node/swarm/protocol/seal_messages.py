"""Seals: a node's signed statements about a session's hidden states, and what opens them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.p2p.identity import Identity, verify_signature
from nesa_node.swarm.protocol.messages import (
    MAX_ROWS,
    AdapterName,
    BlockRange,
    Computation,
    Count,
    Epoch,
    Message,
    PeerName,
    RowSlice,
    Slices,
)
from nesa_node.verification.evidence import SealedState
from nesa_node.verification.seal_tree import HASH_BYTES, RowRoots

EVIDENCE_PROTOCOL = "/nesa/evidence/1"
"""Streams on which openings of seals are sent to nodes that can check them, one each."""
SEALED_SINCE = (1, 7)
"""First protocol version with seals."""
MAX_STATEMENT_BYTES = 24 * 1024
_PREFIX = b"nesa-node seal 1\0"

Root = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class SealedRow(msgspec.Struct, frozen=True, array_like=True):
    """`RowRoots` of one row."""

    length: Count
    inputs: Root
    outputs: Root


class SealStatement(msgspec.Struct, frozen=True):
    """What a seal's signature is over, with the roots of all rows as they were at one time."""

    version: Literal[1]
    node: PeerName
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]
    epoch: Epoch
    number: Epoch
    """Rises by one from seal to seal of a session."""
    blocks: BlockRange
    computation: Computation
    rows: Annotated[tuple[SealedRow, ...], Meta(min_length=1, max_length=MAX_ROWS)]
    cuts: Epoch | None = None
    """How often the rows were cut or reordered before; None: the node's version does not count."""
    adapter: AdapterName = b""
    """Digest of the session's adapter; empty: none."""
    is_exact: bool = False
    """Whether all outputs are sealed as computed: no codec lost anything. False: unknown, too."""

    @property
    def state(self) -> SealedState:
        """What other seals of the session can contradict."""
        constants = self.node, self.session, self.blocks, self.computation
        rows = tuple(RowRoots(row.length, row.inputs, row.outputs) for row in self.rows)
        return SealedState(self.nonce, constants, self.number, self.epoch, self.cuts, rows)


class SealRequest(Message, frozen=True, tag="seal_request"):
    """Client to node: seal what the rows hold now."""


class Seal(Message, frozen=True, tag="seal"):
    """Node to client: a `SealStatement`, as MessagePack."""

    statement: Annotated[bytes, Meta(max_length=MAX_STATEMENT_BYTES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    requested: bool = False
    """Whether it answers `seal_request`."""


class Disclose(Message, frozen=True, tag="disclose"):
    """Client to node: send the outputs that were pushed for these positions."""

    rows: Slices


class Disclosed(Message, frozen=True, tag="disclosed"):
    """Node to client: some of these outputs [T, D]; the last message names no row."""

    rows: Annotated[tuple[RowSlice, ...], Meta(max_length=MAX_ROWS)]
    tensor: TensorMeta


class OpeningOffer(Message, frozen=True, kw_only=True, tag="opening_offer"):
    """Any peer to node: I have the values of a seal of `accused`, which are wrong."""

    model: Annotated[str, Meta(max_length=256)]
    membership: Annotated[bytes, Meta(max_length=64)] = b""
    """In a private swarm the proof that the sender knows its key (`adapter_proof`)."""
    accused: PeerName
    blocks: BlockRange


class OpeningWanted(Message, frozen=True, tag="opening_wanted"):
    """Node to peer: send them."""


class Opening(Message, frozen=True, kw_only=True, tag="opening"):
    """Any peer to node: a seal, the session's secret, and the values [T, D] of some rows: all of
    their inputs, then the outputs that went anywhere."""

    statement: Annotated[bytes, Meta(max_length=MAX_STATEMENT_BYTES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    inputs: Slices
    outputs: Slices
    tensor: TensorMeta


class OpeningTaken(Message, frozen=True, tag="opening_taken"):
    """Node to peer: it will be checked."""


def sign_seal(identity: Identity, statement: SealStatement, *, requested: bool = False) -> Seal:
    """Sign a statement about a session."""
    encoded = msgspec.msgpack.encode(statement)
    return Seal(statement=encoded, signature=identity.sign(_PREFIX + encoded), requested=requested)


def open_seal(seal: Seal, node: PeerId) -> SealStatement:
    """The statement that `node` signed. Raises `ProtocolError("bad_seal")`."""
    if not verify_signature(node, _PREFIX + seal.statement, seal.signature):
        raise ProtocolError("bad_seal", f"the signature is not that of {node}")
    try:
        statement = msgspec.msgpack.decode(seal.statement, type=SealStatement)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ProtocolError("bad_seal", "the statement is malformed") from None
    if statement.node != node:
        raise ProtocolError("bad_seal", f"the statement names {statement.node}, not {node}")
    return statement


def sealed_rows(roots: Sequence[RowRoots]) -> tuple[SealedRow, ...]:
    return tuple(SealedRow(each.length, each.inputs, each.outputs) for each in roots)
