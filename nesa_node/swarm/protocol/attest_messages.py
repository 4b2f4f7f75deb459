"""Messages of streams on which nodes attest their hardware (`docs/protocol.md`)."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec
from msgspec import Meta

from nesa_node.swarm.protocol.messages import BlockRange, Message
from nesa_node.verification.attestation.binding import NONCE_BYTES
from nesa_node.verification.attestation.quotes import Collateral, Quote, QuoteKind
from nesa_node.verification.seal_tree import HASH_BYTES

ATTEST_PROTOCOL = "/nesa/attest/1"
"""Streams on which a node is asked for quotes, one request each."""
MAX_QUOTES = 4
MAX_QUOTE_CERTIFICATES = 8

Crl = Annotated[bytes, Meta(max_length=8 * 1024)]
Pem = Annotated[str, Meta(max_length=8 * 1024)]
SignedJson = Annotated[str, Meta(max_length=32 * 1024)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]


class CollateralPart(msgspec.Struct, frozen=True):
    """`Collateral` within a message."""

    root_ca_crl: Crl
    pck_crl: Crl
    tcb_info_issuer_chain: Pem
    tcb_info: SignedJson
    tcb_info_signature: Signature
    qe_identity_issuer_chain: Pem
    qe_identity: SignedJson
    qe_identity_signature: Signature


class QuotePart(msgspec.Struct, frozen=True):
    """`Quote` within a message."""

    kind: QuoteKind
    report: Annotated[bytes, Meta(max_length=32 * 1024)]
    certificates: Annotated[
        tuple[Annotated[bytes, Meta(max_length=4096)], ...],
        Meta(max_length=MAX_QUOTE_CERTIFICATES),
    ] = ()
    collateral: CollateralPart | None = None

    @classmethod
    def of(cls, quote: Quote) -> Self:
        collateral = None
        if (given := quote.collateral) is not None:
            names = CollateralPart.__struct_fields__
            collateral = CollateralPart(**{name: getattr(given, name) for name in names})
        return cls(quote.kind, quote.report, quote.certificates, collateral)

    def to_quote(self) -> Quote:
        collateral = None
        if self.collateral is not None:
            collateral = Collateral(**msgspec.structs.asdict(self.collateral))
        return Quote(self.kind, self.report, self.certificates, collateral)


Quotes = Annotated[tuple[QuotePart, ...], Meta(min_length=1, max_length=MAX_QUOTES)]


class Attest(Message, frozen=True, kw_only=True, tag="attest"):
    """Any peer to node: have the hardware sign this nonce."""

    model: Annotated[str, Meta(max_length=256)]
    membership: Annotated[bytes, Meta(max_length=64)] = b""
    """In a private swarm the proof that the sender knows its key (`adapter_proof`)."""
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Attested(Message, frozen=True, kw_only=True, tag="attested"):
    """Node to peer: quotes over `report_data` of its key, the nonce and `weights_root`."""

    blocks: BlockRange
    """The blocks that the node holds, whose tensors `weights_root` is of."""
    weights_root: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    quotes: Quotes
