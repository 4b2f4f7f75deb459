"""Speeds that nodes claim."""

from __future__ import annotations

import math

import pytest

from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.reputation import (
    MAX_CLAIM_RATIO,
    MEASUREMENT_TTL_S,
    MIN_CORROBORATION,
    REPORTABLE_RATIO,
    SpeedClaims,
)
from nesa_node.topology.snapshot import NodeState

A = PeerId("a")
LIAR = NodeState(A, Span(0, 4), decode_tokens_per_s=1000.0, prefill_tokens_per_s=50_000.0)


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_claim_far_above_what_was_measured_is_cut_for_a_while() -> None:
    clock = _Clock()
    claims = SpeedClaims(clock)
    assert claims.clamp(LIAR) is LIAR
    assert claims.measurement_age_s(A) == math.inf
    claims.record_measurement(A, 10.0)
    believed = claims.clamp(LIAR)
    assert believed.decode_tokens_per_s == pytest.approx(10.0 * MAX_CLAIM_RATIO)
    assert believed.prefill_tokens_per_s == pytest.approx(500.0 * MAX_CLAIM_RATIO)
    clock.now = MEASUREMENT_TTL_S + 1
    assert claims.clamp(LIAR) is LIAR


def test_an_honest_claim_stays_as_it_is() -> None:
    claims = SpeedClaims(_Clock())
    claims.record_measurement(A, 900.0)
    assert claims.clamp(LIAR) is LIAR
    claims.record_measurement(A, 5000.0)
    assert claims.clamp(LIAR) is LIAR


def test_a_claim_that_trusted_others_call_a_lie_is_cut_once_and_for_a_while() -> None:
    clock = _Clock()
    claims = SpeedClaims(clock)
    claims.record_reports(LIAR, MIN_CORROBORATION / 2)
    assert claims.clamp(LIAR) is LIAR
    for _ in range(3):
        claims.record_reports(LIAR, 2.0)
        assert claims.clamp(LIAR).decode_tokens_per_s == pytest.approx(1000.0 / REPORTABLE_RATIO)
    clock.now = MEASUREMENT_TTL_S + 1
    assert claims.clamp(LIAR) is LIAR


def test_what_was_measured_here_counts_more_than_reports() -> None:
    claims = SpeedClaims(_Clock())
    claims.record_measurement(A, 900.0)
    claims.record_reports(LIAR, 3.0)
    assert claims.clamp(LIAR) is LIAR


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan])
def test_no_speed_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="no speed"):
        SpeedClaims(_Clock()).record_measurement(A, speed)
