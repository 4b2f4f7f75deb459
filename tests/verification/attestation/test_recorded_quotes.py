"""Quotes of real hardware hold at their own time, in no other state, and with no bit changed."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from importlib.resources import files
from typing import Any

import pytest

from nesa_node.core.errors import AttestationError
from nesa_node.verification.attestation.check import check_attestation, verify_quote
from nesa_node.verification.attestation.policy import AttestationPolicy, KindPolicy, roots_of
from nesa_node.verification.attestation.quotes import Collateral, Quote
from tests.verification.attestation.recorded_quotes import NAMES, STATUSES, lenient_rule, recorded

pytest.importorskip("dcap_qvl", reason="quotes of Intel need the extra `attestation`")

pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")

FLIPS = 1000
DAY_S = 86_400.0

FACTS = {
    "sgx_quote": ("mr_enclave", "33d8736db756ed4997e04ba358d27833188f1932ff7b1d156904d3f560452fbb"),
    "tdx_quote": (
        "mr_td",
        "91eb2b44d141d4ece09f0c75c2c53d247a3c68edd7fafe8a35"
        "20c942a604a407de03ae6dc5f87f27428b2538873118b7",
    ),
    "tdx_quote_td15ex": ("vmid", "0"),
    "snp_report": (
        "measurement",
        "b07af9620f3b839b47996422ddec6058338951d984e3121151"
        "31ea82705eaf5b6bdf8a9ece31a5a608eb0cf2e4872b01",
    ),
    "nvidia_report": ("driver_version", "550.90.07"),
}
"""One field of each, as the files' publishers print it."""


@pytest.mark.parametrize("name", NAMES)
def test_holds_at_its_own_time(name: str) -> None:
    quote, now = recorded(name)
    found = verify_quote(quote, lenient_rule(name), now)
    field, value = FACTS[name]
    assert (found.kind, found.status) == (quote.kind, STATUSES[name])
    assert found.measurements[field] == value
    assert found.report_data in quote.report
    assert found.valid_until > now


@pytest.mark.parametrize("name", NAMES)
def test_does_not_hold_before_and_after(name: str) -> None:
    quote, now = recorded(name)
    until = verify_quote(quote, lenient_rule(name), now).valid_until
    for other in (now - 15 * 365 * DAY_S, until + 1):
        if other > 253402300799:  # no clock shows it: NVIDIA's certificates end with the year 9999
            continue
        with pytest.raises(AttestationError) as caught:
            verify_quote(quote, lenient_rule(name), other)
        assert caught.value.fault in ("expired", "signature")


@pytest.mark.parametrize(
    "name", [name for name in NAMES if STATUSES[name] not in ("UpToDate", "Genuine")]
)
def test_worse_status_needs_to_be_admitted(name: str) -> None:
    quote, now = recorded(name)
    with pytest.raises(AttestationError, match=STATUSES[name]) as caught:
        verify_quote(quote, KindPolicy(measurements={"any": ("any",)}), now)
    assert caught.value.fault == "status"


@pytest.mark.parametrize("name", NAMES)
def test_is_not_about_our_nodes(name: str) -> None:
    quote, now = recorded(name)
    field, value = FACTS[name]
    rule = lenient_rule(name).model_copy(update={"measurements": {field: (value,)}})
    policy = AttestationPolicy(accept=({quote.kind: rule},))
    with pytest.raises(AttestationError) as caught:
        check_attestation((quote,), b"k" * 32, b"n" * 32, b"w" * 32, policy, now)
    assert caught.value.fault == "binding"


def test_intel_root_is_the_one_that_the_library_trusts() -> None:
    import dcap_qvl

    quote, now = recorded("tdx_quote")
    assert quote.collateral is not None
    values = {each.name: getattr(quote.collateral, each.name) for each in fields(Collateral)}
    collateral = dcap_qvl.QuoteCollateralV3(pck_crl_issuer_chain="", **values)
    policy = dcap_qvl.QuotePolicy.claims_only(int(now))
    ours, theirs = (
        json.loads(
            dcap_qvl.QuoteVerifier(root)
            .verify_with_policy(quote.report, collateral, int(now), policy)
            .to_json()
        )
        for root in (*roots_of("tdx", lenient_rule("tdx_quote")), None)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_other_roots_are_not_trusted(name: str) -> None:
    quote, now = recorded(name)
    other = "snp.pem" if quote.kind != "snp" else "nvidia.pem"
    pem = (files("nesa_node.verification.attestation") / "roots" / other).read_text()
    rule = lenient_rule(name).model_copy(update={"roots": pem})
    with pytest.raises(AttestationError) as caught:
        verify_quote(quote, rule, now)
    assert caught.value.fault == "certificate"


@pytest.mark.parametrize("name", NAMES)
def test_no_bit_of_a_report_is_free(name: str) -> None:
    """Of the whole report: padding and lengths, which no signature covers, included."""
    quote, now = recorded(name)
    rng = random.Random(name)
    for _ in range(FLIPS):
        flipped = replace(quote, report=_flip(quote.report, rng))
        with pytest.raises(AttestationError):
            verify_quote(flipped, lenient_rule(name), now)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_byte_of_a_report_is_free(name: str) -> None:
    quote, now = recorded(name)
    rng = random.Random(name)
    for at in range(len(quote.report)):
        changed = bytearray(quote.report)
        changed[at] ^= rng.randrange(1, 256)
        with pytest.raises(AttestationError):
            verify_quote(replace(quote, report=bytes(changed)), lenient_rule(name), now)


@pytest.mark.parametrize("name", ["snp_report", "nvidia_report"])
def test_no_bit_of_a_certificate_is_free(name: str) -> None:
    quote, now = recorded(name)
    rng = random.Random(name)
    for _ in range(FLIPS):
        chain = list(quote.certificates)
        at = rng.randrange(len(chain))
        chain[at] = _flip(chain[at], rng)
        with pytest.raises(AttestationError):
            verify_quote(replace(quote, certificates=tuple(chain)), lenient_rule(name), now)


@pytest.mark.parametrize("name", ["sgx_quote", "tdx_quote", "tdx_quote_td15ex"])
def test_no_bit_of_collateral_is_free(name: str) -> None:
    quote, now = recorded(name)
    rng = random.Random(name)
    for _ in range(FLIPS):
        with pytest.raises(AttestationError):
            verify_quote(_with_flipped_collateral(quote, rng), lenient_rule(name), now)


def _with_flipped_collateral(quote: Quote, rng: random.Random) -> Quote:
    assert quote.collateral is not None
    while True:
        name = rng.choice([each.name for each in fields(Collateral)])
        value: bytes | str = getattr(quote.collateral, name)
        if isinstance(value, bytes):
            changed: dict[str, Any] = {name: _flip(value, rng)}
        else:
            try:
                changed = {name: _flip(value.encode(), rng).decode()}
            except UnicodeDecodeError:
                continue  # no text, so that no message can contain it
        return replace(quote, collateral=replace(quote.collateral, **changed))


def _flip(data: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(data)
    bit = rng.randrange(8 * len(data))
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)
