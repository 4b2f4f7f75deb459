"""Quotes of Intel TDX and SGX, which `dcap_qvl` (Phala's library, MIT) verifies.

Layouts are those of "Intel SGX ECDSA QuoteLibReference DCAP API" (appendix A.4) and "Intel TDX DCAP
Quoting Library API" (A.3). The library ignores bytes that nothing signs: what follows the quote,
how certificates are written, lengths. They are fixed here, so that no bit of a quote is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from nesa_node.core.errors import AttestationError, ConfigError, is_installed
from nesa_node.verification.attestation.quotes import Collateral, Quote, QuoteKind, VerifiedQuote

MAX_QUOTE_BYTES = 32 * 1024
_HEADER_BYTES = 48
_BODY_BYTES = {3: 384, 4: 584}
"""Of the versions whose body has one length; in version 5 it is said."""
_SIGNATURE_BYTES = 64
_KEY_BYTES = 64
_ENCLAVE_REPORT_BYTES = 384
_CERTIFIED_BY_ENCLAVE, _CERTIFIED_BY_CHAIN = 6, 5
_MAX_PEM_BYTES = 16 * 1024


def verify_intel(quote: Quote, roots: Sequence[bytes], now: float) -> VerifiedQuote:
    """Check a TDX or SGX quote with its collateral. Raises `AttestationError`.

    `ConfigError` if `dcap_qvl` is not installed.
    """
    require_dcap()
    import dcap_qvl

    if quote.collateral is None:
        raise AttestationError("absent", f"the {quote.kind.upper()} quote came without collateral")
    if len(quote.report) > MAX_QUOTE_BYTES:
        raise AttestationError("malformed", f"a quote of {len(quote.report)} bytes is too long")
    _check_layout(quote.report, roots)
    for chain in (
        quote.collateral.tcb_info_issuer_chain,
        quote.collateral.qe_identity_issuer_chain,
    ):
        _check_pem(chain.encode(), roots)
    seconds = int(now)
    errors: list[str] = []
    for root in roots:
        try:
            claims = dcap_qvl.QuoteVerifier(root).verify_with_policy(
                quote.report,
                _collateral_of(quote.collateral),
                seconds,
                dcap_qvl.QuotePolicy.claims_only(seconds),
            )
            return _read_claims(json.loads(claims.to_json()), quote.kind, now)
        except ValueError as error:
            errors.append(str(error))
    raise AttestationError("signature", f"the quote does not hold: {'; '.join(errors)[:300]}")


def require_dcap() -> None:
    """Raises `ConfigError`, which says what to install, if quotes of Intel cannot be checked."""
    if not is_installed("dcap_qvl"):
        raise ConfigError(
            "quotes of Intel TDX and SGX need dcap-qvl: pip install 'nesa-node[attestation]', "
            "or '.[attestation]' in a clone"
        )


def _collateral_of(collateral: Collateral) -> Any:
    import dcap_qvl

    return dcap_qvl.QuoteCollateralV3(
        pck_crl_issuer_chain="",  # not read
        root_ca_crl=collateral.root_ca_crl,
        pck_crl=collateral.pck_crl,
        tcb_info_issuer_chain=collateral.tcb_info_issuer_chain,
        tcb_info=collateral.tcb_info,
        tcb_info_signature=collateral.tcb_info_signature,
        qe_identity_issuer_chain=collateral.qe_identity_issuer_chain,
        qe_identity=collateral.qe_identity,
        qe_identity_signature=collateral.qe_identity_signature,
    )


def _read_claims(claims: dict[str, Any], kind: QuoteKind, now: float) -> VerifiedQuote:
    ((body, report),) = claims["report"].items()
    if (body == "SgxEnclave") != (kind == "sgx"):
        raise AttestationError("malformed", f"the quote is not one of {kind.upper()}")
    since, until = claims["latest_issue_date"], claims["earliest_expiration_date"]
    if not since <= now <= until:
        raise AttestationError("expired", "certificates or collateral are not valid at this time")
    while "base" in report:
        report = report | report.pop("base")
    data = bytes.fromhex(report.pop("report_data"))
    measurements = {name: str(value) for name, value in report.items() if name[:8] != "reserved"}
    return VerifiedQuote(kind, measurements, data, claims["tcb"]["status"], until)


def _check_layout(report: bytes, roots: Sequence[bytes]) -> None:
    """Check what no signature covers: lengths, types, how certificates are written, the end."""
    reader = _Reader(report)
    version = int.from_bytes(reader.take(_HEADER_BYTES)[:2], "little")
    if version == 5:
        reader.take(2)
    reader.take(reader.number(4) if version == 5 else _BODY_BYTES.get(version, 0))
    signed = _Reader(reader.take(reader.number(4)))
    if any(reader.rest()):
        raise AttestationError("malformed", "bytes after the quote are not zero")
    signed.take(_SIGNATURE_BYTES + _KEY_BYTES)
    if version > 3:
        if signed.number(2) != _CERTIFIED_BY_ENCLAVE:
            raise AttestationError("malformed", "the quote is not certified by a quoting enclave")
        inner = _Reader(signed.take(signed.number(4)))
        if signed.rest():
            raise AttestationError("malformed", "lengths in the quote contradict each other")
        signed = inner
    signed.take(_ENCLAVE_REPORT_BYTES + _SIGNATURE_BYTES)
    signed.take(signed.number(2))
    if signed.number(2) != _CERTIFIED_BY_CHAIN:
        raise AttestationError("malformed", "the quote does not contain its certificates")
    chain = signed.take(signed.number(4))
    if signed.rest():
        raise AttestationError("malformed", "lengths in the quote contradict each other")
    _check_pem(chain.removesuffix(b"\0"), roots)


def _check_pem(chain: bytes, roots: Sequence[bytes]) -> None:
    """Check that a chain is written in the one way, and ends with a root."""
    try:
        if len(chain) > _MAX_PEM_BYTES or not re.match(rb"-----BEGIN CERTIFICATE-----\n", chain):
            raise ValueError
        certificates = x509.load_pem_x509_certificates(chain)
        written = b"".join(each.public_bytes(Encoding.PEM) for each in certificates)
        root = certificates[-1].public_bytes(Encoding.DER)
    except (ValueError, x509.InvalidVersion):
        raise AttestationError("certificate", "certificates of the quote are malformed") from None
    if chain not in (written, written.removesuffix(b"\n")):
        raise AttestationError("certificate", "certificates of the quote are not written as PEM")
    if root not in roots:
        raise AttestationError(
            "certificate", "the quote's certificates do not end with a root that is trusted here"
        )


class _Reader:
    """Reads bytes in order. Raises `AttestationError` where they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise AttestationError("malformed", "the quote is cut short")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def rest(self) -> bytes:
        return self._data[self._at :]
