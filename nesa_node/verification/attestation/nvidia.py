"""Attestation reports of NVIDIA Hopper GPUs: SPDM 1.1 measurements (DMTF DSP0274).

A report is the request with the verifier's nonce (37 bytes), the response, and a signature over
both. Opaque data has fields of NVIDIA's own, named as in its verifier. The vendor's reference
values are not fetched: measurements are compared with the operator's list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cryptography import x509
from cryptography.x509.oid import NameOID

from nesa_node.core.errors import AttestationError
from nesa_node.verification.attestation.certificates import P384_BYTES, check_chain, check_p384
from nesa_node.verification.attestation.quotes import GENUINE, Quote, VerifiedQuote

MAX_REPORT_BYTES = 16 * 1024
_REQUEST_BYTES = 37
_NONCE_BYTES = 32
_SIGNATURE_BYTES = 2 * P384_BYTES
_GET_MEASUREMENTS = bytes((0x11, 0xE0))
_MEASUREMENTS = bytes((0x11, 0x60))
_DMTF = 1
_HOPPER = "GH100"
_FIRMWARE_OID = "2.23.133.5.4.1"
_FIRMWARE_ID = 20
_TEXT_FIELDS = {3: "driver_version", 18: "project_sku", 17: "project", 15: "chip_sku"}
_HEX_FIELDS = {6: "vbios_version", _FIRMWARE_ID: "firmware_id"}


def verify_nvidia(quote: Quote, roots: Sequence[bytes], now: float) -> VerifiedQuote:
    """Check a Hopper GPU's report and its certificates.

    `measurements` has one entry for each block of the report, by its number, and fields of the
    opaque data. Raises `AttestationError`.
    """
    report = quote.report
    if len(report) > MAX_REPORT_BYTES:
        raise AttestationError("malformed", f"a GPU's report of {len(report)} bytes is too long")
    request, response = report[:_REQUEST_BYTES], report[_REQUEST_BYTES:]
    if not request.startswith(_GET_MEASUREMENTS) or not response.startswith(_MEASUREMENTS):
        raise AttestationError("malformed", "the GPU's report is no answer of SPDM 1.1")
    certificate, valid_until = check_chain(quote.certificates, roots, now)
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1 or not str(names[0].value).startswith(f"{_HOPPER} "):
        raise AttestationError("certificate", "the certificate is not that of a Hopper GPU")
    signature = report[-_SIGNATURE_BYTES:]
    check_p384(
        certificate,
        report[:-_SIGNATURE_BYTES],
        int.from_bytes(signature[:P384_BYTES], "big"),
        int.from_bytes(signature[P384_BYTES:], "big"),
        "the GPU's report",
    )
    try:
        measurements = _read_response(response[:-_SIGNATURE_BYTES])
    except (IndexError, UnicodeDecodeError):
        raise AttestationError("malformed", "the GPU's report is cut short") from None
    if measurements.get("firmware_id") != _certified_firmware(certificate):
        raise AttestationError(
            "certificate", "the certificate is of other firmware than the GPU's report"
        )
    nonce = request[4 : 4 + _NONCE_BYTES]
    return VerifiedQuote("nvidia", measurements, nonce, GENUINE, valid_until)


def _read_response(response: bytes) -> dict[str, str]:
    """Measurements and known opaque fields. Raises `IndexError`, `UnicodeDecodeError`."""
    blocks, length = response[4], int.from_bytes(_take(response, 5, 3), "little")
    record = _take(response, 8, length)
    found: dict[str, str] = {}
    at = 0
    for _ in range(blocks):
        size = int.from_bytes(_take(record, at + 2, 2), "little")
        block = _take(record, at + 4, size)
        if record[at + 1] != _DMTF or int.from_bytes(block[1:3], "little") != size - 3:
            raise AttestationError("malformed", "a measurement of the GPU is not DMTF's")
        found[str(record[at])] = block[3:].hex()
        at += 4 + size
    opaque_at = 8 + length + _NONCE_BYTES
    size = int.from_bytes(_take(response, opaque_at, 2), "little")
    opaque = _take(response, opaque_at + 2, size)
    if at != length or len(found) != blocks or len(response) != opaque_at + 2 + size:
        raise AttestationError("malformed", "lengths in the GPU's report contradict each other")
    for number, value in _opaque_fields(opaque):
        if number in _TEXT_FIELDS:
            found[_TEXT_FIELDS[number]] = value.rstrip(b"\0").decode("ascii")
        elif number in _HEX_FIELDS:
            found[_HEX_FIELDS[number]] = value.hex()
    return found


def _opaque_fields(opaque: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(opaque):
        number = int.from_bytes(_take(opaque, at, 2), "little")
        size = int.from_bytes(_take(opaque, at + 2, 2), "little")
        yield number, _take(opaque, at + 4, size)
        at += 4 + size


def _certified_firmware(certificate: x509.Certificate) -> str | None:
    """Digest of the firmware that the certificate is for, of TCG's DICE extension (its end)."""
    for each in certificate.extensions:
        if each.oid.dotted_string == _FIRMWARE_OID and isinstance(
            each.value, x509.UnrecognizedExtension
        ):
            return each.value.value[-48:].hex()
    return None


def _take(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise IndexError
    return data[at : at + size]
