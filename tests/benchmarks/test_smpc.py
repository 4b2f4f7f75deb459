"""A model split among one and two daemons: the same tokens, and bytes of hidden states alone."""

from __future__ import annotations

import pytest

from benchmarks.smpc import QUICK, measure_splits


@pytest.mark.slow
def test_bytes_of_a_token_are_those_of_hidden_states_at_each_length() -> None:
    rows = measure_splits(QUICK)
    assert [row["splits"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["tokens_equal"]
        assert len(row["tokens_per_s"]) == 3
        # A token's states may be counted with the token before it.
        for each in row["wire_bytes"]:
            assert each == pytest.approx(row["wire_bytes_by_arithmetic"], rel=0.2)
