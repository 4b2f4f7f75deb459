"""The check of a node's quotes: genuine, in an accepted state, and about this node and model."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from nesa_node.core.errors import AttestationError
from nesa_node.verification.attestation.amd import verify_snp
from nesa_node.verification.attestation.binding import report_data
from nesa_node.verification.attestation.intel import verify_intel
from nesa_node.verification.attestation.nvidia import verify_nvidia
from nesa_node.verification.attestation.policy import AttestationPolicy, KindPolicy, roots_of
from nesa_node.verification.attestation.quotes import Quote, QuoteKind, VerifiedQuote


def check_attestation(
    quotes: Sequence[Quote],
    node_key: bytes,
    nonce: bytes,
    weights_root: bytes,
    policy: AttestationPolicy,
    now: float,
) -> tuple[VerifiedQuote, ...]:
    """Check that quotes satisfy all kinds of one of the policy's alternatives, and return these.

    `node_key` is the node's public key (32 bytes), `nonce` what this client sent, `now` Unix time.
    Raises the `AttestationError` of the alternative whose kinds the node has, else of the first.
    """
    expected = report_data(node_key, nonce, weights_root)
    errors: list[AttestationError] = []
    for alternative in policy.accept:
        try:
            return _check_alternative(quotes, expected, alternative, now)
        except AttestationError as error:
            errors.append(error)
    raise next((each for each in errors if each.fault != "absent"), errors[0])


def verify_quote(quote: Quote, rule: KindPolicy, now: float) -> VerifiedQuote:
    """Check signatures, dates and status of a quote, whatever it was made for.

    Raises `AttestationError`.
    """
    roots = roots_of(quote.kind, rule)
    if quote.kind == "snp":
        found = verify_snp(quote, roots, now, rule.minimum)
    elif quote.kind == "nvidia":
        found = verify_nvidia(quote, roots, now)
    else:
        found = verify_intel(quote, roots, now)
    if found.status not in rule.accepted_statuses:
        raise AttestationError(
            "status",
            f"the state of the {quote.kind} platform is {found.status}, which the policy does not "
            "accept",
        )
    return found


def _check_alternative(
    quotes: Sequence[Quote], expected: bytes, kinds: Mapping[QuoteKind, KindPolicy], now: float
) -> tuple[VerifiedQuote, ...]:
    by_kind = {quote.kind: quote for quote in quotes}
    if missing := sorted(set(kinds) - set(by_kind)):
        given = ", ".join(sorted(by_kind)) or "none"
        raise AttestationError(
            "absent", f"quotes of {', '.join(missing)} are required; the node has {given}"
        )
    return tuple(_check_one(by_kind[kind], expected, rule, now) for kind, rule in kinds.items())


def _check_one(quote: Quote, expected: bytes, rule: KindPolicy, now: float) -> VerifiedQuote:
    found = verify_quote(quote, rule, now)
    if not hmac.compare_digest(found.report_data, expected[: len(found.report_data)]):
        raise AttestationError(
            "binding", f"the {quote.kind} quote is not about this node, nonce and weights"
        )
    for name, accepted in rule.measurements.items():
        value = found.measurements.get(name)
        if value is None or value.lower() not in accepted:
            known = ", ".join(sorted(found.measurements)[:20])
            raise AttestationError(
                "measurement",
                f"{quote.kind}: measurement {name!r} is {value}, which the policy does not list"
                if value is not None
                else f"{quote.kind}: there is no measurement {name!r}; there are {known}",
            )
    return found
