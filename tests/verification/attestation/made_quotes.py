"""Reports of AMD and NVIDIA hardware that a test's own root certifies, in the vendors' formats."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID, ObjectIdentifier

from nesa_node.verification.attestation.quotes import Quote

SINCE = datetime(2025, 1, 1, tzinfo=UTC)
UNTIL = SINCE + timedelta(days=365 * 50)
AT = (SINCE + timedelta(days=100)).timestamp()
"""A time at which made quotes hold."""
CHIP_ID = bytes(range(64))
MEASUREMENT = bytes(range(100, 148))
TCB = {"bootloader": 4, "tee": 1, "snp": 23, "microcode": 213}
PLACES = {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7}
AMD = "1.3.6.1.4.1.3704.1."
LEVELS = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8"}

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


class MadeRoot:
    """A root, an intermediate authority, and keys that hardware would hold."""

    def __init__(self, *, is_rsa: bool) -> None:
        self._is_rsa = is_rsa
        self._root_key, self._authority_key = self._new_key(), self._new_key()
        self.root = self._certify("Test Root", self._root_key, "Test Root", self._root_key, ca=True)
        self.authority = self._certify(
            "Test Authority", self._authority_key, "Test Root", self._root_key, ca=True
        )
        self.key = ec.generate_private_key(ec.SECP384R1())

    def save(self, folder: Path) -> None:
        """Write what `load` needs: a program that signs quotes runs in another process."""
        for name, certificate in (("root", self.root), ("authority", self.authority)):
            (folder / f"{name}.der").write_bytes(certificate.public_bytes(Encoding.DER))
        for name, key in (("authority", self._authority_key), ("hardware", self.key)):
            plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            (folder / f"{name}.key").write_bytes(plain)

    @classmethod
    def load(cls, folder: Path) -> MadeRoot:
        made = cls.__new__(cls)
        made.root, made.authority = (
            x509.load_der_x509_certificate((folder / f"{name}.der").read_bytes())
            for name in ("root", "authority")
        )
        authority, hardware = (
            load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
            for name in ("authority", "hardware")
        )
        assert isinstance(authority, rsa.RSAPrivateKey)
        assert isinstance(hardware, ec.EllipticCurvePrivateKey)
        made._authority_key, made.key = authority, hardware
        return made

    @property
    def pem(self) -> str:
        return self.root.public_bytes(Encoding.PEM).decode()

    def leaf(
        self, name: str, extensions: dict[str, bytes], *, until: datetime = UNTIL
    ) -> x509.Certificate:
        return self._certify(
            name,
            self.key,
            "Test Authority",
            self._authority_key,
            extensions=extensions,
            until=until,
        )

    def chain(self, leaf: x509.Certificate) -> tuple[bytes, ...]:
        return tuple(each.public_bytes(Encoding.DER) for each in (leaf, self.authority, self.root))

    def _new_key(self) -> PrivateKey:
        if self._is_rsa:
            return rsa.generate_private_key(65537, 2048)
        return ec.generate_private_key(ec.SECP384R1())

    def _certify(
        self,
        name: str,
        key: PrivateKey,
        issuer: str,
        issuer_key: PrivateKey,
        *,
        ca: bool = False,
        extensions: dict[str, bytes] | None = None,
        until: datetime = UNTIL,
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(SINCE)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(_usage(ca=ca), critical=True)
        )
        for oid, value in (extensions or {}).items():
            extension = x509.UnrecognizedExtension(ObjectIdentifier(oid), value)
            builder = builder.add_extension(extension, critical=False)
        if isinstance(issuer_key, rsa.RSAPrivateKey):
            scheme = padding.PSS(mgf=padding.MGF1(hashes.SHA384()), salt_length=48)
            return builder.sign(issuer_key, hashes.SHA384(), rsa_padding=scheme)
        return builder.sign(issuer_key, hashes.SHA384())


@cache
def snp_root() -> MadeRoot:
    return MadeRoot(is_rsa=True)


@cache
def nvidia_root() -> MadeRoot:
    return MadeRoot(is_rsa=False)


def snp_certificate(
    *,
    chip_id: bytes = CHIP_ID,
    tcb: dict[str, int] = TCB,
    product: str = "Milan-B0",
    cloud: bytes = b"",
    until: datetime = UNTIL,
    root: MadeRoot | None = None,
) -> x509.Certificate:
    """A VCEK's certificate, or with `cloud` a VLEK's."""
    extensions = {f"{AMD}2": bytes((0x16, len(product))) + product.encode()}
    for part, level in tcb.items():
        number = level.to_bytes(2 if level > 127 else 1, "big")
        extensions[AMD + LEVELS[part]] = bytes((2, len(number))) + number
    extensions |= {f"{AMD}5": cloud} if cloud else {f"{AMD}4": chip_id}
    name = "SEV-VLEK" if cloud else "SEV-VCEK"
    return (root or snp_root()).leaf(name, extensions, until=until)


def snp_quote(
    report_data: bytes,
    *,
    policy: int = 0x30000,
    version: int = 3,
    signer: int = 0,
    certificate: x509.Certificate | None = None,
    root: MadeRoot | None = None,
) -> Quote:
    """A SEV-SNP report, laid out as AMD 56860 says, under `root` or `snp_root`."""
    root = root or snp_root()
    body = bytearray(0x2A0)
    body[0:4] = version.to_bytes(4, "little")
    body[8:16] = policy.to_bytes(8, "little")
    body[0x34] = 1
    body[0x48:0x4C] = (signer << 2).to_bytes(4, "little")
    body[0x50:0x90] = report_data
    body[0x90:0xC0] = MEASUREMENT
    for part, at in PLACES.items():
        body[0x180 + at] = TCB[part]
    body[0x1A0:0x1E0] = CHIP_ID
    r, s = decode_dss_signature(root.key.sign(bytes(body), ec.ECDSA(hashes.SHA384())))
    signature = r.to_bytes(72, "little") + s.to_bytes(72, "little") + bytes(368)
    chain = root.chain(certificate or snp_certificate(root=root))
    return Quote("snp", bytes(body) + signature, chain)


def nvidia_quote(
    nonce: bytes, *, name: str = "GH100 A01 GSP FMC LF", firmware: bytes = b"f" * 48
) -> Quote:
    """A GPU's report with two measurements, laid out as SPDM 1.1 says, under `nvidia_root`."""
    request = b"\x11\xe0\x01\xff" + nonce + b"\0"
    record = b"".join(
        bytes((index, 1)) + (51).to_bytes(2, "little") + b"\1" + (48).to_bytes(2, "little") + value
        for index, value in ((1, b"a" * 48), (2, b"b" * 48))
    )
    opaque = b"".join(
        number.to_bytes(2, "little") + len(value).to_bytes(2, "little") + value
        for number, value in ((3, b"550.90.07\0"), (6, b"\x01\x02"), (20, b"f" * 48), (11, b"U"))
    )
    response = (
        b"\x11\x60\0\0\x02"
        + len(record).to_bytes(3, "little")
        + record
        + bytes(32)
        + len(opaque).to_bytes(2, "little")
        + opaque
    )
    root = nvidia_root()
    r, s = decode_dss_signature(root.key.sign(request + response, ec.ECDSA(hashes.SHA384())))
    report = request + response + r.to_bytes(48, "big") + s.to_bytes(48, "big")
    leaf = root.leaf(name, {"2.23.133.5.4.1": b"0" + firmware})
    return Quote("nvidia", report, root.chain(leaf))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        **dict.fromkeys(
            (
                *("content_commitment", "key_encipherment", "data_encipherment"),
                *("key_agreement", "encipher_only", "decipher_only"),
            ),
            False,
        ),
    )
