"""Quotes: hardware's signed statements about the software that runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

QuoteKind = Literal["tdx", "sgx", "snp", "nvidia"]
"""Intel TDX and SGX, AMD SEV-SNP, NVIDIA Hopper GPUs."""

GENUINE = "Genuine"
"""Status of an AMD or NVIDIA report that holds: these vendors publish no further status."""
DEBUG = "Debug"
"""Status of an AMD guest whose memory its host may read."""


@dataclass(frozen=True, slots=True)
class Collateral:
    """What Intel publishes about a platform, to judge its quotes by: signed, with an end date."""

    root_ca_crl: bytes
    pck_crl: bytes
    tcb_info_issuer_chain: str
    """Certificates as PEM, as in `qe_identity_issuer_chain`."""
    tcb_info: str
    """JSON, as in `qe_identity`."""
    tcb_info_signature: bytes
    qe_identity_issuer_chain: str
    qe_identity: str
    qe_identity_signature: bytes


@dataclass(frozen=True, slots=True)
class Quote:
    """A quote as hardware gave it, with what its check needs."""

    kind: QuoteKind
    report: bytes
    certificates: tuple[bytes, ...] = ()
    """As DER, the signer's first; the vendor's root may be the last. Intel's are in the report."""
    collateral: Collateral | None = None
    """Of Intel's kinds only."""


@dataclass(frozen=True, slots=True)
class VerifiedQuote:
    """What genuine hardware says, at the time of the check."""

    kind: QuoteKind
    measurements: Mapping[str, str]
    """By the vendor's name of the field: digests in lower-case hexadecimal, versions as text."""
    report_data: bytes
    """What the software had the hardware sign: 64 bytes, of NVIDIA's GPUs 32."""
    status: str
    valid_until: float
    """Unix time at which a certificate or the collateral expires."""
