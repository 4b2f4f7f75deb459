"""Quotes under a test's root: bound to node, nonce and weights, else refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.errors import AttestationError, ConfigError
from nesa_node.verification.attestation.binding import report_data, weights_root
from nesa_node.verification.attestation.check import check_attestation, verify_quote
from nesa_node.verification.attestation.policy import AttestationPolicy, KindPolicy, read_policy
from nesa_node.verification.attestation.quotes import Quote, VerifiedQuote
from tests.verification.attestation.made_quotes import (
    AT,
    CHIP_ID,
    MEASUREMENT,
    SINCE,
    TCB,
    nvidia_quote,
    nvidia_root,
    snp_certificate,
    snp_quote,
    snp_root,
)
from tests.verification.attestation.recorded_quotes import recorded

KEY, NONCE, WEIGHTS = b"k" * 32, b"n" * 32, b"w" * 32
BOUND = report_data(KEY, NONCE, WEIGHTS)


def snp_rule(**changes: Any) -> dict[str, Any]:
    return {
        "measurements": {"measurement": [MEASUREMENT.hex().upper(), "00" * 48]},
        "roots": snp_root().pem,
        **changes,
    }


def nvidia_rule(**changes: Any) -> dict[str, Any]:
    return {
        "measurements": {"1": ["61" * 48], "driver_version": ["550.90.07"]},
        "roots": nvidia_root().pem,
        **changes,
    }


def policy(*alternatives: dict[str, Any]) -> AttestationPolicy:
    return AttestationPolicy.model_validate({"accept": alternatives or ({"snp": snp_rule()},)})


def check(
    *quotes: Quote, accept: AttestationPolicy | None = None, now: float = AT
) -> tuple[VerifiedQuote, ...]:
    return check_attestation(quotes, KEY, NONCE, WEIGHTS, accept or policy(), now)


def fault_of(*quotes: Quote, accept: AttestationPolicy | None = None, now: float = AT) -> str:
    with pytest.raises(AttestationError) as caught:
        check(*quotes, accept=accept, now=now)
    assert str(caught.value)
    return caught.value.fault


def test_bound_report_of_a_test_root_passes() -> None:
    (found,) = check(snp_quote(BOUND))
    assert found.measurements["measurement"] == MEASUREMENT.hex()
    assert (found.status, found.report_data) == ("Genuine", BOUND)


def test_bound_gpu_report_of_a_test_root_passes() -> None:
    (found,) = check(nvidia_quote(BOUND[:32]), accept=policy({"nvidia": nvidia_rule()}))
    assert found.measurements["2"] == "62" * 48


def test_vendor_roots_do_not_trust_a_test_root() -> None:
    rules = policy({"snp": snp_rule(roots=None)}), policy({"nvidia": nvidia_rule(roots=None)})
    assert fault_of(snp_quote(BOUND), accept=rules[0]) == "certificate"
    assert fault_of(nvidia_quote(BOUND[:32]), accept=rules[1]) == "certificate"


@pytest.mark.parametrize("part", range(3))
def test_another_node_nonce_or_model_is_refused(part: int) -> None:
    parts = [KEY, NONCE, WEIGHTS]
    parts[part] = bytes([parts[part][0] ^ 1]) + parts[part][1:]
    data = report_data(*parts)
    assert fault_of(snp_quote(data)) == "binding"
    gpu = policy({"nvidia": nvidia_rule()})
    assert fault_of(nvidia_quote(data[:32]), accept=gpu) == "binding"


def test_parts_of_the_binding_cannot_be_moved() -> None:
    assert report_data(b"ab", b"c", b"d") != report_data(b"a", b"bc", b"d")
    assert report_data(b"", b"ab", b"") != report_data(b"ab", b"", b"")
    assert len(BOUND) == 64


@pytest.mark.parametrize(
    ("quote", "fault"),
    [
        (lambda: snp_quote(BOUND, policy=0xB0000), "status"),
        (lambda: snp_quote(BOUND, version=1), "malformed"),
        (lambda: snp_quote(BOUND, version=6), "malformed"),
        (lambda: snp_quote(BOUND, signer=1), "certificate"),
        (lambda: snp_quote(BOUND, signer=7), "signature"),
        (lambda: snp_quote(BOUND, certificate=snp_certificate(cloud=b"cloud")), "certificate"),
        (lambda: snp_quote(BOUND, certificate=snp_certificate(product="Zen")), "certificate"),
        (
            lambda: snp_quote(BOUND, certificate=snp_certificate(chip_id=CHIP_ID[::-1])),
            "certificate",
        ),
        (
            lambda: snp_quote(BOUND, certificate=snp_certificate(tcb=TCB | {"microcode": 214})),
            "certificate",
        ),
        (
            lambda: snp_quote(BOUND, certificate=snp_certificate(until=SINCE + timedelta(days=1))),
            "expired",
        ),
        (lambda: replace(snp_quote(BOUND), report=snp_quote(BOUND).report[:-1]), "malformed"),
        (lambda: replace(snp_quote(BOUND), report=b""), "malformed"),
        (lambda: replace(snp_quote(BOUND), certificates=()), "certificate"),
        (lambda: replace(snp_quote(BOUND), certificates=(b"0",)), "certificate"),
        (
            lambda: replace(snp_quote(BOUND), certificates=snp_quote(BOUND).certificates[1:]),
            "certificate",
        ),
        (
            lambda: replace(snp_quote(BOUND), certificates=snp_quote(BOUND).certificates * 3),
            "certificate",
        ),
        (lambda: replace(nvidia_quote(BOUND[:32]), kind="snp"), "malformed"),
    ],
)
def test_other_reports_are_refused(quote: Any, fault: str) -> None:
    assert fault_of(quote()) == fault


@pytest.mark.parametrize(
    "quote",
    [
        lambda: nvidia_quote(BOUND[:32], name="LS10 switch"),
        lambda: nvidia_quote(BOUND[:32], firmware=b"g" * 48),
        lambda: replace(
            nvidia_quote(BOUND[:32]), certificates=nvidia_quote(BOUND[:32]).certificates[1:]
        ),
    ],
)
def test_other_gpu_certificates_are_refused(quote: Any) -> None:
    assert fault_of(quote(), accept=policy({"nvidia": nvidia_rule()})) == "certificate"


def test_key_of_the_hardware_may_not_certify_other_keys() -> None:
    """Its own certificate as an authority: a chain that is one longer."""
    quote = snp_quote(BOUND)
    longer = replace(quote, certificates=(quote.certificates[0], *quote.certificates))
    assert fault_of(longer) == "certificate"


def test_report_of_a_loaded_key_passes() -> None:
    quote = snp_quote(BOUND, signer=1, certificate=snp_certificate(cloud=b"\x16\5cloud"))
    check(quote)


def test_debugged_guest_passes_where_admitted() -> None:
    (found,) = check(
        snp_quote(BOUND, policy=0xB0000), accept=policy({"snp": snp_rule(statuses=["Debug"])})
    )
    assert found.status == "Debug"


def test_other_software_is_refused() -> None:
    rule = snp_rule(measurements={"measurement": ["00" * 48]})
    assert fault_of(snp_quote(BOUND), accept=policy({"snp": rule})) == "measurement"
    rule = snp_rule(measurements={"mr_td": ["00" * 48]})
    assert fault_of(snp_quote(BOUND), accept=policy({"snp": rule})) == "measurement"


def test_older_firmware_than_the_minimum_is_refused() -> None:
    check(snp_quote(BOUND), accept=policy({"snp": snp_rule(minimum={"microcode": 213})}))
    rule = snp_rule(minimum={"microcode": 214})
    assert fault_of(snp_quote(BOUND), accept=policy({"snp": rule})) == "status"
    rule = snp_rule(minimum={"fmc": 0})
    assert fault_of(snp_quote(BOUND), accept=policy({"snp": rule})) == "status"


def test_all_kinds_of_one_alternative_are_needed() -> None:
    both = {"snp": snp_rule(), "nvidia": nvidia_rule()}
    cpu, gpu = snp_quote(BOUND), nvidia_quote(BOUND[:32])
    assert [each.kind for each in check(gpu, cpu, accept=policy(both))] == ["snp", "nvidia"]
    assert fault_of(cpu, accept=policy(both)) == "absent"
    assert fault_of(accept=policy(both)) == "absent"
    assert fault_of(cpu, nvidia_quote(bytes(32)), accept=policy(both)) == "binding"
    check(cpu, accept=policy(both, {"snp": snp_rule()}))


def test_error_is_of_the_alternative_that_the_node_has() -> None:
    accept = policy({"nvidia": nvidia_rule()}, {"snp": snp_rule()})
    assert fault_of(snp_quote(bytes(64)), accept=accept) == "binding"


def test_tdx_quote_needs_collateral_and_its_own_kind() -> None:
    pytest.importorskip("dcap_qvl")
    quote, now = recorded("tdx_quote")
    rule = KindPolicy(measurements={"mr_td": ("00",)})
    with pytest.raises(AttestationError, match="without collateral"):
        verify_quote(replace(quote, collateral=None), rule, now)
    with pytest.raises(AttestationError, match="not one of SGX"):
        verify_quote(replace(quote, kind="sgx"), rule, now)


@pytest.mark.parametrize("name", ["tdx_quote", "tdx_quote_td15ex", "sgx_quote"])
def test_cut_quotes_are_refused(name: str) -> None:
    pytest.importorskip("dcap_qvl")
    quote, now = recorded(name)
    rule = KindPolicy(measurements={"any": ("any",)})
    for size in range(0, len(quote.report.rstrip(b"\0")) - 1, 7):
        with pytest.raises(AttestationError):
            verify_quote(replace(quote, report=quote.report[:size]), rule, now)


def test_weights_root_is_a_tree_over_sorted_names() -> None:
    digests = {"b": b"2" * 32, "a": b"1" * 32, "c": b"3" * 32}

    def hashed(kind: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=32, person=kind).digest()

    a, b, c = (
        hashed(b"tensor", (1).to_bytes(4, "big") + name.encode() + digests[name]) for name in "abc"
    )
    expected = hashed(b"root", (3).to_bytes(8, "big") + c + hashed(b"node", a + b))
    assert weights_root(digests) == expected
    assert weights_root(digests | {"c": b"4" * 32}) != expected
    assert weights_root({"x": b"1" * 32} | digests) != expected


def test_policy_is_read_from_json_and_toml(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(json.dumps({"accept": [{"snp": snp_rule()}]}))
    toml = f"""
        unknown_weights = true
        [[accept]]
        [accept.snp]
        roots = '''{snp_root().pem}'''
        measurements = {{ measurement = ["{MEASUREMENT.hex()}"] }}
        [accept.snp.minimum]
        bootloader = 4
    """
    (tmp_path / "policy.toml").write_text(toml)
    for name in ("policy.json", "policy.toml"):
        check(snp_quote(BOUND), accept=read_policy(tmp_path / name))
    assert read_policy(tmp_path / "policy.toml").unknown_weights


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "neither JSON nor TOML"),
        ("[]", "wrong at the file"),
        ("[" * 100_000, "neither JSON nor TOML"),
        ("{}", "wrong at accept: Field required"),
        ('{"accept": []}', "wrong at accept"),
        ('{"accept": [{}]}', "names no kind of quote"),
        ('{"accept": [{"sev": {}}]}', "wrong at accept.0.sev"),
        ('{"accept": [{"snp": {}}]}', "measurements: Field required"),
        ('{"accept": [{"snp": {"measurements": {}}}]}', "wrong at accept.0.snp.measurements"),
        ('{"accept": [{"snp": {"measurements": {"a": []}}}]}', "measurements.a"),
        (
            '{"accept": [{"tdx": {"measurements": {"a": ["b"]}, "statuses": ["Revoked"]}}]}',
            "statuses Revoked are unknown",
        ),
        (
            '{"accept": [{"tdx": {"measurements": {"a": ["b"]}, "minimum": {"snp": 1}}}]}',
            "only snp has a minimum",
        ),
        (
            '{"accept": [{"tdx": {"measurements": {"a": ["b"]}, "roots": "x"}}]}',
            "tdx: roots:",
        ),
        ('{"accept": [{"snp": {"measurements": {"a": ["b"]}, "mesurements": 1}}]}', "mesurements"),
    ],
)
def test_wrong_policy_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"policy\.json") as caught:
        read_policy(path)
    assert message in str(caught.value)


def test_missing_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_policy(tmp_path / "none.json")
