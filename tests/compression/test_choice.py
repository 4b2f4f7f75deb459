from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.compression.codec_cost import (
    MAX_TIME_RATIO,
    PLAIN_COST,
    UNCOMPRESSED_BYTES_PER_S,
    CodecLinkCost,
    fastest_codec,
    fastest_seconds,
)

COSTS = {
    "none": PLAIN_COST,
    "lossless": CodecLinkCost(5e-5, 8e-9, 0.8),
    "int8@2:16:8": CodecLinkCost(1e-4, 2e-9, 0.27),
    "int4@2:32:48": CodecLinkCost(2e-4, 6e-9, 0.16),
}
NAMES = tuple(COSTS)
MEGABIT = 1e6 / 8


def test_nothing_is_compressed_at_the_speed_of_loopback() -> None:
    assert fastest_codec(NAMES, 1 << 20, 1e9, COSTS) == "none"


def test_a_long_prompt_is_compressed_on_a_slow_uplink() -> None:
    assert fastest_codec(NAMES, 1 << 20, 20 * MEGABIT, COSTS) == "int4@2:32:48"
    assert fastest_codec(NAMES[:3], 1 << 20, 20 * MEGABIT, COSTS) == "int8@2:16:8"


def test_a_token_is_sent_as_it_is_where_compressing_takes_longer_than_sending() -> None:
    assert fastest_codec(NAMES, 2048, 1000 * MEGABIT, COSTS) == "none"


def test_an_equal_choice_is_the_plainest() -> None:
    assert (
        fastest_codec(("none", "same"), 1 << 20, MEGABIT, {"none": PLAIN_COST, "same": PLAIN_COST})
        == "none"
    )


@given(st.integers(1, 1 << 24), st.floats(1e3, UNCOMPRESSED_BYTES_PER_S, exclude_max=True))
def test_no_other_candidate_is_much_sooner(nbytes: int, rate: float) -> None:
    chosen = COSTS[fastest_codec(NAMES, nbytes, rate, COSTS)]
    for cost in COSTS.values():
        at_best = cost.fixed_s + cost.per_byte_s * nbytes + cost.ratio * nbytes / rate
        taken = chosen.fixed_s + chosen.per_byte_s * nbytes + chosen.ratio * nbytes / rate
        assert MAX_TIME_RATIO * taken <= at_best * (1 + 1e-12)


def test_a_codec_has_to_save_a_tenth_since_rates_are_estimates() -> None:
    for ratio, chosen in ((0.92, "none"), (0.85, "smaller")):
        costs = {"none": PLAIN_COST, "smaller": CodecLinkCost(0.0, 0.0, ratio)}
        assert fastest_codec(("none", "smaller"), 1 << 20, 1e6, costs) == chosen


def test_links_of_50_megabytes_a_second_and_more_carry_tensors_as_they_are() -> None:
    costs = {"none": PLAIN_COST, "free": CodecLinkCost(0.0, 0.0, 0.1)}
    assert fastest_codec(("none", "free"), 1 << 20, 50e6, costs) == "none"
    assert fastest_codec(("none", "free"), 1 << 20, 49e6, costs) == "free"


@given(
    st.integers(0, 1 << 24), st.lists(st.floats(1e3, 1e9), min_size=1), st.integers(1, len(NAMES))
)
def test_seconds_at_many_rates_are_those_of_the_codec_chosen_at_each(
    nbytes: int, rates: list[float], count: int
) -> None:
    costs = [COSTS[name] for name in NAMES[:count]]
    expected = [
        COSTS[fastest_codec(NAMES[:count], nbytes, rate, COSTS)].seconds(nbytes, rate)
        for rate in rates
    ]
    assert fastest_seconds(costs, nbytes, np.array(rates)).tolist() == expected


def test_the_only_codec_is_used_at_any_rate() -> None:
    seconds = fastest_seconds([COSTS["int8@2:16:8"]], 1e6, np.array([1e6, 1e9]))
    assert seconds == pytest.approx([1e-4 + 2e-3 + 0.27, 1e-4 + 2e-3 + 0.27e-3])
