"""Attestation reports of AMD SEV-SNP guests.

Layout and checks are those of "SEV Secure Nested Paging Firmware ABI Specification" (AMD 56860,
table ATTESTATION_REPORT) and "Versioned Chip Endorsement Key Certificate and KDS Interface"
(AMD 57230). A report is signed by a key of the chip (VCEK), or of a cloud's loaded key (VLEK),
whose certificate names the firmware versions that it was derived from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from cryptography import x509

from nesa_node.core.errors import AttestationError
from nesa_node.verification.attestation.certificates import check_chain, check_p384
from nesa_node.verification.attestation.quotes import DEBUG, GENUINE, Quote, VerifiedQuote

FirmwarePart = Literal["fmc", "bootloader", "tee", "snp", "microcode"]

REPORT_BYTES = 0x4A0
_SIGNED_BYTES = 0x2A0
_NUMBER_BYTES = 72
"""Length of a little-endian number of the signature, whose last 24 bytes are zero."""
_VERSIONS = range(2, 6)
_ECDSA_P384 = 1
_VLEK_SIGNED = 1
_DEBUG_BIT = 1 << 19
_MIGRATION_BIT = 1 << 18

_AMD = "1.3.6.1.4.1.3704.1"
_PRODUCT, _CHIP_ID, _CLOUD = f"{_AMD}.2", f"{_AMD}.4", f"{_AMD}.5"
_TCB_OIDS: dict[FirmwarePart, str] = {
    "bootloader": f"{_AMD}.3.1",
    "tee": f"{_AMD}.3.2",
    "snp": f"{_AMD}.3.3",
    "microcode": f"{_AMD}.3.8",
    "fmc": f"{_AMD}.3.9",
}
_TCB_LAYOUTS: dict[str, dict[FirmwarePart, int]] = {
    "Milan": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Genoa": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Turin": {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7},
}
"""Where the version of each part of the firmware lies in the 8 bytes of a TCB_VERSION."""

_MEASUREMENTS = {
    "family_id": (0x10, 16),
    "image_id": (0x20, 16),
    "measurement": (0x90, 48),
    "host_data": (0xC0, 32),
    "id_key_digest": (0xE0, 48),
    "author_key_digest": (0x110, 48),
}


def verify_snp(
    quote: Quote, roots: Sequence[bytes], now: float, minimum: Mapping[FirmwarePart, int]
) -> VerifiedQuote:
    """Check a SEV-SNP report and its certificates; `minimum` has lowest firmware versions.

    Raises `AttestationError`.
    """
    report = quote.report
    if len(report) != REPORT_BYTES:
        raise AttestationError(
            "malformed", f"a SEV-SNP report has {REPORT_BYTES} bytes, this one {len(report)}"
        )
    version, algorithm, signer = (_number(report, at, 4) for at in (0, 0x34, 0x48))
    if version not in _VERSIONS or algorithm != _ECDSA_P384:
        raise AttestationError(
            "malformed",
            f"version {version} or signature algorithm {algorithm} of a SEV-SNP report is unknown",
        )
    certificate, valid_until = check_chain(quote.certificates, roots, now)
    _check_signature(report, certificate)
    is_vlek = signer >> 2 & 7 == _VLEK_SIGNED
    if signer >> 2 & 7 > _VLEK_SIGNED:
        raise AttestationError("signature", "the report says that no known key signed it")
    tcb = _check_key(report, certificate, is_vlek=is_vlek)
    low = sorted(part for part, least in minimum.items() if tcb.get(part, -1) < least)
    if low:
        raise AttestationError(
            "status",
            "firmware is older than the policy allows: "
            + ", ".join(f"{part} {tcb.get(part, 'unknown')} of {minimum[part]}" for part in low),
        )
    policy = _number(report, 8, 8)
    measurements = {
        name: report[at : at + size].hex() for name, (at, size) in _MEASUREMENTS.items()
    }
    measurements |= {
        "policy": f"{policy:#x}",
        "guest_svn": str(_number(report, 4, 4)),
        "vmpl": str(_number(report, 0x30, 4)),
        "migration_agent": "yes" if policy & _MIGRATION_BIT else "no",
    }
    status = DEBUG if policy & _DEBUG_BIT else GENUINE
    return VerifiedQuote("snp", measurements, report[0x50:0x90], status, valid_until)


def _check_signature(report: bytes, certificate: x509.Certificate) -> None:
    r, s = (_number(report, _SIGNED_BYTES + at, _NUMBER_BYTES) for at in (0, _NUMBER_BYTES))
    if any(report[_SIGNED_BYTES + 2 * _NUMBER_BYTES :]):
        raise AttestationError("malformed", "bytes after the signature of the report are not zero")
    if max(r, s) >> 384:
        raise AttestationError("signature", "the report's signature is none on P-384")
    check_p384(certificate, report[:_SIGNED_BYTES], r, s, "the SEV-SNP report")


def _check_key(
    report: bytes, certificate: x509.Certificate, *, is_vlek: bool
) -> dict[FirmwarePart, int]:
    """Check that the certified key is this chip's at this firmware; return firmware versions."""
    extensions = {
        each.oid.dotted_string: each.value.value
        for each in certificate.extensions
        if isinstance(each.value, x509.UnrecognizedExtension)
    }
    product = extensions.get(_PRODUCT, b"")[2:].decode("ascii", "replace")
    layout = _TCB_LAYOUTS.get(product.split("-")[0])
    if layout is None:
        raise AttestationError(
            "certificate", f"the certificate is of no known processor ({product[:32]!r})"
        )
    tcb = {part: report[0x180 + at] for part, at in layout.items()}
    certified = {part: _integer(extensions.get(_TCB_OIDS[part], b"")) for part in layout}
    if tcb != certified:
        raise AttestationError(
            "certificate", f"the report is of firmware {tcb}, its certificate of {certified}"
        )
    chip_id = extensions.get(_CHIP_ID, b"")
    if is_vlek:
        if chip_id or _CLOUD not in extensions:
            raise AttestationError("certificate", "a VLEK signed the report, this is none")
    elif not chip_id or not report[0x1A0:0x1E0].startswith(chip_id):
        raise AttestationError("certificate", "the certificate is of another chip than the report")
    return tcb


def _integer(encoded: bytes) -> int | None:
    """A small ASN.1 INTEGER; None if it is none."""
    if len(encoded) < 3 or encoded[0] != 2 or encoded[1] != len(encoded) - 2:
        return None
    return int.from_bytes(encoded[2:], "big", signed=True)


def _number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
