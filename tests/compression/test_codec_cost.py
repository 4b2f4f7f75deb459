from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, cycle

import pytest
import torch

from nesa_node.compression.codec_cost import measure_codec_cost


def clock_of(*waits_s: float) -> Callable[[], float]:
    """A clock that goes on by these at each call, over and over."""
    times: Iterator[float] = accumulate(cycle(waits_s))
    return lambda: next(times)


def test_a_message_and_a_byte_are_told_apart() -> None:
    # Six messages of one token (encode 2 ms, copy 1 ms, decode 1 ms), then six of 1 MiB.
    short, long = (0.5, 0.002, 0.001, 0.001), (0.5, 0.012, 0.001, 0.005)
    waits_s = (*short * 6, *long * 6)
    cost = measure_codec_cost(
        "int8", hidden_size=256, dtype=torch.float32, clock=clock_of(*waits_s)
    )
    between = (1 << 20) - 1024
    assert cost.encode_s_per_byte == pytest.approx(0.010 / between)
    assert cost.decode_s_per_byte == pytest.approx(0.004 / between)
    assert cost.encode_message_s == pytest.approx(0.002 - 1024 * 0.010 / between)
    assert cost.seconds(1 << 20) == pytest.approx(0.012 + 0.005)


def test_the_best_run_counts_and_the_first_does_not() -> None:
    waits_s = (0.0, 0.0, 0.0, 0.0) + (0.0, 0.003, 0.0, 0.003) * 4 + (0.0, 0.002, 0.0, 0.001)
    cost = measure_codec_cost(
        "none", hidden_size=64, dtype=torch.bfloat16, clock=clock_of(*waits_s)
    )
    assert cost.encode_s_per_byte == pytest.approx(0, abs=1e-12)
    assert cost.encode_message_s == pytest.approx(0.002)
    assert cost.decode_message_s == pytest.approx(0.001)


@pytest.mark.parametrize("codec", ["none", "float16", "int8", "int4", "lossless"])
def test_it_measures_real_codecs(codec: str) -> None:
    cost = measure_codec_cost(codec, hidden_size=576, dtype=torch.bfloat16)
    assert 0 < cost.seconds(1 << 20) < 5
