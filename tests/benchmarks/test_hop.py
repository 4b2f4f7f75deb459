from __future__ import annotations

import pytest

from benchmarks.hop import added_time


def test_hop_is_what_each_node_after_the_first_adds() -> None:
    steady = [1.0] * 100
    times = {1: steady, 3: [2.0] * 98 + [5.0] * 2}
    added = added_time(times, {1: 0.5, 3: 0.9})
    assert added[1] == {"step_p10_s": 1, "step_p50_s": 1, "step_p99_s": 1, "step_cpu_s": 0.5}
    assert added[3]["hop_p10_s"] == added[3]["hop_p50_s"] == 0.5
    assert added[3]["hop_p99_s"] == 2.0
    assert added[3]["hop_cpu_s"] == pytest.approx(0.2)
