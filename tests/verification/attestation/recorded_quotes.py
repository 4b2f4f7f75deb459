"""Quotes of real hardware in `recorded/`, each with a time at which it held (see its README)."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from nesa_node.verification.attestation.policy import KindPolicy
from nesa_node.verification.attestation.quotes import Collateral, Quote

FOLDER = Path(__file__).parent / "recorded"
SNP_AT = datetime.fromisoformat("2022-09-25T00:00:00+00:00").timestamp()
NVIDIA_AT = datetime.fromisoformat("2024-09-01T00:00:00+00:00").timestamp()
NAMES = ("sgx_quote", "tdx_quote", "tdx_quote_td15ex", "snp_report", "nvidia_report")
STATUSES = {
    "sgx_quote": "ConfigurationAndSWHardeningNeeded",
    "tdx_quote": "UpToDate",
    "tdx_quote_td15ex": "UpToDate",
    "snp_report": "Debug",
    "nvidia_report": "Genuine",
}


@cache
def recorded(name: str) -> tuple[Quote, float]:
    """A recorded quote and a time at which it held."""
    report = (FOLDER / f"{name}.bin").read_bytes()
    if name == "snp_report":
        files = ("snp_vcek.der", "snp_ask.der")
        return Quote("snp", report, tuple((FOLDER / each).read_bytes() for each in files)), SNP_AT
    if name == "nvidia_report":
        chain = x509.load_pem_x509_certificates((FOLDER / "nvidia_chain.pem").read_bytes())
        der = tuple(each.public_bytes(Encoding.DER) for each in chain)
        return Quote("nvidia", report, der), NVIDIA_AT
    found = json.loads((FOLDER / f"{name}.json").read_text())
    collateral = Collateral(
        root_ca_crl=bytes.fromhex(found["root_ca_crl"]),
        pck_crl=bytes.fromhex(found["pck_crl"]),
        tcb_info_issuer_chain=found["tcb_info_issuer_chain"],
        tcb_info=found["tcb_info"],
        tcb_info_signature=bytes.fromhex(found["tcb_info_signature"]),
        qe_identity_issuer_chain=found["qe_identity_issuer_chain"],
        qe_identity=found["qe_identity"],
        qe_identity_signature=bytes.fromhex(found["qe_identity_signature"]),
    )
    issued = max(
        datetime.fromisoformat(json.loads(found[part])["issueDate"]).timestamp()
        for part in ("tcb_info", "qe_identity")
    )
    return Quote("sgx" if name == "sgx_quote" else "tdx", report, (), collateral), issued + 86_400


def lenient_rule(name: str) -> KindPolicy:
    """A rule that admits the recorded quote's own status."""
    return KindPolicy(
        measurements={"any": ("any",)},
        statuses=frozenset({STATUSES[name]}) - {"UpToDate", "Genuine"},
    )
