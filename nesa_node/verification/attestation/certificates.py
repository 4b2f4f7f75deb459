"""Certificate chains of hardware vendors, up to one of the given roots."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding

from nesa_node.core.errors import AttestationError

MAX_CERTIFICATES = 8
P384_BYTES = 48
"""Length of a number of an ECDSA signature on P-384."""


def read_roots(pem: bytes) -> tuple[bytes, ...]:
    """Certificates of a PEM file as DER. Raises `ValueError`."""
    try:
        return tuple(
            each.public_bytes(Encoding.DER) for each in x509.load_pem_x509_certificates(pem)
        )
    except x509.InvalidVersion as error:
        raise ValueError(str(error)) from None


def check_chain(
    certificates: Sequence[bytes], roots: Sequence[bytes], now: float
) -> tuple[x509.Certificate, float]:
    """The first of `certificates`, which a chain leads to from a root, and when the chain expires.

    Each is signed by the next one, the last by one of `roots` (it may be that root itself); each
    was valid at `now` (Unix time), and all but the first may sign certificates. Revocation lists
    are not asked. Raises `AttestationError`.
    """
    if not 1 <= len(certificates) <= MAX_CERTIFICATES:
        raise AttestationError(
            "certificate",
            f"{len(certificates)} certificates came with the report; 1 to {MAX_CERTIFICATES} can",
        )
    chain = [_parse(each) for each in certificates]
    if certificates[-1] not in roots:
        chain.append(_find_root(chain[-1], roots))
    for certificate in chain:
        _check_validity(certificate, now)
    for depth, (certificate, issuer) in enumerate(pairwise(chain)):
        _check_issued(certificate, issuer, depth)
    return chain[0], min(each.not_valid_after_utc.timestamp() for each in chain)


def check_p384(certificate: x509.Certificate, data: bytes, r: int, s: int, what: str) -> None:
    """Check an ECDSA signature with SHA-384 by the key of `certificate`.

    Raises `AttestationError`, which names `what`.
    """
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise AttestationError("certificate", f"the key that signs {what} is none on P-384")
    try:
        key.verify(encode_dss_signature(r, s), data, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise AttestationError(
            "signature", f"{what} is not signed by the key of its certificate"
        ) from None


def _parse(encoded: bytes) -> x509.Certificate:
    try:
        certificate = x509.load_der_x509_certificate(encoded)
        # Parsed now: fields are decoded when they are first read.
        _ = certificate.extensions, certificate.issuer, certificate.subject
        certificate.public_key()
        # A signature whose last bits are declared unused is the same signature.
        has_whole_signature = encoded[: -len(certificate.signature)].endswith(b"\0")
        is_canonical = certificate.public_bytes(Encoding.DER) == encoded and has_whole_signature
    except (
        *(ValueError, TypeError, UnsupportedAlgorithm),
        *(x509.InvalidVersion, x509.DuplicateExtension),
    ) as error:
        raise AttestationError("certificate", f"a certificate is malformed: {error}") from None
    if not is_canonical:
        raise AttestationError("certificate", "a certificate is not encoded as DER")
    return certificate


def _find_root(certificate: x509.Certificate, roots: Sequence[bytes]) -> x509.Certificate:
    for encoded in roots:
        root = _parse(encoded)
        if root.subject == certificate.issuer:
            return root
    raise AttestationError(
        "certificate", f"{_name(certificate)} was not issued by a root that is trusted here"
    )


def _check_validity(certificate: x509.Certificate, now: float) -> None:
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not since.timestamp() <= now <= until.timestamp():
        raise AttestationError(
            "expired",
            f"the certificate of {_name(certificate)} is valid from {since:%Y-%m-%d} to "
            f"{until:%Y-%m-%d}, not at {datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M}",
        )


def _check_issued(certificate: x509.Certificate, issuer: x509.Certificate, depth: int) -> None:
    """Check one step of a chain; `depth` counts the certificates before this one."""
    try:
        constraints = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = issuer.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        raise AttestationError(
            "certificate", f"{_name(issuer)} may not sign certificates"
        ) from None
    too_deep = constraints.path_length is not None and depth > constraints.path_length
    if not constraints.ca or not usage.key_cert_sign or too_deep:
        raise AttestationError("certificate", f"{_name(issuer)} may not sign certificates")
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
        raise AttestationError(
            "certificate", f"the certificate of {_name(certificate)} is not signed by its issuer"
        ) from None


def _name(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string()[:120]
